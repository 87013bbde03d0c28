"""Checks of the numbers and names that a problem is made of."""

from __future__ import annotations

import math

from recoup.errors import ProblemError

__all__ = ["check_bytes", "check_name", "check_seconds", "check_whole"]


def check_bytes(owner: str, **sizes: int) -> None:
    """Refuses sizes that are no whole numbers of bytes, at least 0."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ProblemError(f"{owner}: {name} must be a whole number of bytes, at least 0; got {size!r}.")


def check_whole(owner: str, **sizes: int) -> None:
    """Refuses sizes that are no whole numbers of bytes; they may be below 0."""
    for name, size in sizes.items():
        if type(size) is not int:
            raise ProblemError(f"{owner}: {name} must be a whole number of bytes; got {size!r}.")


def check_seconds(owner: str, **times: float) -> None:
    """Refuses times that are no finite numbers of seconds."""
    for name, time_s in times.items():
        valid = isinstance(time_s, (int, float)) and not isinstance(time_s, bool)
        if not valid or not math.isfinite(time_s) or time_s < 0:
            raise ProblemError(
                f"{owner}: {name} must be a finite number of seconds, at least 0; got {time_s!r}."
            )


def check_name(what: str, name: str) -> None:
    """Refuses a name that is none."""
    if not isinstance(name, str) or not name:
        raise ProblemError(f"{what} needs a name that is text and not empty; got {name!r}.")
