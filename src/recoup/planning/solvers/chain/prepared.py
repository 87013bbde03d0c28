"""A chain that has been worked through: which tables are filled when, and which of their answers counts."""

from __future__ import annotations

from dataclasses import replace

from recoup.planning.problem import Problem
from recoup.planning.schedule import Schedule
from recoup.planning.simulate import simulate
from recoup.planning.solvers.base import PERSISTENT_SCHEDULES, Bound, Candidate, Prepared
from recoup.planning.solvers.bounds import Relaxation
from recoup.planning.solvers.chain.costs import ChainCosts
from recoup.planning.solvers.chain.floors import ChainFloors
from recoup.planning.solvers.chain.grid import Grid
from recoup.planning.solvers.chain.readout import as_schedule, keep_everything, read_schedule
from recoup.planning.solvers.chain.table import ChainTable, Floats, Rounding

__all__ = ["PreparedChain"]

_TIE = 1e-12
_HIGHER_LEVELS, _UNITS_A_LEVEL = 4, 32
_COARSER = 8
"""By this factor larger are the levels of a bound that nobody reads."""


class PreparedChain(Prepared):
    """A chain's exact floors and, once needed, its tables.

    NOTE [ More bytes, never more seconds ]
        Let T and U < T be the tops of the finer and the finest levels near the edge. The answer for b bytes
        is the best of three sources, each of which alone is monotone in b: the scan of the whole range (for
        b ≥ T only), the scan of the finer levels at min(b, T), and the finest table rounded up at min(b, U).
        The last two may be left out only where the bound at that many bytes proves that they cannot be
        better.

    Args:
        problem: a chain.
        num_levels: of memory, for each table.
        proves: whether the bound is as tight as tables can make it; without, they are coarse, and only save the filling
            of others.
    """

    def __init__(self, problem: Problem, *, num_levels: int, proves: bool = True) -> None:
        self.problem = problem
        self.fixed_bytes = problem.resident_bytes + problem.input_bytes
        self.costs = ChainCosts(problem)
        self.floors = ChainFloors(self.costs)
        if self.floors.lowest_bytes < 0:
            # Levels of memory begin at zero.
            self.fixed_bytes += self.floors.lowest_bytes
            self.costs = ChainCosts(problem, raised_bytes=-self.floors.lowest_bytes)
            self.floors = ChainFloors(self.costs)
        self.num_levels = num_levels
        self.proves = proves
        least, full = self.floors.least_bytes, self.floors.full_bytes
        divisor = max(1, self.costs.common_divisor())
        #: Whether all sizes are whole levels, so that no rounding takes place.
        self.is_exact = full <= 4 * num_levels * divisor
        self.whole = Grid(full, num_levels=full // divisor if self.is_exact else num_levels)
        self.near = Grid(least + (full - least) // 8, num_levels=num_levels)
        self.edge = Grid(least + (full - least) // 64, num_levels=num_levels)
        self._relaxation = Relaxation(problem)
        self._tables: dict[tuple[Grid, Rounding], ChainTable] = {}
        self._bounds: dict[Grid, tuple[int, Floats]] = {}
        self._read: dict[tuple[Grid, int], tuple[int, Schedule]] = {}

    @property
    def smallest_bytes(self) -> int:
        """Exact: the least budget with which any persistent schedule can run."""
        return self.fixed_bytes + self.floors.least_bytes

    def best(self, budget_bytes: int) -> Candidate | None:
        """The best schedule that the tables know, with the bound that they prove."""
        num_bytes = budget_bytes - self.fixed_bytes
        if num_bytes < self.floors.least_bytes:
            return None
        if num_bytes >= self.floors.full_bytes and self.costs.fastest_is_least:
            last = self.costs.num_units - 1
            seconds = self.costs.options(last, is_held=True).full_s(0, last)
            schedule = as_schedule(self.costs, keep_everything(self.costs, 0, last, is_held=True))
        elif self.is_exact:
            table = self.table(self.whole, Rounding.UP)
            seconds, schedule = table.whole_value(num_bytes), read_schedule(table, num_bytes)
        else:
            return self._best_rounded(num_bytes)
        return Candidate(schedule, Bound(seconds, schedules=PERSISTENT_SCHEDULES))

    def _best_rounded(self, num_bytes: int) -> Candidate:
        """See NOTE [ More bytes, never more seconds ]."""
        seconds, schedule = float("inf"), None
        grid = self.near if num_bytes < self.near.top_bytes else self.whole
        if grid is self.whole:
            seconds, schedule = self._scan(self.whole, num_bytes)
        clamped = min(num_bytes, self.near.top_bytes)
        if schedule is None or seconds > self._bound_seconds(clamped, grid) * (1 + _TIE):
            found_s, found = self._scan(self.near, clamped)
            if found_s < seconds:
                seconds, schedule = found_s, found
        clamped = min(num_bytes, self.edge.top_bytes)
        if schedule is None or seconds > self._bound_seconds(clamped, grid) * (1 + _TIE):
            table = self.table(self.edge, Rounding.UP)
            if table.whole_value(clamped) < seconds:
                seconds, schedule = table.whole_value(clamped), read_schedule(table, clamped)
        assert schedule is not None
        bound = min(self._bound_seconds(num_bytes, grid), seconds)
        return Candidate(schedule, Bound(bound, schedules=PERSISTENT_SCHEDULES))

    def suggested_budgets(self) -> list[int]:
        """The levels at which the whole chain's seconds change."""
        table = self.table(self.whole, Rounding.UP if self.is_exact else Rounding.NEAREST)
        row = table.whole_row
        levels = [level for level in range(1, row.size) if row[level] < row[level - 1]]
        full = self.fixed_bytes + self.floors.full_bytes
        budgets = {min(self.fixed_bytes + level * table.level_bytes, full) for level in levels}
        return sorted({self.smallest_bytes, full, *(b for b in budgets if b >= self.smallest_bytes)})

    def table(self, grid: Grid, rounding: Rounding) -> ChainTable:
        """A table, filled at its first use."""
        key = (grid, rounding)
        if key not in self._tables:
            level_bytes = grid.level_bytes if self.is_exact else grid.fitting_bytes(self.costs, rounding)
            num_levels = -(-grid.top_bytes // level_bytes)
            self._tables[key] = ChainTable(
                self.costs, self.floors, level_bytes=level_bytes, num_levels=num_levels, rounding=rounding
            )
        return self._tables[key]

    def _scan(self, grid: Grid, num_bytes: int) -> tuple[float, Schedule | None]:
        """Seconds and schedule of the highest level whose schedule fits, by simulation; ``None`` if none does.

        Rows fall with the level, so the highest level that fits is the best; and more bytes can only make higher
        levels fit. So the answers are monotone, whatever the rounding did. A schedule may need less than its level
        says, by rounding errors that grow with the number of units: the search begins so much higher. Of levels with
        the same seconds only the lowest is read.
        """
        table = self.table(grid, Rounding.NEAREST)
        row, num_units = table.whole_row, self.problem.num_units
        # A fixed choice of levels: reading all those of a long chain would take longer than solving it.
        stride = 1 + table.num_levels * num_units // 400_000
        higher = _HIGHER_LEVELS + num_units // _UNITS_A_LEVEL
        level = min(num_bytes // table.level_bytes + higher, table.num_levels) // stride * stride
        while level >= 0 and row[level] < float("inf"):
            while level >= stride and row[level - stride] == row[level]:
                level -= stride
            if (grid, level) not in self._read:
                schedule = read_schedule(table, level * table.level_bytes)
                peak_bytes = simulate(self.problem, schedule).peak_bytes - self.fixed_bytes
                self._read[grid, level] = peak_bytes, schedule
            peak_bytes, schedule = self._read[grid, level]
            if peak_bytes <= num_bytes:
                return float(row[level]), schedule
            level -= stride
        return float("inf"), None

    def _bound_seconds(self, num_bytes: int, grid: Grid) -> float:
        """What a grid's table rounded down proves, or the relaxation where that is more."""
        relaxed_s = self._relaxation.bound(num_bytes + self.fixed_bytes).seconds
        if not self.proves:
            grid = replace(grid, num_levels=grid.num_levels // _COARSER)
        if grid not in self._bounds:
            table = self.table(grid, Rounding.DOWN)
            # Only the whole chain's row is of use, and the others are large.
            self._bounds[grid] = table.level_bytes, table.whole_row.copy()
            del self._tables[grid, Rounding.DOWN]
        level_bytes, row = self._bounds[grid]
        return max(relaxed_s, float(row[min(num_bytes // level_bytes, row.size - 1)]))
