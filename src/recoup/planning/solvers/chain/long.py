"""The chain solver for more units than its tables can take one by one: it plans groups of them."""

from __future__ import annotations

from functools import cached_property

from recoup.planning.problem import Problem
from recoup.planning.schedule import Schedule
from recoup.planning.simulate import simulate
from recoup.planning.solvers.base import Candidate, Prepared
from recoup.planning.solvers.bounds import Relaxation
from recoup.planning.solvers.chain.groups import group_chain
from recoup.planning.solvers.chain.prepared import PreparedChain
from recoup.planning.solvers.chain.sizing import choose_levels

__all__ = ["PreparedLongChain"]

_NUM_GROUPS = 100


class PreparedLongChain(Prepared):
    """A chain of groups, and their schedules as those of units.

    Where bytes are plenty, hardly anything is replayed more than once and groups lose next to nothing: the
    relaxation, which is the bound here, shows it. Near the smallest budget they lose the cuts inside groups.
    """

    def __init__(self, problem: Problem, *, time_limit_s: float) -> None:
        self.problem = problem
        self._relaxation = Relaxation(problem)
        self.grouping = group_chain(problem, num_groups=_NUM_GROUPS)
        num_levels = choose_levels(self.grouping.problem.num_units, time_limit_s=time_limit_s)
        self.groups = PreparedChain(self.grouping.problem, num_levels=num_levels, proves=False)

    @cached_property
    def smallest_bytes(self) -> int:
        """What the groups' schedule at their least budget really needs."""
        return simulate(self.problem, self._schedule(self.groups.smallest_bytes)).peak_bytes

    def suggested_budgets(self) -> list[int]:
        """Those of the groups."""
        return [self.smallest_bytes, *self.groups.suggested_budgets()[1:]]

    def best(self, budget_bytes: int) -> Candidate | None:
        """The groups' schedule."""
        least_bytes = self.groups.smallest_bytes
        if budget_bytes < least_bytes and budget_bytes < self.smallest_bytes:
            return None
        return Candidate(self._schedule(max(budget_bytes, least_bytes)), self._relaxation.bound(budget_bytes))

    def _schedule(self, budget_bytes: int) -> Schedule:
        found = self.groups.best(budget_bytes)
        assert found is not None
        return self.grouping.expand(found.schedule)
