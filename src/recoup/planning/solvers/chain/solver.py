"""``chain``: the best persistent schedule of a chain of unequal units, with options.

A schedule is *persistent* if a value that is kept beyond the forward that reads it stays until the backward
that reads it has run, and nothing that leads to it is run again before that, nor a unit that holds its
results (which could pay only to avoid ``again_s``). With C(s, t, m) the least seconds to run units s … t
forward and backward in m bytes (the input of s resident and outside m, the gradient of output t inside m):

    C(s, s, m) = min over options        forward + backward               if both fit in m
    C(s, t, m) = min over options of s   forward + C(s + 1, t, m - kept) + backward
                 min over cuts k         forwards of s … k - 1 + C(k, t, m - output of k - 1) + C(s, k - 1, m)

Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: Optimal checkpointing for heterogeneous chains (Inria
RR-9302, 2019; ACM TOMS 2024); options per unit as in Zhao, Le Hellard, Eyraud-Dubois, Gusak, Beaumont:
Rockmate (ICML 2023). Departures: the sweep to a cut needs room only for the units it runs; parameter
gradients appear as the backward proceeds; the last output's gradient appears only after the last forward,
and a sweep may run over the last unit too (NOTE [ The end ] in ``costs``); an option that needs only
its input runs without a forward of its own; feasibility is exact in bytes at any level size
(``floors``); a table rounded down proves a bound, and one rounded to the nearest finds better
schedules than the one rounded up, each checked by simulation (NOTE [ Levels ] in ``table``); units
that run once are never swept over (NOTE [ Units that run once ] in ``floors``); an option may cost
more where its unit has run before (NOTE [ First and further runs ] in ``costs``). Long chains are planned in
groups (``groups``).
"""

from __future__ import annotations

from recoup.planning.problem import Problem
from recoup.planning.solvers.base import PERSISTENT_SCHEDULES, Candidate, Prepared, Solver
from recoup.planning.solvers.chain.long import PreparedLongChain
from recoup.planning.solvers.chain.prepared import PreparedChain
from recoup.planning.solvers.chain.sizing import choose_levels, is_affordable

__all__ = ["ChainSolver", "solve_chain"]


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
    if num_levels is not None:
        return PreparedChain(problem, num_levels=num_levels).best(budget_bytes)
    return ChainSolver().prepare(problem, time_limit_s=10.0).best(budget_bytes)


class ChainSolver(Solver):
    """Optimal persistent schedules, for problems without skips. It never uses links.

    Args:
        proves: whether the bound is as tight as its tables can make it.
    """

    name = "chain"
    schedules = PERSISTENT_SCHEDULES

    def __init__(self, *, proves: bool = True) -> None:
        self.proves = proves

    def applies(self, problem: Problem) -> bool:
        """A chain has no skips."""
        return not problem.has_skips

    def prepare(self, problem: Problem, *, time_limit_s: float) -> Prepared:
        """Works out exact feasibility; the tables follow when they are needed."""
        if is_affordable(problem.num_units, time_limit_s=time_limit_s):
            num_levels = choose_levels(problem.num_units, time_limit_s=time_limit_s)
            return PreparedChain(problem, num_levels=num_levels, proves=self.proves)
        return PreparedLongChain(problem, time_limit_s=time_limit_s)

    def unproven(self) -> Solver:
        """With a bound from coarse tables."""
        return ChainSolver(proves=False)
