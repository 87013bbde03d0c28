"""``chain``: the best persistent schedule of a chain of unequal units, with options.

A schedule is *persistent* if a value that is kept beyond the forward that reads it stays until the backward
that reads it has run. With C(s, t, m) the least seconds to run units s … t forward and backward in m bytes
(the input of s resident and outside m, the gradient of output t inside m):

    C(s, s, m) = min over options        forward + backward               if both fit in m
    C(s, t, m) = min over options of s   forward + C(s + 1, t, m - kept) + backward
                 min over cuts k         forwards of s … k - 1 + C(k, t, m - output of k - 1) + C(s, k - 1, m)

Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: Optimal checkpointing for heterogeneous chains (Inria
RR-9302, 2019; ACM TOMS 2024); options per unit as in Zhao, Le Hellard, Eyraud-Dubois, Gusak, Beaumont:
Rockmate (ICML 2023). Departures: the sweep to a cut needs room only for the units it runs; parameter
gradients appear as the backward proceeds; the last output's gradient appears only after the last forward; an
option that needs only its input runs without a forward of its own; feasibility is exact in bytes at any level
size (``chain_floors``); a table rounded down proves a bound, and one rounded to the nearest finds better
schedules than the one rounded up, each checked by simulation (NOTE [ Levels ] in ``chain_table``). Long
chains of equal units share rows (``chain_runs``); other long chains have their cuts restricted
(``ChainShape``).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from recoup.planning.problem import Problem
from recoup.planning.schedule import Schedule
from recoup.planning.simulate import simulate
from recoup.planning.solvers.base import PERSISTENT_SCHEDULES, Bound, Candidate, Prepared, Solver
from recoup.planning.solvers.chain_costs import ChainCosts
from recoup.planning.solvers.chain_floors import ChainFloors, ChainShape
from recoup.planning.solvers.chain_readout import keep_everything, read_schedule
from recoup.planning.solvers.chain_table import ChainTable, Floats, Rounding

__all__ = ["ChainSolver", "PreparedChain", "solve_chain"]

_MAX_LEVELS = 4000
_MIN_LEVELS = 200
_TABLE_BYTES = 256 * 2**20
_TIE = 1e-12


def solve_chain(problem: Problem, *, budget_bytes: int, num_levels: int | None = None) -> Candidate | None:
    """The best persistent schedule under a budget, or ``None`` if there is none.

    Args:
        problem: a chain; skips are not understood.
        budget_bytes: for the whole step, resident bytes included.
        num_levels: of memory; chosen from the chain's length unless given.

    >>> from recoup.planning.problem import Unit
    >>> units = [
    ...     Unit.keep_or_recompute(f"block{i}", forward_s=1, backward_s=2, held_bytes=60, output_bytes=10)
    ...     for i in range(4)
    ... ]
    >>> best = solve_chain(Problem(units, input_bytes=10), budget_bytes=230)
    >>> print(best.schedule, best.bound.seconds)
    F0:0 F1:1 F2:1 F3:0 B3 B2 B1 B0 14.0
    """
    return PreparedChain(problem, time_limit_s=10.0, num_levels=num_levels).best(budget_bytes)


class ChainSolver(Solver):
    """Optimal persistent schedules, for problems without skips. It never uses links."""

    name = "chain"
    schedules = PERSISTENT_SCHEDULES

    def applies(self, problem: Problem) -> bool:
        """A chain has no skips."""
        return not problem.has_skips

    def prepare(self, problem: Problem, *, time_limit_s: float) -> PreparedChain:
        """Works out exact feasibility; the tables follow when they are needed."""
        return PreparedChain(problem, time_limit_s=time_limit_s)


@dataclass(frozen=True, slots=True)
class _Grid:
    """Memory levels from 0 to ``top_bytes``."""

    top_bytes: int
    num_levels: int

    @property
    def level_bytes(self) -> int:
        return max(1, -(-self.top_bytes // self.num_levels))


class PreparedChain(Prepared):
    """A chain's exact floors and, once needed, its tables."""

    def __init__(self, problem: Problem, *, time_limit_s: float, num_levels: int | None = None) -> None:
        self.problem = problem
        self.fixed_bytes = problem.resident_bytes + problem.input_bytes
        self.costs = ChainCosts(problem)
        self.shape = _choose_shape(self.costs.num_units, time_limit_s=time_limit_s)
        self.num_levels = num_levels or _choose_levels(self.shape, time_limit_s=time_limit_s)
        self.floors = ChainFloors(self.costs, self.shape)
        self._tables: dict[tuple[_Grid, Rounding], ChainTable] = {}
        self._bounds: dict[_Grid, tuple[int, Floats]] = {}
        self._read: dict[tuple[_Grid, int], tuple[int, Schedule]] = {}

    @property
    def smallest_bytes(self) -> int:
        """Exact: the least budget with which any persistent schedule of the chosen shape can run."""
        return self.fixed_bytes + self.floors.least_bytes

    @cached_property
    def is_exact(self) -> bool:
        """Whether all sizes are whole levels, so that no rounding takes place."""
        return self.floors.full_bytes <= 4 * self.num_levels * self.costs.common_divisor()

    @cached_property
    def whole(self) -> _Grid:
        """Levels up to the bytes with which everything is kept."""
        full = max(1, self.floors.full_bytes)
        return _Grid(full, full // self.costs.common_divisor() if self.is_exact else self.num_levels)

    @cached_property
    def near(self) -> _Grid:
        """Finer levels near the edge of feasibility."""
        least, full = self.floors.least_bytes, self.floors.full_bytes
        return _Grid(max(1, least + (full - least) // 8), self.num_levels)

    def best(self, budget_bytes: int) -> Candidate | None:
        """The best schedule that the tables know, with the bound that they prove."""
        num_bytes = budget_bytes - self.fixed_bytes
        if num_bytes < self.floors.least_bytes:
            return None
        last = self.costs.num_units - 1
        if num_bytes >= self.floors.full_bytes and self.costs.fastest_is_least:
            seconds = sum(option.total_s for option in self.costs.fastest)
            schedule = Schedule(keep_everything(self.costs, 0, last))
            return Candidate(schedule, self._bound(seconds))
        if self.is_exact:
            table = self._table(self.whole, Rounding.UP)
            return Candidate(read_schedule(table, num_bytes), self._bound(self._value(table, num_bytes)))
        return self._best_rounded(num_bytes)

    def suggested_budgets(self) -> list[int]:
        """The levels at which the whole chain's seconds change."""
        rounding = Rounding.UP if self.is_exact else Rounding.NEAREST
        table = self._table(self.whole, rounding)
        row = table.rows[0][-1]
        levels = [m for m in range(1, row.size) if row[m] < row[m - 1]]
        full = self.fixed_bytes + self.floors.full_bytes
        budgets = {min(self.fixed_bytes + m * table.level_bytes, full) for m in levels}
        return sorted({self.smallest_bytes, full, *(b for b in budgets if b >= self.smallest_bytes)})

    def _best_rounded(self, num_bytes: int) -> Candidate:
        table = self._table(self.whole, Rounding.UP)
        seconds, schedule = self._value(table, num_bytes), None
        bound = self._bound_seconds(self.whole, num_bytes)
        # More bytes must never cost more seconds, so the finer grid may be left out only if nothing that it
        # could know, up to its top, can be better.
        for grid in (self.whole, self.near):
            known = self._bound_seconds(self.whole, min(num_bytes, grid.top_bytes))
            if seconds <= known * (1 + _TIE):
                continue
            found_s, found = self._scan(grid, num_bytes)
            if found is not None and found_s < seconds:
                seconds, schedule = found_s, found
            if num_bytes <= grid.top_bytes:
                bound = max(bound, self._bound_seconds(grid, num_bytes))
        return Candidate(schedule or read_schedule(table, num_bytes), self._bound(min(bound, seconds)))

    def _bound(self, seconds: float) -> Bound | None:
        return Bound(seconds, schedules=PERSISTENT_SCHEDULES) if self.shape.group == 1 else None

    def _value(self, table: ChainTable, num_bytes: int) -> float:
        return table.value(0, len(table.shape.ends(0)) - 1, num_bytes)

    def _table(self, grid: _Grid, rounding: Rounding) -> ChainTable:
        key = (grid, rounding)
        if key not in self._tables:
            level_bytes = grid.level_bytes if self.is_exact else self._level_bytes(grid, rounding)
            num_levels = -(-grid.top_bytes // level_bytes)
            self._tables[key] = ChainTable(
                self.costs, self.floors, level_bytes=level_bytes, num_levels=num_levels, rounding=rounding
            )
        return self._tables[key]

    def _level_bytes(self, grid: _Grid, rounding: Rounding) -> int:
        """A level size, at most a fifth above the grid's, that divides the chain's common sizes best."""
        sizes = Counter(int(size) for size in self.costs.output_bytes)
        sizes.update(option.kept_bytes for option in self.costs.fastest)
        sizes.pop(0, None)
        least = grid.level_bytes
        choices = {least}
        for size, _ in sizes.most_common(32):
            parts = size // least
            choices.update({size // parts, -(-size // parts)} if parts else ())

        def loss(level_bytes: int) -> float:
            bias = rounding.bias(level_bytes)
            wrong = sum(
                abs((size + bias) // level_bytes * level_bytes - size) * num for size, num in sizes.items()
            )
            return wrong + level_bytes

        return min(
            (size for size in choices if 5 * size <= 6 * least or size == least), key=lambda s: (loss(s), s)
        )

    def _bound_seconds(self, grid: _Grid, num_bytes: int) -> float:
        """What the table rounded down proves (0 if cuts are restricted: then it proves nothing)."""
        if self.shape.group > 1:
            return 0.0
        if grid not in self._bounds:
            table = self._table(grid, Rounding.DOWN)
            # Only the whole chain's row is of use, and the others are large.
            self._bounds[grid] = table.level_bytes, table.rows[0][-1].copy()
            del self._tables[grid, Rounding.DOWN]
        level_bytes, row = self._bounds[grid]
        return float(row[min(num_bytes // level_bytes, row.size - 1)])

    def _scan(self, grid: _Grid, num_bytes: int) -> tuple[float, Schedule | None]:
        """The highest level of the table rounded to the nearest whose schedule fits.

        Rows fall with the level, so the highest level that fits is the best; and more bytes can only make
        higher levels fit.
        """
        table = self._table(grid, Rounding.NEAREST)
        row = table.rows[0][-1]
        level = min(num_bytes // table.level_bytes, table.num_levels)
        while level >= 0 and row[level] < float("inf"):
            if (grid, level) not in self._read:
                schedule = read_schedule(table, level * table.level_bytes)
                peak_bytes = simulate(self.problem, schedule).peak_bytes - self.fixed_bytes
                self._read[grid, level] = peak_bytes, schedule
            peak_bytes, schedule = self._read[grid, level]
            if peak_bytes <= num_bytes:
                return float(row[level]), schedule
            level -= 1
        return float("inf"), None


def _estimate_s(shape: ChainShape, num_levels: int) -> float:
    """Seconds to fill one table, roughly (measured on two cores). It decides sizes, so it must not vary."""
    num_ends = [len(shape.ends(first)) for first in range(shape.num_units)]
    num_cuts = sum(count * count // 2 for count in num_ends)
    return 45e-6 * sum(num_ends) + 1.3e-9 * num_cuts * num_levels


def _choose_shape(num_units: int, *, time_limit_s: float) -> ChainShape:
    """All cuts where that is affordable; otherwise the smallest groups that are."""
    group = 1
    while True:
        shape = ChainShape(num_units, group=group)
        affordable = 5 * _estimate_s(shape, _MIN_LEVELS) <= time_limit_s
        fits = 16 * shape.num_parts() * _MIN_LEVELS <= _TABLE_BYTES
        if (affordable and fits) or group * group >= num_units:
            return shape
        group += max(1, group // 4)


def _choose_levels(shape: ChainShape, *, time_limit_s: float) -> int:
    """As many levels as a fifth of the time limit and the memory for one table allow."""
    num_levels = min(_MAX_LEVELS, max(_MIN_LEVELS, _TABLE_BYTES // (16 * max(1, shape.num_parts()))))
    while num_levels > _MIN_LEVELS and 5 * _estimate_s(shape, num_levels) > time_limit_s:
        num_levels = max(_MIN_LEVELS, num_levels * 4 // 5)
    return num_levels
