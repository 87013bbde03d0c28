"""Closes the gap that the relaxation leaves: all selections near its bound, as labels.

NOTE [ Labels ]
    1. Backwards over the units, a label (m, t) says: the units from *i* on can run in t ticks if m bytes are
       free as unit *i* starts. A choice makes it max(need, m + held), t + ticks. A label that another one
       matches or beats in both is dropped (Nemhauser & Ullmann 1969, with a room that grows).
    2. At given prices, every completion of a label costs at least
       t + prefix[i] - (price of the rows before i) * M - (price of the others) * (M - m).
       A label whose bound is above the target is dropped, and so is a choice that alone adds more than the
       slack between target and bound (reduced-cost fixing). Units with one choice left need no labels of
       their own: neighbours among them are folded into a single step of the same form.
    3. If a selection with at most the target's ticks exists, a label of the first unit finds the best one. If
       none exists, the target is itself a bound. So targets are raised until a selection is found: its ticks
       are the optimum. Only if more than ``max_labels`` survive is the list thinned (those nearest in bytes to
       the relaxation's own solution stay); then what is found is a selection without that proof.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from recoup.planning.solvers.select.levels import Ints, Levels
from recoup.planning.solvers.select.prices import Prices

__all__ = ["Found", "search_labels"]


@dataclass(frozen=True, slots=True)
class Found:
    """The best selection that a search found (``None``: none), and its ticks.

    ``is_complete`` says that no selection with at most the target's ticks was overlooked.
    """

    selection: tuple[int, ...] | None
    ticks: int
    is_complete: bool


class _Step(NamedTuple):
    """One choice of a unit, or the only choices of several neighbours folded into one."""

    need_bytes: int
    held_bytes: int
    ticks: int
    positions: tuple[int, ...]


class _Stage(NamedTuple):
    """Labels before a unit: bytes ascending, ticks descending, and how each came about.

    ``origin`` is (parent label) * (number of steps) + (step): one column less to sort.
    """

    free_bytes: Ints
    ticks: Ints
    origin: Ints


def search_labels(levels: Levels, prices: Prices, *, target_ticks: float, max_labels: int) -> Found:
    """Finds the best selection whose ticks are at most the target; rules 1 to 3.

    Args:
        levels: the problem's choices.
        prices: of the budget.
        target_ticks: what the selection may take; the prices' bound or more.
        max_labels: how many labels a unit may have before the list is thinned.
    """
    walk = _Walk(levels, prices, target_ticks=target_ticks, max_labels=max_labels)
    none = np.zeros(1, dtype=np.int64)
    stages = [_Stage(none, none, none)]
    for unit, steps in walk.steps:
        stages.append(walk.extend(stages[-1], unit, steps))
        if not len(stages[-1].ticks):
            return Found(None, 0, walk.is_complete)
    if int(stages[-1].free_bytes[0]) > prices.budget_bytes:
        return Found(None, 0, walk.is_complete)
    label = len(stages[-1].ticks) - 1
    ticks = int(stages[-1].ticks[label])
    selection: list[int] = []
    for stage, (_, steps) in zip(reversed(stages[1:]), reversed(walk.steps), strict=True):
        label, step = divmod(int(stage.origin[label]), len(steps))
        selection += steps[step].positions
    return Found(tuple(selection), ticks, walk.is_complete)


class _Walk:
    """The steps that rule 2 leaves, and the pruning of labels at each."""

    def __init__(self, levels: Levels, prices: Prices, *, target_ticks: float, max_labels: int) -> None:
        self.max_labels, self.is_complete = max_labels, True
        budget_bytes = prices.budget_bytes
        self.ceilings = (budget_bytes - prices.least_before).tolist()
        self.likely_bytes = prices.likely_bytes
        self.rooms = (budget_bytes - levels.most_before).tolist()
        # Rule 2 as slope * m + t <= limit. Rounding must not drop the optimum itself.
        total = float(prices.per_byte.sum()) * budget_bytes
        slack = 64.0 + 1e-13 * (total + float(prices.prefix[-1]) + target_ticks)
        self.slopes = np.cumsum(prices.per_byte[::-1])[::-1].tolist()
        self.limits = (target_ticks + total + slack - prices.prefix[:-1]).tolist()
        is_open = prices.reduced <= target_ticks - prices.bound_ticks + slack
        self.steps = _fold(levels, np.flatnonzero(is_open))

    def extend(self, stage: _Stage, unit: int, steps: list[_Step]) -> _Stage:
        """The labels before a unit from those after it."""
        ceiling = self.ceilings[unit]
        parts: list[tuple[Ints, Ints, Ints]] = []
        num_steps = len(steps)
        for index, step in enumerate(steps):
            # Labels that leave room below the need all become equal in bytes: only the fastest counts.
            low = int(stage.free_bytes.searchsorted(step.need_bytes - step.held_bytes, side="right")) - 1
            high = int(stage.free_bytes.searchsorted(ceiling - step.held_bytes, side="right"))
            low = max(low, 0)
            if high > low:
                free_bytes = np.maximum(stage.free_bytes[low:high] + step.held_bytes, step.need_bytes)
                ticks = stage.ticks[low:high] + step.ticks
                origin = np.arange(low * num_steps + index, high * num_steps + index, num_steps)
                parts.append((free_bytes, ticks, origin))
        if len(parts) == 1:
            # One step keeps the order, and what it can newly rule out the next merge will.
            return _Stage(*parts[0])
        if not parts:
            none = np.zeros(0, dtype=np.int64)
            return _Stage(none, none, none)
        merged = [np.concatenate(column) for column in zip(*parts, strict=True)]
        order = merged[0].argsort(kind="stable")
        return self._prune(_Stage(*(column[order] for column in merged)), unit)

    def _prune(self, labels: _Stage, unit: int) -> _Stage:
        free_bytes, ticks = labels.free_bytes, labels.ticks
        scores = self.slopes[unit] * free_bytes + ticks
        keep = scores <= self.limits[unit]
        # Undominated: faster than all with fewer bytes, and the last (fastest) of those with equal bytes.
        keep[1:] &= ticks[1:] < np.minimum.accumulate(ticks)[:-1]
        kept = keep.nonzero()[0]
        left = free_bytes[kept]
        is_last = np.ones(len(kept), dtype=np.bool_)
        np.greater(left[1:], left[:-1], out=is_last[:-1])
        kept = kept[is_last]
        # With so much room that no choice before this unit can matter, only the fastest label counts.
        kept = kept[max(int(free_bytes[kept].searchsorted(self.rooms[unit], side="right")) - 1, 0) :]
        if len(kept) > self.max_labels:
            self.is_complete = False
            distance = np.abs(free_bytes[kept] - self.likely_bytes[unit])
            nearest = distance.argsort(kind="stable")[: self.max_labels]
            nearest.sort()
            kept = kept[nearest]
        return _Stage(*(column[kept] for column in labels))


def _fold(levels: Levels, is_open: Ints) -> list[tuple[int, list[_Step]]]:
    """The open choices as steps from the last unit to the first; neighbours with one choice become one."""
    found: list[tuple[int, list[_Step]]] = []
    columns = (levels.owner, levels.need_bytes, levels.held_bytes, levels.ticks)
    owners, needs, helds, ticks = (column[is_open].tolist() for column in columns)
    positions = (is_open - levels.first[levels.owner[is_open]]).tolist()
    index = len(owners)
    while index:
        unit, begin = owners[index - 1], index - 1
        while begin and owners[begin - 1] == unit:
            begin -= 1
        steps = [_Step(needs[k], helds[k], ticks[k], (positions[k],)) for k in range(begin, index)]
        index = begin
        if len(steps) == 1 and found and len(found[-1][1]) == 1:
            later, one = found[-1][1][0], steps[0]
            found[-1] = (
                unit,
                [
                    _Step(
                        max(one.need_bytes, later.need_bytes + one.held_bytes),
                        one.held_bytes + later.held_bytes,
                        one.ticks + later.ticks,
                        one.positions + later.positions,
                    )
                ],
            )
        else:
            found.append((unit, steps))
    return found
