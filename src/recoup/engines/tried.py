"""The engines that ``engine="best"`` tried, and what became of each; what others could gain where none was tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recoup.engines.verify import Verification
from recoup.plans.model_plan import ModelPlan

__all__ = ["TriedEngine", "most_gain_in_words", "tried_in_words"]

_WORTH = 0.02
"""Where recomputing takes a smaller share of the step, other engines are not worth a word."""


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


def most_gain_in_words(plan: ModelPlan, seen: Verification | None) -> tuple[str, ...]:
    """What other engines could gain over an eager plan, as far as that can be told without compiling anything.

    Captured units run the same kernels, so that the plain step is a bound of theirs. Generated code has other kernels:
    nothing that was measured here bounds it.
    """
    profile = plan.profile
    if profile.engine != "eager" or profile.seconds_are_estimates or plan.keeps_everything:
        return ()
    step_s, plain_s = plan.predicted_s, profile.plain.seconds
    if seen is not None and seen.plain_seconds is not None:
        step_s, plain_s = seen.seconds, seen.plain_seconds
    share = 1 - plain_s / step_s if step_s else 0.0
    if share < _WORTH:
        return ()
    return (
        f"engine='captured', which decides about single operations, can save at most the {100 * share:.0f} % of this"
        " step that recomputing takes; what it and generated code do save, engine='best' measures.",
    )
