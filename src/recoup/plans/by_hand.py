"""What people do by hand, as plans: every unit recomputed, or the first few."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from functools import cache

from recoup.errors import ScheduleError
from recoup.planning import Bound, Plan, Schedule, simulate
from recoup.planning.solvers.base import ALL_SCHEDULES
from recoup.planning.solvers.baselines import BY_HAND, REPLAY
from recoup.planning.solvers.bounds import relaxed_bound
from recoup.plans import tightest
from recoup.plans.model_plan import ModelPlan
from recoup.plans.profile import Profile
from recoup.plans.usable_bytes import usable_bytes

__all__ = ["first_units", "plan_by_hand", "recomputable_units", "recomputing", "usual_plan"]

_LARGE = 0.1
_NEARLY = 100
"""On a GPU peaks may be predicted too high by such a part: blocks are taken to be as large as they can be."""


def recomputable_units(profile: Profile) -> list[int]:
    """The units that can be recomputed as a whole."""
    return [index for index in range(len(profile.units)) if _way(profile, index)]


def recomputing(profile: Profile, units: Collection[int]) -> Schedule:
    """Some units recomputed, each as a whole and by itself; the others kept."""
    return tightest.recomputing(profile.problem, [unit.recipes for unit in profile.units], units)


def _way(profile: Profile, index: int) -> int:
    return tightest.way_to_recompute(profile.problem.units[index], profile.units[index].recipes)


def plan_by_hand(profile: Profile, schedule: Schedule, budget_bytes: int | None = None) -> ModelPlan:
    """A schedule as a plan, under a budget or under its own peak.

    Raises:
        ScheduleError: the schedule is not legal for this step.
    """
    predicted = simulate(profile.problem, schedule)
    most_bytes = predicted.peak_bytes
    if budget_bytes is not None:
        most_bytes = max(most_bytes, usable_bytes(budget_bytes, profile))
    least_s = min(relaxed_bound(profile.problem, most_bytes).seconds, predicted.seconds)
    bound = Bound(least_s, schedules=ALL_SCHEDULES)
    found = Plan(profile.problem, most_bytes, schedule, BY_HAND, bound, predicted)
    return ModelPlan(profile, found, most_bytes if budget_bytes is None else budget_bytes)


def usual_plan(profile: Profile, budget_bytes: int) -> tuple[str, ModelPlan] | None:
    """The usual recipe, with its name: the first large units recomputed, as few as are predicted to fit, or all.

    Large units are what people checkpoint, such as a decoder's layers but not its embedding: those of which a recompute
    frees at least a tenth of what it frees of the largest. Recomputing all of them is the usual recipe where it nearly
    fits, too: a real step may take less, and what fits by prediction there may be much slower.
    """
    freed = {index: _freed_bytes(profile, index) for index in recomputable_units(profile)}
    units = [index for index, size in freed.items() if size > 0 and size >= _LARGE * max(freed.values())]
    if not units:
        return None

    @cache
    def plan(count: int) -> ModelPlan:
        return plan_by_hand(profile, recomputing(profile, units[:count]), budget_bytes)

    most_bytes = usable_bytes(budget_bytes, profile)
    nearly_bytes = most_bytes + (budget_bytes // _NEARLY if profile.device.startswith("cuda") else 0)

    def fits(count: int) -> bool:
        return plan(count).predicted_bytes <= most_bytes

    try:
        # More of them need less, except for a few bytes here and there.
        fewest = bisect_left(range(len(units) + 1), True, lo=1, hi=len(units), key=fits)
        found = plan(fewest)
    except ScheduleError:
        return None
    name = "every large unit" if fewest == len(units) else f"the {first_units(fewest, 'large ')}"
    return (f"recompute {name}", found) if found.predicted_bytes <= nearly_bytes else None


def _freed_bytes(profile: Profile, index: int) -> int:
    options, way = profile.problem.units[index].options, _way(profile, index)
    return options[0].held_bytes - (0 if way == REPLAY else options[way].held_bytes)


def first_units(count: int, size: str = "") -> str:
    """So many units in words.

    >>> first_units(1), first_units(3, "large ")
    ('first unit', 'first 3 large units')
    """
    return f"first {size}unit" if count == 1 else f"first {count} {size}units"
