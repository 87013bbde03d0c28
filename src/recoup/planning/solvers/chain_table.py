"""The chain solver's dynamic programme on memory levels, for unequal units.

One row of ``num_levels + 1`` seconds for every part of the chain; the memory axis is innermost, and all cuts
of a part are one vectorised minimum. NOTE [ Levels ]:

    1. Level m stands for ``m * level_bytes`` bytes. Rounded *up*, whatever runs at level m runs in that
       many bytes: a value takes ``ceil(bytes / level_bytes)`` levels, and the budget is rounded down.
    2. Rounded *down*, the same recurrence gives a lower bound: with fewer than ``(m + 1) * level_bytes``
       bytes no persistent schedule takes less than the row says at m.
    3. Rounded to the *nearest*, errors cancel instead of adding up over a hundred units; whether the schedule
       of a level fits a budget is then for ``simulate`` to say.
    4. When rounding up, each part also has an *edge*: its seconds at exactly its least bytes. It keeps
       rounding from making a part infeasible that is feasible.
    5. A schedule is read out by following the rows exactly, so its seconds are the row's: monotone in m.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
import numpy.typing as npt

from recoup.planning.solvers.chain_costs import ChainCosts, Ints
from recoup.planning.solvers.chain_floors import ChainFloors

__all__ = ["ChainTable", "Floats", "Rounding"]

Floats = npt.NDArray[np.float64]


class Rounding(Enum):
    """How bytes become levels."""

    UP = "up"
    NEAREST = "nearest"
    DOWN = "down"

    def bias(self, level_bytes: int) -> int:
        """What to add before dividing by ``level_bytes``."""
        return {Rounding.UP: level_bytes - 1, Rounding.NEAREST: level_bytes // 2, Rounding.DOWN: 0}[self]


class ChainTable:
    """Least seconds for every part of a chain at every memory level.

    Attributes:
        rows: ``rows[s][position]`` for the part that starts at s and ends at ``shape.ends(s)[position]``.
        edges: seconds of the same parts at exactly their least bytes (only when rounding up).
    """

    def __init__(
        self,
        costs: ChainCosts,
        floors: ChainFloors,
        *,
        level_bytes: int,
        num_levels: int,
        rounding: Rounding,
    ) -> None:
        self.costs, self.floors, self.shape = costs, floors, floors.shape
        self.level_bytes, self.num_levels, self.rounding = level_bytes, num_levels, rounding
        self.bias = rounding.bias(level_bytes)
        n = costs.num_units
        self.rows: list[Floats] = [np.empty((0, 0))] * n
        self.edges: list[Floats] = [np.empty(0)] * n
        self.input_levels = self.levels(np.concatenate([[0], costs.output_bytes[:-1]]))
        width = num_levels + 1
        # Rows as right parts see them: shifted by their input's levels, start_s of their first unit added.
        sizes = [t + 1 - self.shape.base(t) for t in range(n)]
        self.right = [np.empty((size, width)) for size in sizes]
        self.right_edges = [np.full(size, np.inf) for size in sizes]
        self._buffer = np.empty((max(len(self.shape.ends(0)), 1), width))
        for first in reversed(range(n)):
            self._fill(first)

    def levels(self, num_bytes: Ints) -> Ints:
        """Bytes as levels."""
        return (num_bytes + self.bias) // self.level_bytes

    def level(self, num_bytes: int) -> int:
        """Bytes as levels."""
        return (num_bytes + self.bias) // self.level_bytes

    def saturation(self, first: int, position: int) -> int:
        """The level from which a part runs as fast as it ever will."""
        if not self.costs.fastest_is_least:
            return self.num_levels + 1
        return min(self.level(int(self.floors.full[first][position])), self.num_levels + 1)

    def _fill(self, first: int) -> None:
        costs, shape = self.costs, self.shape
        ends = shape.ends(first)
        rows = self.rows[first] = np.full((len(ends), self.num_levels + 1), np.inf)
        edges = self.edges[first] = np.full(len(ends), np.inf)
        swept = costs.sweep_needs(first)
        fastest_s = np.cumsum([0.0, *(option.total_s for option in costs.fastest[first:-1])])
        for position, last in enumerate(ends):
            row = rows[position]
            low = self.level(int(self.floors.least[first][position]))
            high = self.saturation(first, position)
            row[high:] = fastest_s[last - first] + costs.closing[last].closing_s
            if low < high:
                self._fill_options(first, last, row, low, high)
                if position:
                    self._fill_cuts(first, position, last, low, high, swept)
            if self.rounding is Rounding.UP:
                edges[position] = self._edge(first, position, last, swept)
                np.minimum(row[low:], edges[position], out=row[low:])
            self._publish(first, last, row, float(edges[position]))

    def _publish(self, first: int, last: int, row: Floats, edge: float) -> None:
        """Stores a row as right parts see it."""
        index = first - self.shape.base(last)
        shift, start_s = int(self.input_levels[first]), self.costs.start_s[first]
        target = self.right[last][index]
        shift = min(shift, target.size)
        target[:shift] = np.inf
        np.add(row[: target.size - shift], start_s, out=target[shift:])
        self.right_edges[last][index] = edge + start_s

    def _fill_options(self, first: int, last: int, row: Floats, low: int, high: int) -> None:
        """Unit ``first`` keeps everything under one of its options."""
        before = int(self.costs.before_bytes[last])
        for option in self.costs.options[first]:
            needed = max(option.forward_bytes + before, option.backward_bytes)
            if first == last:
                row_from = max(self.level(option.backward_bytes if option.is_direct else needed), low)
                np.minimum(row[row_from:high], option.closing_s, out=row[row_from:high])
                continue
            child = self.rows[first + 1][self.shape.position(first + 1, last)]
            shift = self.level(option.kept_bytes)
            row_from = max(self.level(needed), low, shift)
            if row_from < high:
                seconds = child[row_from - shift : high - shift] + option.total_s
                np.minimum(row[row_from:high], seconds, out=row[row_from:high])

    def cut_blocks(self, first: int, last: int) -> list[tuple[slice, slice]]:
        """Cuts of a part as slices of ``rows[first]`` (left parts) and of ``right[last]`` (right parts)."""
        near, base = self.shape.group_end(first), self.shape.base(last)
        if last <= near:
            return [(slice(0, last - first), slice(first + 1 - base, last + 1 - base))]
        blocks = [(slice(0, near + 1 - first), slice(first + 1 - base, near + 2 - base))]
        group = self.shape.group
        far = slice(near + 1 + group - base, last + 1 - base, group)
        count = len(range(far.start, far.stop, group))
        if count:
            blocks.append((slice(near + 1 - first, near + 1 - first + count), far))
        return blocks

    def _fill_cuts(self, first: int, position: int, last: int, low: int, high: int, swept: Ints) -> None:
        """Units up to a cut run forward and keep nothing; the cut's output is a checkpoint."""
        rows, right = self.rows[first], self.right[last]
        buffer = self._buffer[:position, : high - low]
        for left_block, right_block in self.cut_blocks(first, last):
            np.add(rows[left_block, low:high], right[right_block, low:high], out=buffer[left_block])
        self._mask_sweeps(first, position, last, low, buffer, swept)
        best = np.minimum.reduce(buffer, axis=0)
        best -= self.costs.start_s[first]
        row = rows[position]
        np.minimum(row[low:high], best, out=row[low:high])

    def cut_units(self, first: int, position: int) -> Ints:
        """The first units of the right parts, one for each cut of a part."""
        return np.array(self.shape.ends(first)[:position], dtype=np.int64) + 1

    def _mask_sweeps(
        self, first: int, position: int, last: int, low: int, buffer: Floats, swept: Ints
    ) -> None:
        """Rules out levels at which the sweep to a cut does not fit, where the parts' own rows do not."""
        if int(swept[last - 1 - first]) + int(self.costs.before_bytes[last]) <= low * self.level_bytes:
            return
        cuts = self.cut_units(first, position)
        needed = self.levels(swept[cuts - 1 - first] + self.costs.before_bytes[last])
        for index in np.flatnonzero(needed > low):
            buffer[index, : int(needed[index]) - low] = np.inf

    # Edges: exact bytes, one number for each part

    def _edge(self, first: int, position: int, last: int, swept: Ints) -> float:
        """Seconds of a part at exactly its least bytes."""
        num_bytes = int(self.floors.least[first][position])
        best = min(self.option_seconds(first, last, num_bytes))
        if position:
            best = min(best, float(self.cut_seconds(first, position, last, num_bytes, swept).min()))
        return best

    def value(self, first: int, position: int, num_bytes: int) -> float:
        """Seconds of a part with exactly ``num_bytes``: its level's, or its edge's."""
        if num_bytes < int(self.floors.least[first][position]):
            return float("inf")
        seconds = self.rows[first][position, min(num_bytes // self.level_bytes, self.num_levels)]
        return min(float(seconds), float(self.edges[first][position]))

    def option_seconds(self, first: int, last: int, num_bytes: int) -> list[float]:
        """Seconds of a part for each option of its first unit, with exactly ``num_bytes``."""
        before = int(self.costs.before_bytes[last])
        seconds = []
        for option in self.costs.options[first]:
            is_direct = first == last and option.is_direct
            needed = (
                option.backward_bytes
                if is_direct
                else max(option.forward_bytes + before, option.backward_bytes)
            )
            value = float("inf")
            if first == last and needed <= num_bytes:
                value = option.closing_s
            elif needed <= num_bytes:
                position = self.shape.position(first + 1, last)
                value = option.total_s + self.value(first + 1, position, num_bytes - option.kept_bytes)
            seconds.append(value)
        return seconds

    def cut_seconds(self, first: int, position: int, last: int, num_bytes: int, swept: Ints) -> Floats:
        """Seconds of a part for each of its cuts, with exactly ``num_bytes``."""
        cuts = self.cut_units(first, position)
        index = cuts - self.shape.base(last)
        floors = self.floors
        fits = floors.right[last][index] <= num_bytes
        fits &= floors.least[first][:position] <= num_bytes
        fits &= swept[cuts - 1 - first] + self.costs.before_bytes[last] <= num_bytes
        rest = num_bytes - self.costs.output_bytes[cuts - 1]
        level = np.minimum(np.maximum(rest, 0) // self.level_bytes + self.input_levels[cuts], self.num_levels)
        right = np.minimum(self.right[last][index, level], self.right_edges[last][index])
        column = min(num_bytes // self.level_bytes, self.num_levels)
        left = np.minimum(self.rows[first][:position, column], self.edges[first][:position])
        return np.where(fits, left + right - self.costs.start_s[first], np.inf)
