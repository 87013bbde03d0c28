"""The engines that ``engine="best"`` tried: what became of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["TriedEngine", "tried_in_words"]


@dataclass(frozen=True, slots=True)
class TriedEngine:
    """One engine that a fit tried.

    Attributes:
        engine: its name.
        is_kept: whether its plan is the fitted model's.
        predicted_s: seconds of a step under its plan; ``None`` if it has none.
        seconds: of the fastest real step under its plan; ``None`` if none was run, infinite if none fitted the device.
        failure: why it has no plan; empty if it has one.
    """

    engine: str
    is_kept: bool = False
    predicted_s: float | None = None
    seconds: float | None = None
    failure: str = ""


def tried_in_words(tried: Sequence[TriedEngine]) -> tuple[str, ...]:
    """What a race does not tell: how engines were compared without one, and why some have no plan.

    >>> tried_in_words([TriedEngine("eager", True, 0.25), TriedEngine("compiled", failure="Out of memory.")])
    ("engine='compiled' was tried, and has no plan: Out of memory.",)
    """
    found = []
    planned = [one for one in tried if one.predicted_s is not None]
    if len(planned) > 1 and all(one.seconds is None for one in planned):
        laps = "; ".join(
            f"engine={one.engine!r} {one.predicted_s:.3g} s{' (kept)' if one.is_kept else ''}"
            for one in planned
        )
        found.append(f"Without verify, engines are compared by predicted seconds: {laps}.")
    found += [
        f"engine={one.engine!r} was tried, and has no plan: {one.failure}" for one in tried if one.failure
    ]
    return tuple(found)
