"""What people do by hand, on the same profile, to compare the frontier with."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from recoup.errors import ScheduleError
from recoup.model.recipe import RECOMPUTE
from recoup.planning import Bound, Plan, Schedule, Simulation, simulate
from recoup.planning.solvers.baselines import REPLAY, every, one_option_each
from recoup.plans.model_plan import ModelPlan
from recoup.plans.profile import Profile

__all__ = ["ByHand", "recipes_by_hand"]

_QUARTERS = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class ByHand:
    """A recipe that needs no planner, with its predicted peak and seconds."""

    name: str
    peak_bytes: int
    seconds: float


def recipes_by_hand(profile: Profile) -> list[ByHand]:
    """The usual recipes, as far as they are legal for this step and differ from each other.

    Keep everything; recompute every unit, every second one, or the first few; about √n segments of √n units.
    """
    found = {(profile.plain_bytes, profile.plain.seconds): "keep everything"}
    for name, schedule in _schedules(profile):
        try:
            predicted = simulate(profile.problem, schedule)
            found.setdefault((_peak_bytes(profile, schedule, predicted), predicted.seconds), name)
        except ScheduleError:
            pass
    return [ByHand(name, *figures) for figures, name in found.items()]


def _peak_bytes(profile: Profile, schedule: Schedule, predicted: Simulation) -> int:
    bound = Bound(0.0, schedules="all schedules")
    plan = Plan(profile.problem, predicted.peak_bytes, schedule, "by hand", bound, predicted)
    return ModelPlan(profile, plan, predicted.peak_bytes).predicted_bytes


def _schedules(profile: Profile) -> Iterator[tuple[str, Schedule]]:
    able = [index for index in range(len(profile.units)) if _way(profile, index)]
    if able:
        yield "recompute every unit", _recomputing(profile, able)
        yield "recompute every second unit", _recomputing(profile, able[::2])
        for quarter in _QUARTERS:
            count = max(1, len(able) * quarter // 4)
            first = "first unit" if count == 1 else f"first {count} units"
            yield f"recompute the {first}", _recomputing(profile, able[:count])
    free = [unit for unit in profile.problem.units if not unit.runs_once]
    length = math.isqrt(max(len(free) - 1, 0)) + 1
    yield f"segments of {length} units (√n)", every(profile.problem, length)


def _way(profile: Profile, index: int) -> int:
    """How a unit is recomputed as a whole: under its option for that, or by a forward again; 0 if it cannot be."""
    unit = profile.units[index]
    if RECOMPUTE in unit.recipes:
        return unit.recipes.index(RECOMPUTE)
    return REPLAY if len(unit.recipes) > 1 and not profile.problem.units[index].runs_once else 0


def _recomputing(profile: Profile, units: Collection[int]) -> Schedule:
    chosen = set(units)
    choices = [_way(profile, index) if index in chosen else 0 for index in range(len(profile.units))]
    return one_option_each(profile.problem, choices)
