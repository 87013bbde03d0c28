"""What people do by hand, on the same profile, to compare the frontier with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from recoup.errors import ScheduleError
from recoup.planning import Schedule
from recoup.planning.solvers.baselines import every
from recoup.plans.by_hand import first_units, plan_by_hand, recomputable_units, recomputing
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
            plan = plan_by_hand(profile, schedule)
            found.setdefault((plan.predicted_bytes, plan.predicted_s), name)
        except ScheduleError:
            pass
    return [ByHand(name, *figures) for figures, name in found.items()]


def _schedules(profile: Profile) -> Iterator[tuple[str, Schedule]]:
    able = recomputable_units(profile)
    if able:
        yield "recompute every unit", recomputing(profile, able)
        yield "recompute every second unit", recomputing(profile, able[::2])
        for quarter in _QUARTERS:
            count = max(1, len(able) * quarter // 4)
            yield f"recompute the {first_units(count)}", recomputing(profile, able[:count])
    free = [unit for unit in profile.problem.units if not unit.runs_once]
    length = math.isqrt(max(len(free) - 1, 0)) + 1
    yield f"segments of {length} units (√n)", every(profile.problem, length)
