"""``select``: the best option for every unit under one budget, skips included, without nested replay.

The class: all forwards in order, then all backwards, each unit under one option; a unit may also keep only
its input and run its forward again right before its own backward. In that class the whole peak constraint is
one row per unit (NOTE [ One constraint per unit ] in ``select_levels``), and choosing is an integer program:
a multiple-choice knapsack whose room shrinks along the chain. Three ways to solve it, all exact:

1. *Labels* (the rule). HiGHS solves the relaxation with rows on demand and equal units together
   (``select_prices``); its prices bound every partial selection so well that few are left, and those are
   enumerated (``select_labels``). 200 units with six options take milliseconds.
2. *Counts* (long runs of equal units, where labels are many for want of differences): the integer program on
   HiGHS with a count per choice instead of a binary per unit (``select_program``).
3. *Branch and bound* on the same program, started from the best labels, where these had to be thinned and
   left a gap above 0.01 %.

Sinha & Zoltners, The multiple-choice knapsack problem (Operations Research, 1979); Pisinger, A minimal
algorithm for the multiple-choice knapsack problem (EJOR, 1995) for bounded labels; the choice per block
follows Zhao et al., Rockmate (ICML 2023), whose program Hiremate generalises. Departure: their peak is that
of one sequence of blocks with a common transient; here every moment of the step has its own row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from recoup.errors import BudgetError
from recoup.planning.problem import Problem
from recoup.planning.simulate import simulate
from recoup.planning.solvers.base import Bound, Candidate, Prepared, Solver
from recoup.planning.solvers.select_labels import search_labels
from recoup.planning.solvers.select_levels import Levels
from recoup.planning.solvers.select_prices import Pricer
from recoup.planning.solvers.select_program import SelectProgram
from recoup.planning.solvers.select_runs import EqualRun, arrange, find_runs
from recoup.sizes import format_bytes

__all__ = ["ONE_OPTION_SCHEDULES", "PreparedSelect", "SelectSolver", "Selection", "solve_select"]

ONE_OPTION_SCHEDULES = "schedules with one option per unit"

# The first target lies this share above the relaxation's bound; each further one eight times as far.
_FIRST_SLACK = 2.0**-20
_SLACK_GROWTH = 8.0
_MAX_ROUNDS = 12
# Measured: about this many labels a second, over all units.
_LABELS_A_SECOND = 1_000_000
_MIN_LABELS = 1_000
_NODES_A_SECOND = 200
_ACCEPTED_GAP = 1e-4
_NUM_SUGGESTED = 20
# Counting pays from this many units, if it makes the program this much smaller.
_COUNTED_UNITS = 64
_COUNTED_SHARE = 0.25


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


@dataclass(frozen=True, slots=True)
class Selection:
    """One choice per unit (positions in ``Levels.choices``), its seconds, and the bound that is proven."""

    positions: tuple[int, ...] = field(repr=False)
    seconds: float
    bound_s: float


class PreparedSelect(Prepared):
    """A problem's choices, and the selections found so far."""

    def __init__(self, problem: Problem, *, time_limit_s: float) -> None:
        self.problem = problem
        self.levels = Levels(problem)
        self.max_labels = max(_MIN_LABELS, int(time_limit_s * _LABELS_A_SECOND) // self.levels.num_units)
        self.max_nodes = max(1, int(time_limit_s * _NODES_A_SECOND))
        self._smallest_bytes, self._smallest = self.levels.smallest()
        self._fastest = self.levels.fastest()
        self._fastest_bytes = self.levels.peak_bytes(self._fastest)
        self._selections: dict[int, Selection] = {}

    @property
    def smallest_bytes(self) -> int:
        """The smallest budget that one option per unit can meet."""
        return self._smallest_bytes

    def best(self, budget_bytes: int) -> Candidate | None:
        """The best selection's schedule, with its bound, or ``None`` if none fits."""
        if budget_bytes < self.smallest_bytes:
            return None
        selection = self.select([budget_bytes])[0]
        schedule = self.levels.schedule(selection.positions)
        return Candidate(schedule, Bound(selection.bound_s, schedules=ONE_OPTION_SCHEDULES))

    def suggested_budgets(self) -> list[int]:
        """Budgets from the smallest up to where the fastest selection fits, solved together."""
        low, high = self.smallest_bytes, self._fastest_bytes
        steps = _NUM_SUGGESTED - 1
        budgets = sorted({low + (high - low) * step // steps for step in range(_NUM_SUGGESTED)})
        self.select(budgets)
        return budgets

    def budget_error(self, budget_bytes: int) -> BudgetError:
        """What to say of a budget below the smallest."""
        peak = simulate(self.problem, self.levels.schedule(self._smallest)).peak
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

    def select(self, budgets: Sequence[int]) -> list[Selection]:
        """The best selections under feasible budgets, found together: much cheaper than one by one.

        >>> from recoup.planning.problem import Unit
        >>> unit = Unit.keep_or_recompute("a", forward_s=1, backward_s=2, held_bytes=9, output_bytes=1)
        >>> prepared = PreparedSelect(Problem([unit], resident_bytes=90), time_limit_s=1)
        >>> [selection.seconds for selection in prepared.select([prepared.smallest_bytes, 200])]
        [3.0, 3.0]
        """
        wanted = [budget for budget in dict.fromkeys(budgets) if budget not in self._selections]
        tight = []
        for budget_bytes in wanted:
            if budget_bytes >= self._fastest_bytes:
                self._keep(budget_bytes, self._fastest, bound_s=None)
            else:
                tight.append(budget_bytes)
        if tight and self._is_counted:
            for budget_bytes in tight:
                self._branch(budget_bytes, start=None, known_ticks=0.0)
        elif tight:
            pricer = Pricer(self.levels)
            for budget_bytes in tight:
                self._search(pricer, budget_bytes)
        return [self._selections[budget] for budget in budgets]

    # Solving

    @cached_property
    def _runs(self) -> list[EqualRun]:
        return find_runs(self.levels)

    @cached_property
    def _program(self) -> SelectProgram:
        return SelectProgram(self.levels, self._runs)

    @cached_property
    def _is_counted(self) -> bool:
        """Whether equal units make counting the better way."""
        enough = self.levels.num_units >= _COUNTED_UNITS
        return enough and len(self._runs) <= _COUNTED_SHARE * self.levels.num_units

    def _search(self, pricer: Pricer, budget_bytes: int) -> None:
        """Labels, with a target that rises until there is a selection."""
        prices = pricer.price(budget_bytes)
        bound_ticks = prices.bound_ticks
        slack = max(bound_ticks * _FIRST_SLACK, 1.0)
        for _ in range(_MAX_ROUNDS):
            target = prices.bound_ticks + slack
            found = search_labels(self.levels, prices, target_ticks=target, max_labels=self.max_labels)
            if found.selection is not None and (found.ticks <= target or not found.is_complete):
                proven = None if found.is_complete else bound_ticks
                self._settle(budget_bytes, found.selection, bound_ticks=proven)
                return
            if found.is_complete:
                bound_ticks = target
            # A selection above the target is still one that the next target need not exceed.
            enough = found.ticks - prices.bound_ticks if found.selection is not None else float("inf")
            slack = min(slack * _SLACK_GROWTH, enough)
        self._branch(budget_bytes, start=None, known_ticks=bound_ticks)

    def _settle(self, budget_bytes: int, positions: Sequence[int], *, bound_ticks: float | None) -> None:
        """Takes a selection from the labels, or improves it where the proof is too weak."""
        if bound_ticks is not None:
            bound_s = bound_ticks * self.levels.tick_s
            if self.levels.seconds(positions) > bound_s * (1 + _ACCEPTED_GAP):
                self._branch(budget_bytes, start=positions, known_ticks=bound_ticks)
                return
        self._keep(
            budget_bytes, positions, bound_s=None if bound_ticks is None else bound_ticks * self.levels.tick_s
        )

    def _branch(self, budget_bytes: int, *, start: Sequence[int] | None, known_ticks: float) -> None:
        """The integer program, with what is known already."""
        answer = self._program.solve(budget_bytes, start=start, max_nodes=self.max_nodes)
        known = [one for one in (answer.selection, start, self._smallest) if one is not None]
        positions = min(known, key=self.levels.seconds)
        bound_s = max(answer.bound_ticks, known_ticks) * self.levels.tick_s
        self._keep(budget_bytes, positions, bound_s=bound_s)

    def _keep(self, budget_bytes: int, positions: Sequence[int], *, bound_s: float | None) -> None:
        """Remembers a selection; without a bound of its own it is optimal."""
        arranged = tuple(arrange(self.levels, self._runs, positions))
        seconds = self.levels.seconds(arranged)
        bound_s = seconds if bound_s is None else min(bound_s, seconds)
        self._selections[budget_bytes] = Selection(arranged, seconds, bound_s)
