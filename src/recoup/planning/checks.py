"""Checks of the numbers and names that problems and graphs are made of."""

from __future__ import annotations

import math

from recoup.errors import PlanningError, ProblemError

__all__ = ["check_bytes", "check_name", "check_seconds", "check_total"]

# All bytes together stay exact as floating-point numbers, which the integer programs work with.
_MOST_BYTES = 2**53
# Sums and products of seconds stay finite, and shares of them above 0.
_LEAST_SECONDS, _MOST_SECONDS = 1e-100, 1e100


def check_bytes(owner: str, *, error: type[PlanningError] = ProblemError, **sizes: int) -> None:
    """Refuses sizes that are no whole numbers of bytes, at least 0."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise error(f"{owner}: {name} must be a whole number of bytes, at least 0; got {size!r}.")


def check_total(owner: str, total_bytes: int, *, error: type[PlanningError] = ProblemError) -> None:
    """Refuses sizes that add up to more than can be counted exactly."""
    if total_bytes > _MOST_BYTES:
        raise error(
            f"{owner}: its sizes add up to {total_bytes} bytes, and the planner counts up to 2**53 ({_MOST_BYTES})."
        )


def check_seconds(
    owner: str, *, unit: str = "seconds", error: type[PlanningError] = ProblemError, **times: float
) -> None:
    """Refuses times (or what else has a unit) that are no finite numbers, or too large or too small to work with."""
    for name, time_s in times.items():
        valid = isinstance(time_s, (int, float)) and not isinstance(time_s, bool)
        if not valid or not 0 <= time_s < math.inf:
            raise error(f"{owner}: {name} must be a finite number of {unit}, at least 0; got {time_s!r}.")
        if time_s and not _LEAST_SECONDS <= time_s <= _MOST_SECONDS:
            raise error(
                f"{owner}: {name} must be 0 or from {_LEAST_SECONDS:g} to {_MOST_SECONDS:g} {unit}; got {time_s!r}."
            )


def check_name(what: str, name: str) -> None:
    """Refuses a name that is none."""
    if not isinstance(name, str) or not name:
        raise ProblemError(f"{what} needs a name that is text and not empty; got {name!r}.")
