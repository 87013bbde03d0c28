"""Schedules from the least memory to everything kept, and what each takes at any size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from recoup.planning import Schedule, simulate
from recoup.plans.by_hand import plan_by_hand
from recoup.plans.by_size.axes import Size
from recoup.plans.by_size.profiles import SizedProfiles
from recoup.plans.model_plan import ModelPlan
from recoup.plans.profile import Profile
from recoup.plans.usable_bytes import usable_bytes

__all__ = ["Ladder"]


class _Rung(NamedTuple):
    """A schedule at one size."""

    schedule: Schedule
    peak_bytes: int
    seconds: float


class Ladder:
    """Schedules that suit every size. What each takes is simulated once for a size, whatever the budgets.

    Args:
        profiles: of the measured sizes.
        schedules: in any order.
    """

    def __init__(self, profiles: SizedProfiles, schedules: Sequence[Schedule]) -> None:
        self._profiles, self._schedules = profiles, schedules
        self._known: dict[Size, Profile] = {}
        self._simulated: dict[Size, list[_Rung]] = {}

    def fastest(self, size: Size, budget_bytes: int) -> ModelPlan:
        """The fastest schedule that fits a budget; where none does, the one with the smallest peak."""
        most_bytes = usable_bytes(budget_bytes, self._profile(size))
        chosen = min(self._rungs(size), key=lambda rung: (max(0, rung.peak_bytes - most_bytes), rung.seconds))
        return self.predict(chosen.schedule, size, budget_bytes)

    def predict(self, schedule: Schedule, size: Size, budget_bytes: int) -> ModelPlan:
        """One of the schedules as a plan for a size."""
        return plan_by_hand(self._profile(size), schedule, budget_bytes)

    def seconds(self, schedule: Schedule, size: Size) -> float:
        """What one of the schedules is predicted to take at a size."""
        return next(rung.seconds for rung in self._rungs(size) if rung.schedule == schedule)

    def _profile(self, size: Size) -> Profile:
        if size not in self._known:
            self._known[size] = self._profiles.at(size)
        return self._known[size]

    def _rungs(self, size: Size) -> list[_Rung]:
        if size not in self._simulated:
            profile = self._profile(size)
            self._simulated[size] = [_simulated(profile, schedule) for schedule in self._schedules]
        return self._simulated[size]


def _simulated(profile: Profile, schedule: Schedule) -> _Rung:
    seen = simulate(profile.problem, schedule)
    peak_bytes = seen.peak_bytes + profile.waiting_bytes(schedule, seen)
    return _Rung(schedule, max(peak_bytes, profile.residents.optimizer_peak_bytes), seen.seconds)
