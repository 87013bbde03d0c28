"""Arguments that are something else than what a function takes."""

from __future__ import annotations

from recoup.errors import FitError

__all__ = ["check_given"]


def check_given(given: object, kind: type | tuple[type, ...], what: str) -> None:
    """Refuses an argument of another class, which would end in an error about an attribute.

    Args:
        given: the argument.
        kind: its class, or one of several.
        what: which function takes what, and where to get it.

    Raises:
        FitError: with these words.

    >>> check_given(3, str, "greet takes a name")
    Traceback (most recent call last):
        ...
    recoup.errors.FitError: greet takes a name; got a int.
    """
    if not isinstance(given, kind):
        raise FitError(f"{what}; got a {type(given).__name__}.")
