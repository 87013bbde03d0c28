"""The solvers for models, and the plan that needs the least memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace

from recoup.errors import ScheduleError
from recoup.model.recipe import RECOMPUTE, Recipe
from recoup.planning import Plan, Problem, Schedule, Unit, simulate
from recoup.planning.plan import Session
from recoup.planning.problem import with_numbered_options
from recoup.planning.solvers.baselines import BY_HAND, REPLAY, one_option_each
from recoup.planning.solvers.bounds import relaxed_bound
from recoup.planning.solvers.chain import ChainSolver
from recoup.planning.solvers.select import SelectSolver

__all__ = ["Tightest", "recomputing", "session_of", "way_to_recompute"]

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


class Tightest:
    """The plan that needs the least memory, as predicted; the same one whatever the seconds of the day.

    Recipes that measured seconds have chosen are left out, and the others are taken in an order without seconds.

    Args:
        problem: a model's step.
        recipes: for every unit, in the order of its options.
    """

    def __init__(self, problem: Problem, recipes: Sequence[tuple[Recipe, ...]]) -> None:
        self._problem = problem
        self._kept = [_steady_order(own) for own in recipes]
        chosen = [
            tuple(own[index] for index in indices) for own, indices in zip(recipes, self._kept, strict=True)
        ]
        self._steady = _with_steady_seconds(with_numbered_options(problem, self._kept), chosen)
        # Solvers calculate with rounded bytes, and may pass over it. Not every step allows it.
        self._by_hand = recomputing(self._steady, chosen, range(problem.num_units))
        self._by_hand_bytes = math.inf
        with suppress(ScheduleError):
            self._by_hand_bytes = simulate(self._steady, self._by_hand).peak_bytes
        self._fits_bytes = self._by_hand_bytes
        self._plan: Plan | None = None

    def fits(self, num_bytes: int) -> bool:
        """Whether `plan` needs no more than that: finding the plan itself takes longer."""
        if num_bytes < self._fits_bytes and self._plan is None:
            # No longer than needed: the tables of its solvers take hundreds of MiB for deep models.
            session = session_of(self._steady, proves=False)
            if session.has_plan_within(num_bytes):
                self._fits_bytes = num_bytes
            else:
                self._plan = self._found(session)  # whoever refuses a budget asks for it
        least_bytes = self._fits_bytes if self._plan is None else self._plan.predicted.peak_bytes
        return least_bytes <= num_bytes

    @property
    def plan(self) -> Plan:
        """The plan."""
        if self._plan is None:
            self._plan = self._found(session_of(self._steady, proves=False))
        return self._plan

    def _found(self, session: Session) -> Plan:
        best = session.plan(session.smallest_bytes)
        if self._by_hand_bytes < best.predicted.peak_bytes:
            best = replace(best, schedule=self._by_hand, solver=BY_HAND)
        best = replace(best, schedule=best.schedule.with_options(self._kept))
        predicted = simulate(self._problem, best.schedule)
        num_bytes = predicted.peak_bytes
        bound = relaxed_bound(self._problem, num_bytes)
        return replace(best, problem=self._problem, budget_bytes=num_bytes, bound=bound, predicted=predicted)


def recomputing(problem: Problem, recipes: Sequence[tuple[Recipe, ...]], units: Collection[int]) -> Schedule:
    """Some units recomputed, each as a whole and by itself; the others, and what cannot be recomputed, kept."""
    chosen = set(units)
    ways = [way_to_recompute(unit, own) for unit, own in zip(problem.units, recipes, strict=True)]
    return one_option_each(problem, [way if index in chosen else 0 for index, way in enumerate(ways)])


def way_to_recompute(unit: Unit, recipes: tuple[Recipe, ...]) -> int:
    """How a unit is recomputed as a whole: under its option for that, or by a forward again; 0 if it cannot be."""
    if RECOMPUTE in recipes:
        return recipes.index(RECOMPUTE)
    return REPLAY if len(recipes) > 1 and not unit.runs_once else 0


def _steady_order(recipes: Sequence[Recipe]) -> list[int]:
    """The numbers of the recipes that do not depend on measured seconds; how the unit is kept comes first."""

    def order(index: int) -> tuple[bool, bool, list[str], tuple[str, ...]]:
        recipe = recipes[index]
        saves = recipe.cut.saves if recipe.cut is not None else None
        return not recipe.is_kept, recipe.whole, sorted(recipe.inner), saves or ()

    return sorted((index for index, recipe in enumerate(recipes) if not recipe.by_seconds), key=order)


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
