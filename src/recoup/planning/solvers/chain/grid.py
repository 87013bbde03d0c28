"""Memory levels, and how to find the best level whose schedule fits."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from recoup.planning.problem import Problem
from recoup.planning.schedule import Schedule
from recoup.planning.simulate import simulate
from recoup.planning.solvers.chain.costs import ChainCosts
from recoup.planning.solvers.chain.table import Floats, Rounding

__all__ = ["Grid", "Scan", "Tables"]

_HIGHER_LEVELS, _UNITS_A_LEVEL = 4, 32


@dataclass(frozen=True, slots=True)
class Grid:
    """Memory levels from 0 to ``top_bytes``, about ``num_levels`` of them.

    >>> Grid(1000, num_levels=300).level_bytes
    4
    """

    top_bytes: int
    num_levels: int = field(kw_only=True)

    @property
    def level_bytes(self) -> int:
        """The size of a level, if nothing speaks for another."""
        return max(1, -(-self.top_bytes // max(1, self.num_levels)))

    def fitting_bytes(self, costs: ChainCosts, rounding: Rounding) -> int:
        """A level size near that (two thirds to six fifths) that divides the chain's common sizes best."""
        sizes = Counter(int(size) for size in costs.output_bytes)
        sizes.update(option.kept_bytes for options in costs.first_options.of for option in options)
        sizes.pop(0, None)
        usual = self.level_bytes
        choices = {usual}
        for size, _ in sizes.most_common(32):
            for parts in {max(1, size // usual), size // usual + 1}:
                choices.update({size // parts, -(-size // parts)})

        def loss(level_bytes: int) -> int:
            bias = rounding.bias(level_bytes)
            rounded = {size: (size + bias) // level_bytes * level_bytes for size in sizes}
            return level_bytes + sum(abs(rounded[size] - size) * num for size, num in sizes.items())

        near_enough = [size for size in choices if 2 * usual <= 3 * size and 5 * size <= 6 * usual]
        return min(near_enough, key=lambda size: (loss(size), size))


class _Table(Protocol):
    level_bytes: int
    num_levels: int

    @property
    def whole_row(self) -> Floats: ...


class Tables(Protocol):
    """Whoever has tables rounded to the nearest, and can read schedules from them."""

    problem: Problem
    fixed_bytes: int

    def table(self, grid: Grid, rounding: Rounding) -> _Table:
        """The table of a grid."""

    def read(self, grid: Grid, level: int) -> Schedule:
        """The schedule of one of its levels."""


class Scan:
    """Finds the highest level whose schedule fits, by simulation.

    Rows fall with the level, so the highest level that fits is the best; and more bytes can only make higher
    levels fit. So the answers are monotone, whatever the rounding did. A schedule may need less than its level says,
    by rounding errors that grow with the number of units: the search begins so much higher.
    """

    def __init__(self, tables: Tables, grid: Grid) -> None:
        self._tables = tables
        self._grid = grid
        self._known: dict[int, tuple[int, Schedule]] = {}

    def best(self, num_bytes: int) -> tuple[float, Schedule | None]:
        """Seconds and schedule of the best level that fits; infinity and ``None`` if none does."""
        table = self._tables.table(self._grid, Rounding.NEAREST)
        row, num_units = table.whole_row, self._tables.problem.num_units
        # A fixed choice of levels: reading all those of a long chain would take longer than solving it.
        stride = 1 + table.num_levels * num_units // 400_000
        higher = _HIGHER_LEVELS + num_units // _UNITS_A_LEVEL
        level = min(num_bytes // table.level_bytes + higher, table.num_levels) // stride * stride
        while level >= 0 and row[level] < float("inf"):
            peak_bytes, schedule = self._read(level)
            if peak_bytes <= num_bytes:
                return float(row[level]), schedule
            level -= stride
        return float("inf"), None

    def _read(self, level: int) -> tuple[int, Schedule]:
        if level not in self._known:
            schedule = self._tables.read(self._grid, level)
            peak_bytes = simulate(self._tables.problem, schedule).peak_bytes - self._tables.fixed_bytes
            self._known[level] = peak_bytes, schedule
        return self._known[level]
