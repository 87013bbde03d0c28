"""``select``: the best option for every unit under one budget, skips included, without nested replay.

The class: all forwards in order, then all backwards, each unit under one option; a unit may also keep only
its input and run its forward again right before its own backward, unless it ``runs_once``. In that class the
whole peak constraint is one row per unit (NOTE [ One constraint per unit ] in ``levels``), and choosing is an
integer program: a multiple-choice knapsack whose room shrinks along the chain. HiGHS solves its relaxation with
rows on demand (``prices``); the prices bound every partial selection so well that few are left, and those are
enumerated (``labels``). 200 units with six options take milliseconds.

Sinha & Zoltners, The multiple-choice knapsack problem (Operations Research, 1979); Pisinger, A minimal
algorithm for the multiple-choice knapsack problem (EJOR, 1995) for bounded labels; the choice per block
follows Zhao et al., Rockmate (ICML 2023), whose program Hiremate generalises. Departure: their peak is that
of one sequence of blocks with a common transient; here every moment of the step has its own row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from recoup.errors import BudgetError
from recoup.planning.problem import Problem
from recoup.planning.simulate import simulate
from recoup.planning.solvers.base import Bound, Candidate, Prepared, Solver
from recoup.planning.solvers.select.levels import Levels, all_choices
from recoup.planning.solvers.select.search import Selector
from recoup.sizes import format_bytes

__all__ = ["ONE_OPTION_SCHEDULES", "PreparedSelect", "SelectSolver", "solve_select"]

ONE_OPTION_SCHEDULES = "schedules with one option per unit"

_NUM_SUGGESTED = 20


def solve_select(problem: Problem, *, budget_bytes: int, time_limit_s: float = 10.0) -> Candidate:
    """The fastest schedule with one option per unit whose peak fits a budget.

    Args:
        problem: any; links are not used.
        budget_bytes: for the whole step, resident bytes included.
        time_limit_s: roughly how long to search; it sets counts and not a clock.

    Raises:
        BudgetError: if none fits; it names the smallest feasible budget of this class and the unit that
            sets it.

    >>> from recoup.planning.problem import Unit
    >>> units = [
    ...     Unit.keep_or_recompute(f"block{i}", forward_s=1, backward_s=2, held_bytes=60, output_bytes=10)
    ...     for i in range(4)
    ... ]
    >>> best = solve_select(Problem(units, input_bytes=10), budget_bytes=230)
    >>> print(best.schedule, best.bound.seconds)
    F0:0 F1:1 F2:1 F3:0 B3 B2 B1 B0 14.0
    """
    prepared = PreparedSelect(problem, time_limit_s=time_limit_s)
    candidate = prepared.best(budget_bytes)
    if candidate is None:
        raise prepared.budget_error(budget_bytes)
    return candidate


class SelectSolver(Solver):
    """One option per unit, for every problem. Links are not used, and nothing is replayed across units."""

    name = "select"
    schedules = ONE_OPTION_SCHEDULES

    def applies(self, problem: Problem) -> bool:
        """It understands skips, and may ignore links."""
        return True

    def prepare(self, problem: Problem, *, time_limit_s: float) -> PreparedSelect:
        """Folds the moments of the step into one number per choice."""
        return PreparedSelect(problem, time_limit_s=time_limit_s)


class PreparedSelect(Prepared):
    """A problem's choices, and the selections found so far."""

    def __init__(self, problem: Problem, *, time_limit_s: float) -> None:
        self.problem = problem
        self.levels = Levels(problem)
        self.selector = self.prover = Selector(self.levels, time_limit_s=time_limit_s)
        proving = Levels(problem, all_choices(problem, is_bound=True))
        if proving.choices != self.levels.choices:
            self.prover = Selector(proving, time_limit_s=time_limit_s)

    @cached_property
    def smallest_bytes(self) -> int:
        """The smallest budget that one option per unit is known to meet; less than counted where more inputs go."""
        return simulate(self.problem, self.levels.schedule(self.selector.smallest)).peak_bytes

    def best(self, budget_bytes: int) -> Candidate | None:
        """The best selection's schedule, with its bound, or ``None`` if none fits."""
        if budget_bytes < self.smallest_bytes:
            return None
        positions: Sequence[int] = self.selector.smallest
        if budget_bytes >= self.selector.smallest_bytes:
            positions = self.selector.select([budget_bytes])[0].positions
        bound_s = self.prover.select([budget_bytes])[0].bound_s
        return Candidate(self.levels.schedule(positions), Bound(bound_s, schedules=ONE_OPTION_SCHEDULES))

    def suggested_budgets(self) -> list[int]:
        """Budgets from the smallest up to where the fastest selection fits, solved together."""
        low, high = self.selector.smallest_bytes, self.selector.fastest_bytes
        steps = _NUM_SUGGESTED - 1
        budgets = sorted({low + (high - low) * step // steps for step in range(_NUM_SUGGESTED)})
        self.selector.select(budgets)
        return sorted({self.smallest_bytes, *budgets})

    def budget_error(self, budget_bytes: int) -> BudgetError:
        """What to say of a budget below the smallest."""
        peak = simulate(self.problem, self.levels.schedule(self.selector.smallest)).peak
        unit = self.problem.units[peak.unit].name
        smallest = self.smallest_bytes
        return BudgetError(
            f"No schedule with one option per unit fits {format_bytes(budget_bytes)} ({budget_bytes} bytes)."
            f" The smallest feasible budget is {format_bytes(smallest)} ({smallest} bytes), set by the"
            f" {peak.phase} of unit {unit!r}. Raise the budget, or give that unit an option with fewer"
            " bytes.",
            budget_bytes=budget_bytes,
            smallest_bytes=smallest,
            unit=unit,
        )
