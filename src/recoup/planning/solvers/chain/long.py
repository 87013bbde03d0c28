"""The chain solver for more units than its tables can take one by one."""

from __future__ import annotations

from functools import cached_property

from recoup.planning.problem import Problem
from recoup.planning.schedule import Schedule
from recoup.planning.simulate import simulate
from recoup.planning.solvers.base import ALL_SCHEDULES, PERSISTENT_SCHEDULES, Bound, Candidate, Prepared
from recoup.planning.solvers.bounds import relaxed_bound
from recoup.planning.solvers.chain.costs import ChainCosts
from recoup.planning.solvers.chain.grid import Grid, Scan
from recoup.planning.solvers.chain.groups import group_chain
from recoup.planning.solvers.chain.prepared import PreparedChain
from recoup.planning.solvers.chain.runs import RunTable, find_run, read_run_schedule
from recoup.planning.solvers.chain.sizing import choose_levels, choose_run_levels
from recoup.planning.solvers.chain.table import Rounding

__all__ = ["PreparedLongChain"]

_NUM_GROUPS = 100
_TIE = 1e-12


class PreparedLongChain(Prepared):
    """Groups for the whole range; and, for a long run of equal units, all cuts near the edge.

    Where bytes are plenty, hardly anything is replayed more than once and groups lose next to nothing: the
    relaxation shows it. Near the edge nested replay decides, and there the run's table has every cut.
    NOTE [ More bytes, never more seconds ] in ``chain_prepared`` holds here too.
    """

    def __init__(self, problem: Problem, *, time_limit_s: float) -> None:
        self.problem = problem
        self.fixed_bytes = problem.resident_bytes + problem.input_bytes
        self.grouping = group_chain(problem, num_groups=_NUM_GROUPS)
        num_levels = choose_levels(self.grouping.problem.num_units, time_limit_s=time_limit_s)
        self.groups = PreparedChain(self.grouping.problem, num_levels=num_levels, proves=False)
        self.costs = ChainCosts(problem)
        self.run = find_run(problem)
        least, full = self.groups.floors.least_bytes, self.groups.floors.full_bytes
        num_kinds = self.run.num_kinds(self.costs)
        run_levels = choose_run_levels(self.run, num_kinds=num_kinds, time_limit_s=time_limit_s)
        if 2 * self.run.length < problem.num_units:
            run_levels = 0
        self.near = Grid(least + (full - least) // 8, num_levels=run_levels)
        self._scan = Scan(self, self.near) if run_levels else None
        self._tables: dict[Rounding, RunTable] = {}

    @cached_property
    def smallest_bytes(self) -> int:
        """What the groups' schedule at their least budget really needs."""
        return simulate(self.problem, self._in_groups(self.groups.smallest_bytes)).peak_bytes

    def suggested_budgets(self) -> list[int]:
        """Those of the groups."""
        return [self.smallest_bytes, *self.groups.suggested_budgets()[1:]]

    def best(self, budget_bytes: int) -> Candidate | None:
        """The better of the groups' schedule and the run's."""
        least_bytes = self.groups.smallest_bytes
        if budget_bytes < least_bytes and budget_bytes < self.smallest_bytes:
            return None
        schedule = self._in_groups(max(budget_bytes, least_bytes))
        seconds = simulate(self.problem, schedule).seconds
        num_bytes = budget_bytes - self.fixed_bytes
        relaxed_s = relaxed_bound(self.problem, budget_bytes).seconds
        if self._scan is None:
            return Candidate(schedule, Bound(relaxed_s, schedules=ALL_SCHEDULES))
        clamped = min(num_bytes, self.near.top_bytes)
        if seconds > relaxed_bound(self.problem, clamped + self.fixed_bytes).seconds * (1 + _TIE):
            run_s, run_schedule = self._scan.best(clamped)
            if run_schedule is not None and run_s < seconds:
                seconds, schedule = run_s, run_schedule
        # The run's parts know of no inputs that go.
        if num_bytes > self.near.top_bytes or any(self.costs.frees):
            return Candidate(schedule, Bound(relaxed_s, schedules=ALL_SCHEDULES))
        proven = self.table(self.near, Rounding.DOWN)
        proven_s = float(proven.whole_row[min(num_bytes // proven.level_bytes, proven.num_levels)])
        return Candidate(
            schedule, Bound(min(max(relaxed_s, proven_s), seconds), schedules=PERSISTENT_SCHEDULES)
        )

    def _in_groups(self, budget_bytes: int) -> Schedule:
        found = self.groups.best(budget_bytes)
        assert found is not None
        return self.grouping.expand(found.schedule)

    def table(self, grid: Grid, rounding: Rounding) -> RunTable:
        """The run's table, filled at its first use."""
        if rounding not in self._tables:
            level_bytes = grid.fitting_bytes(self.costs, rounding)
            num_levels = -(-grid.top_bytes // level_bytes)
            self._tables[rounding] = RunTable(
                self.costs, self.run, level_bytes=level_bytes, num_levels=num_levels, rounding=rounding
            )
        return self._tables[rounding]

    def read(self, grid: Grid, level: int) -> Schedule:
        """The schedule of a level of the table rounded to the nearest."""
        return read_run_schedule(self.table(grid, Rounding.NEAREST), level)
