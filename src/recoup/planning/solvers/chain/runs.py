"""The chain solver's dynamic programme where most units are equal: parts with the same units share a row.

A chain is a head, a run of equal units, and a tail (an embedding, blocks, a loss). A part within the run is
known by its length, one that reaches into head or tail by its length and that end. A thousand equal units
then have a few thousand parts instead of half a million, with all cuts: nothing is restricted.

NOTE [ Relative levels ]
    Equal parts see different parameter gradients: those of all units after them. So a part's levels count
    bytes *beyond* the parameter gradients after its last unit. A left part, whose last unit lies earlier, has
    fewer of those levels, by the gradients of the units to its right. Rows are stored once more for use as
    left parts, shifted by their own length, so that all cuts of a part read the same columns.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from recoup.planning.actions import Action, Backward
from recoup.planning.problem import Problem
from recoup.planning.schedule import Schedule
from recoup.planning.solvers.chain.costs import ChainCosts, OptionCosts
from recoup.planning.solvers.chain.floors import NEVER
from recoup.planning.solvers.chain.readout import as_schedule, keep_everything, sweep
from recoup.planning.solvers.chain.table import Floats, Rounding

__all__ = ["Run", "RunTable", "find_run", "read_run_schedule"]


# Cuts that are worked on at once, so that their sums stay in the processor's cache.
_CHUNK = 64


class Run(NamedTuple):
    """The longest run of equal units: ``first`` … ``stop - 1``."""

    first: int
    stop: int

    @property
    def length(self) -> int:
        """How many units are equal."""
        return self.stop - self.first

    def num_kinds(self, costs: ChainCosts) -> int:
        """How many kinds of parts there are: those in the run, and those that reach to one unit outside it.

        Kinds that can never be run, because of units that run once, do not count.
        """
        heads = sum(not costs.is_never(first, self.first) for first in range(self.first))
        tails = sum(not costs.is_never(self.stop - 1, last) for last in range(self.stop, costs.num_units))
        return 1 + heads + tails


def find_run(problem: Problem) -> Run:
    """The longest run of units that are equal in all that the recurrences read, the sizes of their inputs included.

    The last unit is special, because nothing reads its output.

    >>> from recoup.planning.problem import Unit
    >>> units = [
    ...     Unit.keep_or_recompute(f"b{i}", forward_s=1, backward_s=2, held_bytes=9, output_bytes=1)
    ...     for i in range(6)
    ... ]
    >>> find_run(Problem(units))
    Run(first=1, stop=5)
    """
    numbers: list[object] = []
    source: tuple[object, ...] | None = None
    for unit in problem.units:
        sizes = (unit.output_bytes, unit.gradient_bytes)
        flags = (unit.skips, unit.runs_once)
        numbers.append((unit.options, *sizes, unit.lasting_bytes, *flags, source))
        source = sizes
    best, first = Run(0, 1), 0
    for index in range(1, len(numbers) - 1):
        if numbers[index] != numbers[index - 1]:
            first = index
        if index + 1 - first > best.length:
            best = Run(first, index + 1)
    return best


class _Block(NamedTuple):
    """Many cuts of one part: rows of left and right parts, column for column; ``cuts`` ascending."""

    left: Floats
    right: Floats
    cuts: range


class RunTable:
    """Least seconds for every kind of part at every memory level; NOTE [ Levels ] in ``chain_table``."""

    def __init__(
        self, costs: ChainCosts, run: Run, *, level_bytes: int, num_levels: int, rounding: Rounding
    ) -> None:
        self.costs, self.run, self.num_levels = costs, run, num_levels
        self.level_bytes, self.bias = level_bytes, rounding.bias(level_bytes)
        # Shifts are differences of rounded sums; this is how the part that is subtracted is rounded.
        self._other_bias = level_bytes - 1 - self.bias if rounding is not Rounding.NEAREST else self.bias
        self.rows: dict[tuple[int, int], Floats] = {}
        self.full: dict[tuple[int, int], int] = {}
        width, count = num_levels + 1, run.length + 1
        parameter = (
            int(costs.after_bytes[run.first] - costs.after_bytes[run.first + 1]) if run.length > 1 else 0
        )
        self._parameter_bytes = parameter
        self._pad = self.level(int(costs.after_bytes[0]) + parameter) + 3
        ends = range(run.stop, costs.num_units)
        # Indexed by the number of run units in the part; the first index is where the part starts or ends.
        self._left = {start: np.full((count, self._pad + width), np.inf) for start in range(run.first + 1)}
        self._right = {end: np.full((count, width), np.inf) for end in (run.first, *ends)}
        self._buffer = np.empty((min(count, _CHUNK), width))
        self._fill_all()

    @property
    def whole_row(self) -> Floats:
        """Seconds of the whole chain at every level."""
        return self.rows[0, self.costs.num_units - 1]

    def level(self, num_bytes: int) -> int:
        """Bytes as levels."""
        return (num_bytes + self.bias) // self.level_bytes

    def key(self, first: int, last: int) -> tuple[int, int]:
        """The part that stands for all parts with the same units."""
        run = self.run
        if run.first < first and last < run.stop:
            return run.first, run.first + last - first
        return first, last

    def row(self, first: int, last: int) -> Floats:
        """Seconds of a part at every level."""
        return self.rows[self.key(first, last)]

    def saturation(self, first: int, last: int) -> int:
        """The level from which a part runs as fast as it ever will."""
        if not self.costs.fastest_is_least:
            return self.num_levels + 1
        return min(self.level(self.full[self.key(first, last)]), self.num_levels + 1)

    def _fill_all(self) -> None:
        run, last_unit = self.run, self.costs.num_units - 1
        for first in reversed(range(run.stop, last_unit + 1)):
            for last in range(first, last_unit + 1):
                self._fill(first, last)
        for last in range(run.first, run.stop):
            self._fill(run.first, last)
        for last in range(run.stop, last_unit + 1):
            for first in reversed(range(run.first, run.stop)):
                self._fill(first, last)
        for first in reversed(range(run.first)):
            for last in range(first, last_unit + 1):
                self._fill(first, last)

    def _fill(self, first: int, last: int) -> None:
        row = np.full(self.num_levels + 1, np.inf)
        self.rows[first, last] = row
        if self.costs.is_never(first, last):
            self.full[first, last] = NEVER
            self._publish(first, last, row)
            return
        self.full[first, last] = self._full(first, last)
        high = self.saturation(first, last)
        options = self.costs.options(last, is_held=True)
        row[high:] = options.full_s(first, last)
        for option in options.of[first]:
            self._fill_option(first, last, option, row[:high])
        for block in self.blocks(first, last, 0, high):
            self._fill_block(first, last, block, row[:high])
        self._publish(first, last, row)

    def needed_bytes(self, first: int, last: int, option: OptionCosts) -> int:
        """What an option of the first unit needs, beyond the parameter gradients after ``last``."""
        after = int(self.costs.after_bytes[last])
        if first == last and option.is_direct:
            return option.backward_bytes - after
        before = int(self.costs.before_bytes[last]) - after
        return max(option.forward_bytes + before, option.backward_bytes - after)

    def _full(self, first: int, last: int) -> int:
        if first == last:
            return self.needed_bytes(first, last, self.costs.options(last, is_held=True).closing[first])
        option = self.costs.options(last, is_held=True).fastest[first]
        rest = option.kept_bytes + self.full[self.key(first + 1, last)]
        return max(self.needed_bytes(first, last, option), rest)

    def _fill_option(self, first: int, last: int, option: OptionCosts, row: Floats) -> None:
        start = max(self.level(self.needed_bytes(first, last, option)), 0)
        if first == last:
            np.minimum(row[start:], option.closing_s, out=row[start:])
            return
        shift = self.level(option.kept_bytes)
        start = max(start, shift)
        if start < row.size:
            child = self.row(first + 1, last)[start - shift : row.size - shift]
            np.minimum(row[start:], child + option.total_s, out=row[start:])

    def _fill_block(self, first: int, last: int, block: _Block, row: Floats) -> None:
        # The least level at which the sweep to the nearest cut fits; later cuts need no less.
        needs = self.sweep_levels(first, last, block.cuts)
        low = min(needs[0][1], row.size)
        for start in range(0, len(block.cuts), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            left, right = block.left[chunk, low:], block.right[chunk, low:]
            seconds = np.add(left, right, out=self._buffer[: left.shape[0], : row.size - low])
            for index, level in needs:
                if level > low:
                    seconds[max(index - start, 0) :, : level - low] = np.inf
            np.minimum(row[low:], np.minimum.reduce(seconds, axis=0), out=row[low:])

    def sweep_levels(self, first: int, last: int, cuts: range) -> list[tuple[int, int]]:
        """From which cut on a sweep needs which level; needs only grow with the cut."""
        before = int(self.costs.before_bytes[last] - self.costs.after_bytes[last])
        # Within the run the needs are the same from the second unit on, so the first few cuts say it all.
        steps: list[tuple[int, int]] = []
        for index, cut in enumerate(cuts[:3]):
            needed = int(self.costs.sweep_bytes[first + 1 : cut].max(initial=self.costs.first_bytes[first]))
            steps.append((index, self.level(needed + before)))
        return steps

    # Cuts

    def blocks(self, first: int, last: int, low: int, high: int) -> list[_Block]:
        """All cuts of a part, at levels ``low`` … ``high - 1``."""
        if low >= high:
            return []
        run = self.run
        blocks = [
            self._single(first, last, cut, low, high) for cut in range(first + 1, min(run.first, last + 1))
        ]
        if first < run.stop and last >= run.first:
            blocks += self._run_block(first, last, low, high)
        start = max(run.stop, first + 1)
        blocks += [self._single(first, last, cut, low, high) for cut in range(start, last + 1)]
        return blocks

    def _run_block(self, first: int, last: int, low: int, high: int) -> list[_Block]:
        """The cuts before units of the run, as slices of the rows by length."""
        run = self.run
        start = max(run.first, first + 1)
        stop = min(run.stop, last + 1)
        if start >= stop:
            return []
        own_first = max(first, run.first)
        in_run = stop - own_first
        tail_bytes = int(self.costs.after_bytes[stop - 1] - self.costs.after_bytes[last])
        shift = self.level(in_run * self._parameter_bytes + tail_bytes)
        columns = slice(self._pad + low - shift, self._pad + high - shift)
        lengths = slice(start - own_first, stop - own_first)
        left = self._left[min(first, run.first)][lengths, columns]
        right = self._right[last if last >= run.stop else run.first]
        return [
            _Block(left, right[in_run:0:-1][lengths.start :][: stop - start, low:high], range(start, stop))
        ]

    def left_shift(self, cut: int, last: int) -> int:
        """Levels that a left part lacks because of the parameter gradients from ``cut`` to ``last``."""
        return self.level(int(self.costs.after_bytes[cut - 1] - self.costs.after_bytes[last]))

    def left_level(self, level: int, first: int, cut: int, last: int) -> int:
        """The level of the left part of a cut, as the row of the whole part reads it."""
        run = self.run
        if not run.first <= cut < run.stop:
            return level - self.left_shift(cut, last)
        stop, own_first = min(run.stop, last + 1), max(first, run.first)
        tail_bytes = int(self.costs.after_bytes[stop - 1] - self.costs.after_bytes[last])
        shift = self.level((stop - own_first) * self._parameter_bytes + tail_bytes)
        own = ((cut - own_first) * self._parameter_bytes + self._other_bias) // self.level_bytes
        return min(level - shift + own, self.num_levels)

    def _single(self, first: int, last: int, cut: int, low: int, high: int) -> _Block:
        """One cut outside the run."""
        sweep_s = self.costs.start_s[cut] - self.costs.start_s[first]
        left = _shifted(self.row(first, cut - 1), self.left_shift(cut, last), low, high) + sweep_s
        right = _shifted(self.row(cut, last), self.input_level(cut), low, high)
        return _Block(left[None], right[None], range(cut, cut + 1))

    def input_level(self, unit: int) -> int:
        """Levels of a unit's input."""
        return self.level(int(self.costs.output_bytes[unit - 1])) if unit else 0

    def _publish(self, first: int, last: int, row: Floats) -> None:
        """Stores a row for use as left part and as right part by cuts in the run."""
        run = self.run
        if first <= run.first and run.first - 1 <= last < run.stop:
            length = last + 1 - run.first
            shift = self._pad - (length * self._parameter_bytes + self._other_bias) // self.level_bytes
            sweep_s = self.costs.start_s[last + 1] - self.costs.start_s[first]
            target = self._left[first][length]
            target[shift : shift + row.size] = row + sweep_s
            target[shift + row.size :] = row[-1] + sweep_s
        if first >= run.first and first < run.stop:
            end = run.first if last < run.stop else last
            length = (last + 1 if last < run.stop else run.stop) - first
            self._right[end][length] = _shifted(row, self.input_level(first), 0, row.size)


def _shifted(row: Floats, shift: int, low: int, high: int) -> Floats:
    """Levels ``low`` … ``high - 1`` of a row that starts ``shift`` levels later."""
    result = np.full(high - low, np.inf)
    start = max(low, shift)
    if start < high:
        result[start - low :] = row[start - shift : high - shift]
    return result


class _Part(NamedTuple):
    """A part of the chain that is yet to be scheduled, at a level."""

    first: int
    last: int
    level: int


def read_run_schedule(table: RunTable, level: int) -> Schedule:
    """The schedule behind the whole chain's row at a level."""
    actions: list[Action] = []
    todo: list[_Part | Action] = [_Part(0, table.costs.num_units - 1, level)]
    while todo:
        item = todo.pop()
        if not isinstance(item, _Part):
            actions.append(item)
        elif item.level >= table.saturation(item.first, item.last):
            actions += keep_everything(table.costs, item.first, item.last, is_held=True)
        else:
            todo += reversed(_expand(table, item))
    return as_schedule(table.costs, actions)


def _expand(table: RunTable, part: _Part) -> list[_Part | Action]:
    """One decision: the actions and smaller parts that a part consists of."""
    first, last, level = part
    best_s, choice, cut = float("inf"), 0, 0
    for index, option in enumerate(table.costs.options(last, is_held=True).of[first]):
        if table.level(table.needed_bytes(first, last, option)) > level:
            continue
        seconds = option.closing_s
        if first < last:
            rest = level - table.level(option.kept_bytes)
            seconds = option.total_s + float(table.row(first + 1, last)[rest]) if rest >= 0 else float("inf")
        if seconds < best_s:
            best_s, choice = seconds, index
    for block in table.blocks(first, last, level, level + 1):
        column = (block.left + block.right)[:, 0]
        for index, needed in table.sweep_levels(first, last, block.cuts):
            if needed > level:
                column[index:] = np.inf
        index = int(column.argmin())
        if column[index] < best_s:
            best_s, cut = float(column[index]), block.cuts[index]
    if cut:
        right = _Part(cut, last, level - table.input_level(cut))
        return [
            *sweep(first, cut),
            right,
            _Part(first, cut - 1, table.left_level(part.level, first, cut, last)),
        ]
    option = table.costs.options(last, is_held=True).of[first][choice]
    backward = Backward(first, option=option.index)
    if first == last and option.is_direct:
        return [backward]
    rest_parts = [_Part(first + 1, last, level - table.level(option.kept_bytes))] if first < last else []
    return [option.forward(first), *rest_parts, backward]
