"""Numbers as callers give them, checked in one way everywhere."""

from __future__ import annotations

import math
import operator
from typing import Any

from recoup.errors import RecoupError

__all__ = ["finite_number", "whole_number"]


def whole_number(what: str, value: Any, error: type[RecoupError]) -> int:
    """A whole number, 0 or more, as an int: Python's and NumPy's integers, but no booleans.

    Args:
        what: how the message begins, such as ``"n must be"``.
        value: what was given.
        error: what to raise for anything else.

    >>> from recoup.errors import PolicyError
    >>> whole_number("n must be", -1, PolicyError)
    Traceback (most recent call last):
    recoup.errors.PolicyError: n must be a whole number, 0 or more; got -1.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number < 0 or isinstance(value, bool):
        raise error(f"{what} a whole number, 0 or more; got {value!r}.")
    return number


def finite_number(what: str, value: Any, error: type[RecoupError]) -> float:
    """A finite number, 0 or more, as a float; the arguments are those of `whole_number`."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise error(f"{what} a finite number, 0 or more; got {value!r}.")
    return number
