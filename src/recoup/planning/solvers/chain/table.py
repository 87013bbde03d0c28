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

from recoup.planning.solvers.chain.costs import ChainCosts, Floats, Ints, OptionCosts
from recoup.planning.solvers.chain.floors import ChainFloors, option_bytes

__all__ = ["ChainTable", "Floats", "Rounding"]


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
        rows: ``rows[h][s][t - s]`` for the part s … t whose input is held (h is True) or not: see NOTE [ Inputs
            that go ] in ``costs``. Both are the same array where no option of s frees its input. Those of parts that
            can never be run are not filled: nobody reads them.
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
        self.costs, self.floors = costs, floors
        self.level_bytes, self.num_levels, self.rounding = level_bytes, num_levels, rounding
        self.bias = rounding.bias(level_bytes)
        n = costs.num_units
        self.rows: tuple[list[Floats], list[Floats]] = ([np.empty((0, 0))] * n, [np.empty((0, 0))] * n)
        self.edges: tuple[list[Floats], list[Floats]] = ([np.empty(0)] * n, [np.empty(0)] * n)
        self.input_levels = self.levels(np.concatenate([[0], costs.output_bytes[:-1]]))
        width = num_levels + 1
        # Rows as right parts see them: shifted by their input's levels, start_s of their first unit added.
        self.right = [np.empty((last + 1, width)) for last in range(n)]
        self.right_edges = [np.full(last + 1, np.inf) for last in range(n)]
        self._buffer = np.empty((n, width))
        for first in reversed(range(n)):
            self._fill(first)

    @property
    def whole_row(self) -> Floats:
        """Seconds of the whole chain at every level."""
        return np.asarray(self.rows[True][0][-1])

    def whole_value(self, num_bytes: int) -> float:
        """Seconds of the whole chain with exactly ``num_bytes``."""
        return self.value(0, self.costs.num_units - 1, num_bytes, is_held=True)

    def levels(self, num_bytes: Ints) -> Ints:
        """Bytes as levels."""
        return (num_bytes + self.bias) // self.level_bytes

    def level(self, num_bytes: int) -> int:
        """Bytes as levels."""
        return (num_bytes + self.bias) // self.level_bytes

    def saturation(self, first: int, last: int, *, is_held: bool) -> int:
        """The level from which a part runs as fast as it ever will."""
        if not self.costs.fastest_is_least:
            return self.num_levels + 1
        return min(self.level(int(self.floors.full[is_held][first][last - first])), self.num_levels + 1)

    def _fill(self, first: int) -> None:
        costs, num_parts = self.costs, self.costs.num_units - first
        self.rows[True][first] = self.rows[False][first] = np.empty((num_parts, self.num_levels + 1))
        self.edges[True][first] = self.edges[False][first] = np.full(num_parts, np.inf)
        if costs.frees[first]:
            self.rows[False][first] = np.empty_like(self.rows[True][first])
            self.edges[False][first] = self.edges[True][first].copy()
        swept = costs.sweep_needs(first)
        for last in range(first, costs.num_units):
            if not costs.is_never(first, last):
                for is_held in (True, False) if costs.frees[first] else (True,):
                    self._fill_row(first, last, swept, is_held=is_held)
                self._publish(first, last)

    def _fill_row(self, first: int, last: int, swept: Ints, *, is_held: bool) -> None:
        row, edges = self.rows[is_held][first][last - first], self.edges[is_held][first]
        low = self.level(int(self.floors.least[is_held][first][last - first]))
        high = self.saturation(first, last, is_held=is_held)
        row[:high] = np.inf
        row[high:] = self.costs.options(last, is_held=is_held).full_s(first, last)
        if low < high:
            for option in self.costs.options(last, is_held=is_held).of[first]:
                start, seconds = self.option_row(first, last, option, low, high)
                np.minimum(row[start:high], seconds, out=row[start:high])
            if self.costs.num_cuts(first, last):
                best = np.minimum.reduce(self.cut_rows(first, last, low, high, swept), axis=0)
                best -= self.costs.start_s[first]
                np.minimum(row[low:high], best, out=row[low:high])
        if self.rounding is Rounding.UP:
            edges[last - first] = self._edge(first, last, swept, is_held=is_held)
            np.minimum(row[low:], edges[last - first], out=row[low:])

    def _publish(self, first: int, last: int) -> None:
        """Stores a row as right parts see it, whose input is not held."""
        row, start_s, target = (
            self.rows[False][first][last - first],
            self.costs.start_s[first],
            self.right[last][first],
        )
        shift = min(int(self.input_levels[first]), target.size)
        target[:shift] = np.inf
        np.add(row[: target.size - shift], start_s, out=target[shift:])
        self.right_edges[last][first] = self.edges[False][first][last - first] + start_s

    def rest(self, first: int, last: int, option: OptionCosts) -> Floats:
        """Seconds of what follows an option of the first unit, at the levels of the whole part from its shift on.

        An input that goes may make more room than the unit takes. Whatever would then be above the highest level is as
        fast as anything can be, for a bound, and otherwise as fast as at that level.
        """
        rest: Floats = self.rows[option.holds_output][first + 1][last - first - 1]
        excess = -self.level(option.kept_bytes)
        if excess <= 0:
            return rest
        least_s = rest[-1]
        if self.rounding is Rounding.DOWN:
            full_s = self.costs.options(last, is_held=True).full_s(first + 1, last)
            least_s = full_s if self.costs.fastest_is_least else 0.0
        return np.concatenate([rest[excess:], np.full(min(excess, rest.size), least_s)])

    def option_row(
        self, first: int, last: int, option: OptionCosts, low: int, high: int
    ) -> tuple[int, Floats]:
        """Unit ``first`` keeps everything under an option: the level from which that fits, and seconds from there."""
        needed = self.level(option_bytes(self.costs, option, first, last))
        shift = max(self.level(option.kept_bytes), 0) if first < last else 0
        start = min(max(needed, low, shift), high)
        if first == last:
            return start, np.full(high - start, option.closing_s)
        return start, self.rest(first, last, option)[start - shift : high - shift] + option.total_s

    def cut_rows(self, first: int, last: int, low: int, high: int, swept: Ints) -> Floats:
        """Seconds of every cut, up to which units run forward and keep nothing, plus ``start_s`` of the first unit."""
        num_cuts = self.costs.num_cuts(first, last)
        buffer = self._buffer[:num_cuts, : high - low]
        right = self.right[last][first + 1 :][:num_cuts, low:high]
        np.add(self.rows[True][first][:num_cuts, low:high], right, out=buffer)
        # Parts that fit nearly always leave room for the sweep, so there is seldom anything to rule out.
        needed = self.levels(swept[:num_cuts] + self.costs.before_bytes[last])
        if needed.size and needed[-1] > low:
            for index in np.flatnonzero(needed > low):
                buffer[index, : int(needed[index]) - low] = np.inf
        return buffer

    # Edges: exact bytes, one number for each part

    def _edge(self, first: int, last: int, swept: Ints, *, is_held: bool) -> float:
        """Seconds of a part at exactly its least bytes."""
        num_bytes = int(self.floors.least[is_held][first][last - first])
        best = min(self.option_seconds(first, last, num_bytes, is_held=is_held))
        if self.costs.num_cuts(first, last):
            best = min(best, float(self.cut_seconds(first, last, num_bytes, swept).min()))
        return best

    def value(self, first: int, last: int, num_bytes: int, *, is_held: bool) -> float:
        """Seconds of a part with exactly ``num_bytes``: its level's, or its edge's."""
        if num_bytes < int(self.floors.least[is_held][first][last - first]):
            return float("inf")
        level = min(num_bytes // self.level_bytes, self.num_levels)
        seconds = self.rows[is_held][first][last - first, level]
        return min(float(seconds), float(self.edges[is_held][first][last - first]))

    def option_seconds(self, first: int, last: int, num_bytes: int, *, is_held: bool) -> list[float]:
        """Seconds of a part for each option of its first unit, with exactly ``num_bytes``."""
        seconds = []
        for option in self.costs.options(last, is_held=is_held).of[first]:
            value = float("inf")
            if option_bytes(self.costs, option, first, last) <= num_bytes:
                value = option.closing_s
                if first < last:
                    rest_bytes = num_bytes - option.kept_bytes
                    rest_s = self.value(first + 1, last, rest_bytes, is_held=option.holds_output)
                    value = option.total_s + rest_s
            seconds.append(value)
        return seconds

    def cut_seconds(self, first: int, last: int, num_bytes: int, swept: Ints) -> Floats:
        """Seconds of a part for each of its cuts, with exactly ``num_bytes``."""
        num_cuts, floors = self.costs.num_cuts(first, last), self.floors
        cuts = slice(first + 1, first + 1 + num_cuts)
        fits = floors.right[last][cuts] <= num_bytes
        fits &= floors.least[True][first][:num_cuts] <= num_bytes
        fits &= swept[:num_cuts] + self.costs.before_bytes[last] <= num_bytes
        output_bytes = self.costs.output_bytes[first : first + num_cuts]
        rest = np.maximum(num_bytes - output_bytes, 0) // self.level_bytes
        level = np.minimum(rest + self.input_levels[cuts], self.num_levels)
        right = self.right[last][cuts][np.arange(num_cuts), level]
        right = np.minimum(right, self.right_edges[last][cuts])
        column = min(num_bytes // self.level_bytes, self.num_levels)
        left = np.minimum(self.rows[True][first][:num_cuts, column], self.edges[True][first][:num_cuts])
        return np.where(fits, left + right - self.costs.start_s[first], np.inf)
