"""Plans for batches of several sizes under one budget.

NOTE [ One plan for each range of sizes ]
    1. The solvers run once for each measured size. What they find, from the least memory to everything kept, is a
       ladder of schedules. All measured sizes have the same units and options, so each schedule suits every size.
    2. For a size, the fastest schedule of the ladder is taken that fits there: simulating takes about a millisecond,
       and planning up to a second.
    3. Sizes are rounded up to a grid. Along one axis it begins where keeping everything no longer fits, and all of its
       plans are made at once. With two axes, and for another budget than the first, a plan is made when its part of the
       grid is first used.
    4. Beyond what was measured the grid goes on, and numbers are extrapolated.
    5. Few sizes do not tell how bytes grow along two axes. Then a batch gets the plan of the smallest measured one that
       is at least as large along both; where there is none, the schedule with the smallest peak.
    6. Where nothing fits the end of a range, the size itself is looked at.
    7. Where nothing fits that, the schedule with the smallest peak is taken: who calls the model is told.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import ceil

from recoup.planning import Schedule
from recoup.plans.by_size.axes import Shapes, Size, size_of, volume
from recoup.plans.by_size.ladder import Ladder
from recoup.plans.by_size.profiles import SizedProfiles
from recoup.plans.model_plan import ModelPlan, frontier, tightest
from recoup.plans.usable_bytes import usable_bytes

__all__ = ["PlansBySize", "SizeRange", "plans_by_size"]

_NUM_RANGES = 12
"""Sizes along one axis that plans are made for, between where everything is kept and the largest."""
_NUM_CELLS = 8
"""The same along each of two axes."""
_BEYOND = 8
"""Beyond what was measured, sizes are rounded up to multiples of this part of the largest."""
_NUM_SCHEDULES = 20


@dataclass(frozen=True)
class SizeRange:
    """Sizes with one plan.

    Attributes:
        up_to: the largest of them, which the plan is made for.
        plan: its profile is that size's.
    """

    up_to: Size
    plan: ModelPlan

    @property
    def seconds_per_element(self) -> float:
        """Predicted seconds of a step for each element of the batch (of text: for each token)."""
        return self.plan.predicted_s / max(1, volume(self.up_to))


class PlansBySize:
    """A plan for every size of the batch, by NOTE [ One plan for each range of sizes ].

    Args:
        profiles: of the measured sizes.
        budget_bytes: of every plan.
        schedules: the ladder.
        known: plans that were chosen already, by size.
        of: the same plans for another budget, whose grid and simulations are used again.
    """

    def __init__(
        self,
        profiles: SizedProfiles,
        budget_bytes: int,
        schedules: Iterable[Schedule],
        known: Mapping[Size, ModelPlan],
        *,
        of: PlansBySize | None = None,
    ) -> None:
        self.profiles, self.budget_bytes = profiles, budget_bytes
        self.schedules, self.known = tuple(schedules), dict(known)
        self._plans = dict(known)
        self._exact: dict[Size, ModelPlan] = {}
        self._ladder: Ladder = Ladder(profiles, self.schedules) if of is None else of._ladder
        self._grid = self._make_grid() if of is None else of._grid_for_all_budgets()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlansBySize) and self._content == other._content

    def __hash__(self) -> int:
        return hash((self.budget_bytes, self.schedules))

    def __repr__(self) -> str:
        return f"PlansBySize(sizes={self.profiles.sizes}, budget_bytes={self.budget_bytes})"

    @property
    def _content(self) -> tuple[object, ...]:
        return self.profiles, self.budget_bytes, self.schedules, self.known

    @property
    def plan(self) -> ModelPlan:
        """For the largest measured batch."""
        return self._at(self.profiles.sizes[-1])

    @property
    def ranges(self) -> tuple[SizeRange, ...]:
        """Measured sizes with their plans, in order. With two axes, those that were used so far."""
        grid = self._grid
        sizes: list[Size] = sorted(self._plans, key=volume)
        if len(grid) == 1:
            sizes = [(value,) for value in self._different(grid[0])]
        return tuple(SizeRange(size, self._plans[size]) for size in sizes if self.profiles.is_measured(size))

    def size_of(self, shapes: Shapes) -> Size | None:
        """The size of a call's batch; ``None`` if its inputs do not tell."""
        return size_of(self.profiles.axes, shapes)

    def plan_for(self, size: Size) -> ModelPlan:
        """The plan for a batch, made for the end of its range."""
        found = self._plans.get(size)
        if found is not None:
            return found
        if not self.profiles.are_enough and not self.profiles.is_measured(size):
            return self._at(size)
        found = self._at(self._end_of(size))
        fits = found.predicted_bytes <= usable_bytes(self.budget_bytes, found.profile)
        return found if fits else self._at(size)

    def plan_at(self, size: Size) -> ModelPlan:
        """The same, with what is predicted for the size itself."""
        if size not in self._exact:
            schedule = self.plan_for(size).schedule.schedule
            self._exact[size] = self._ladder.predict(schedule, size, self.budget_bytes)
        return self._exact[size]

    def slower_s(self, other: PlansBySize, size: Size) -> float:
        """By how many seconds a step takes longer than under other plans of the same ladder, as predicted."""
        end, schedules = self._end_of(size), [one.plan_for(size).schedule.schedule for one in (self, other)]
        own_s, other_s = (self._ladder.seconds(schedule, end) for schedule in schedules)
        return own_s - other_s

    def within(self, budget_bytes: int) -> PlansBySize:
        """The same for another budget, without the solvers."""
        return PlansBySize(self.profiles, budget_bytes, self.schedules, {}, of=self)

    def with_missed(self, missed_bytes: int) -> PlansBySize:
        """The same for steps that take more bytes than was predicted, as if these were always there."""
        return PlansBySize(
            self.profiles.with_resident(missed_bytes), self.budget_bytes, self.schedules, self.known
        )

    def to_json(self, *, indent: int | None = None) -> str:
        """Writes them, with all that was measured, as versioned JSON, from which `from_json` makes equal plans."""
        from recoup.plans.by_size.plans_json import plans_to_json

        return plans_to_json(self, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> PlansBySize:
        """Reads what `to_json` wrote; `apply` takes it for any model of the same architecture.

        Raises:
            EncodingError: the text is not JSON, not of plans by size, of another version, incomplete or altered.
        """
        from recoup.plans.by_size.plans_json import plans_from_json

        return plans_from_json(text)

    def _end_of(self, size: Size) -> Size:
        if not self.profiles.are_enough and (bound := self.profiles.bound_of(size)) is not None:
            return bound
        return tuple(_rounded_up(value, known) for value, known in zip(size, self._grid, strict=True))

    def _at(self, size: Size) -> ModelPlan:
        if size not in self._plans:
            is_known = self.profiles.are_enough or self.profiles.is_measured(size)
            found = self._ladder.fastest(size, self.budget_bytes if is_known else 0)
            self._plans[size] = replace(found, budget_bytes=self.budget_bytes)
        return self._plans[size]

    def _make_grid(self) -> list[list[int]]:
        limits = self.profiles.limits
        if len(limits) == 1:
            return [self._different(self._sizes_to_plan(*limits))]
        return [_evenly(0, limit, _NUM_CELLS) for limit in limits]

    def _grid_for_all_budgets(self) -> list[list[int]]:
        """The grid, also below where the first budget keeps everything."""
        if len(self._grid) > 1:
            return self._grid
        return [sorted({*self._grid[0], *_evenly(0, self._grid[0][-1], _NUM_RANGES)})]

    def _sizes_to_plan(self, limit: int) -> list[int]:
        """NOTE [ One plan for each range of sizes ], 3."""
        kept = bisect_left(range(1, limit + 1), True, key=lambda size: not self._keeps_everything((size,)))
        return sorted({*([kept] if kept else []), *_evenly(kept, limit, _NUM_RANGES)})

    def _different(self, sizes: list[int]) -> list[int]:
        """The ends of ranges: of neighbours with the same plan, the larger."""
        items = [self._at((size,)).items for size in sizes]
        pairs = zip(sizes, items, [*items[1:], None], strict=True)
        return [size for size, own, after in pairs if own != after]

    def _keeps_everything(self, size: Size) -> bool:
        profile = self.profiles.at(size)
        return profile.plain_bytes <= usable_bytes(self.budget_bytes, profile)


def plans_by_size(profiles: SizedProfiles, chosen: ModelPlan) -> PlansBySize:
    """The plans for a budget.

    Args:
        profiles: of the measured sizes.
        chosen: the plan for one of them, the largest sample. Another may be the largest by volume.
    """
    known = {profiles.size_of(chosen.profile): chosen}
    return PlansBySize(profiles, chosen.budget_bytes, _ladder(profiles, chosen), known)


def _ladder(profiles: SizedProfiles, chosen: ModelPlan) -> tuple[Schedule, ...]:
    """Schedules from the least memory to everything kept, for all measured sizes at which not everything is."""
    found, budget_bytes = [chosen.schedule.schedule], chosen.budget_bytes
    for profile in profiles.profiles:
        found += [profile.plain_schedule, tightest(profile).schedule.schedule]
        if profile.plain_bytes > usable_bytes(budget_bytes, profile):
            found += [point.schedule.schedule for point in frontier(profile, num_points=_NUM_SCHEDULES)]
    return tuple(dict.fromkeys(found))


def _evenly(low: int, high: int, number: int) -> list[int]:
    """Whole numbers up to ``high``, evenly spread above ``low``.

    >>> _evenly(10, 100, 3)
    [40, 70, 100]
    """
    return sorted({low + ceil((high - low) * part / number) for part in range(1, number + 1)} - {low})


def _rounded_up(value: int, known: list[int]) -> int:
    """The next of the known numbers; beyond them, the next multiple of a part of the last.

    >>> _rounded_up(30, [40, 70, 100]), _rounded_up(70, [40, 70, 100]), _rounded_up(107, [40, 80])
    (40, 70, 110)
    """
    if value <= known[-1]:
        return known[bisect_left(known, value)]
    step = max(1, known[-1] // _BEYOND)
    return -(-value // step) * step
