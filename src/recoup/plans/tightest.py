"""The solvers for models, and the plan that needs the least memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from recoup.model.recipe import Recipe
from recoup.planning import Plan, Problem, simulate
from recoup.planning.plan import Session
from recoup.planning.solvers.bounds import relaxed_bound
from recoup.planning.solvers.chain import ChainSolver
from recoup.planning.solvers.select import SelectSolver

__all__ = ["session_of", "tightest_plan"]

_MANY_UNITS = 120
"""With more units `select` is asked too: `chain` rounds bytes more coarsely there. By `chain` alone, made-up steps took
longer by at most 0.01 % up to 120 units, by up to 1.07 % at 140 and by up to 1.50 % from 160 to 300 units:
benchmarks/results/planning_select_chain_cpu-x86_64_202611.md."""


def session_of(problem: Problem, *, proves: bool = True) -> Session:
    """With the solvers whose plans an eager model can run: options per unit, and (nested) segments.

    Args:
        problem: a model's step.
        proves: whether anyone reads the bounds of its plans.
    """
    solvers = (ChainSolver(), SelectSolver()) if problem.num_units > _MANY_UNITS else (ChainSolver(),)
    return Session(problem, solvers=solvers, proves=proves)


def tightest_plan(problem: Problem, recipes: Sequence[tuple[Recipe, ...]]) -> Plan:
    """The plan that needs the least memory, as predicted; the same one whatever the seconds of the day.

    Args:
        problem: a model's step.
        recipes: for every unit, in the order of its options.
    """
    session = session_of(_with_steady_seconds(problem, recipes), proves=False)
    best = session.plan(session.smallest_bytes)
    bound = relaxed_bound(problem, best.budget_bytes)
    return replace(best, problem=problem, bound=bound, predicted=simulate(problem, best.schedule))


def _with_steady_seconds(problem: Problem, recipes: Sequence[tuple[Recipe, ...]]) -> Problem:
    """The problem with the number of forwards in the place of seconds, so that equal plans are told apart by that."""
    units = []
    for unit, own in zip(problem.units, recipes, strict=True):
        options = [
            replace(
                option, forward_s=1.0, backward_s=1.0 + recipe.whole + 0.1 * len(recipe.inner), again_s=0.0
            )
            for option, recipe in zip(unit.options, own, strict=True)
        ]
        units.append(replace(unit, options=tuple(options)))
    return replace(problem, units=tuple(units))
