"""``plan``: the best schedule under a budget that any of the solvers finds, with proof of how good it is."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from recoup.errors import BudgetError, ProblemError
from recoup.planning.actions import Backward
from recoup.planning.additive_numbers import additive, rounded_bytes
from recoup.planning.checks import check_seconds
from recoup.planning.problem import Problem
from recoup.planning.schedule import Schedule
from recoup.planning.simulate import simulate
from recoup.planning.simulation_result import Simulation
from recoup.planning.solvers import SOLVERS
from recoup.planning.solvers.base import ALL_SCHEDULES, Bound, Candidate, Prepared, Solver
from recoup.planning.solvers.bounds import Relaxation
from recoup.sizes import format_bytes, parse_bytes

__all__ = ["Plan", "Session", "frontier", "minimum_budget", "plan"]

# Seconds are sums of measured floats in different orders; closer than this they are the same.
_SAME_SECONDS = 1e-9
_LITTLE = 0.01
"""Rounding by less than this share of the useful budgets is not worth looking for faster plans."""
_MOST_BUDGETS, _MOST_ANSWERED_UNITS = 24, 500
"""For how many budgets a solver is asked where its numbers are rounded, and how many units those answers may have."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule for a problem under a budget, what it will cost, and how much better any could be.

    Attributes:
        problem: what was planned.
        budget_bytes: what the step may peak at.
        schedule: what to do.
        solver: which solver found it.
        bound: no schedule of the class it names takes fewer seconds under this budget.
        predicted: the schedule's simulation.
    """

    problem: Problem = field(repr=False)
    budget_bytes: int
    schedule: Schedule = field(repr=False)
    solver: str
    bound: Bound
    predicted: Simulation

    @property
    def options(self) -> tuple[str, ...]:
        """For each unit, the name of the option that its backward runs under."""
        chosen = {action.unit: action.option for action in self.schedule if isinstance(action, Backward)}
        return tuple(unit.options[chosen[index]].name for index, unit in enumerate(self.problem.units))

    @property
    def gap(self) -> float:
        """How much longer it takes than the bound, as a share of the bound."""
        excess_s = self.predicted.seconds - self.bound.seconds
        if excess_s <= _SAME_SECONDS * self.predicted.seconds:
            return 0.0
        return excess_s / self.bound.seconds if self.bound.seconds > 0 else float("inf")

    @property
    def is_optimal(self) -> bool:
        """Whether it is proven optimal in the class that the bound names."""
        return self.gap == 0.0

    def __str__(self) -> str:
        peak = self.predicted.peak
        proof = "optimal" if self.is_optimal else f"at most {self.gap:.2%} above the optimum"
        return (
            f"{self.predicted.seconds:.6g} s with {format_bytes(peak.num_bytes)} of"
            f" {format_bytes(self.budget_bytes)}, by {self.solver}: {proof} among {self.bound.schedules}.\n"
            f"The peak is in the {peak.phase} of {self.problem.units[peak.unit].name!r};"
            f" {sum(self.predicted.num_recomputes)} forwards are recomputed."
        )


def plan(
    problem: Problem,
    budget: int | str,
    *,
    time_limit_s: float = 10.0,
    solvers: Sequence[Solver] = SOLVERS,
) -> Plan:
    """Finds the fastest schedule whose peak fits a budget.

    The time limit decides how fine the solvers work, by a fixed estimate and not by the clock, so that the
    same input gives the same plan everywhere.

    Args:
        problem: the step in numbers.
        budget: device bytes for the whole step, such as ``"8GiB"``.
        time_limit_s: roughly how long one solver may take.
        solvers: which to try, best first.

    Raises:
        BudgetError: if nothing fits; it names the smallest feasible budget and the unit that sets it.
        SizeError: if the budget cannot be read.

    >>> from recoup.planning.problem import Unit
    >>> units = [
    ...     Unit.keep_or_recompute(f"block{i}", forward_s=1, backward_s=2, held_bytes=60, output_bytes=10)
    ...     for i in range(4)
    ... ]
    >>> print(plan(Problem(units, input_bytes=10), "230B"))
    14 s with 180 B of 230 B, by chain: optimal among persistent schedules.
    The peak is in the backward of 'block3'; 2 forwards are recomputed.
    """
    return Session(problem, time_limit_s=time_limit_s, solvers=solvers).plan(parse_bytes(budget))


def minimum_budget(
    problem: Problem, *, time_limit_s: float = 10.0, solvers: Sequence[Solver] = SOLVERS
) -> int:
    """The smallest budget in bytes for which ``plan`` finds a schedule.

    >>> from recoup.planning.problem import Unit
    >>> unit = Unit.keep_or_recompute("a", forward_s=1, backward_s=2, held_bytes=60, output_bytes=10)
    >>> minimum_budget(Problem([unit], input_bytes=5))
    75
    """
    return Session(problem, time_limit_s=time_limit_s, solvers=solvers).smallest_bytes


def frontier(
    problem: Problem,
    *,
    num_points: int = 20,
    budgets: Iterable[int | str] | None = None,
    time_limit_s: float = 10.0,
    solvers: Sequence[Solver] = SOLVERS,
) -> tuple[Plan, ...]:
    """The best seconds for every budget: as few plans as describe it, from the smallest budget up.

    Each point is what ``plan`` finds at the point's budget, which is as a rule its own peak: between two points the
    earlier plan is the one to use. Plans that are no faster than one with fewer bytes are left out.

    Args:
        problem: the step in numbers.
        num_points: at most this many plans, unless ``budgets`` are given.
        budgets: where to look; spread over the useful range unless given. Infeasible ones are left out.
        time_limit_s: roughly how long one solver may take.
        solvers: which to try, best first.

    >>> from recoup.planning.problem import Unit
    >>> units = [
    ...     Unit.keep_or_recompute(f"block{i}", forward_s=1, backward_s=2, held_bytes=60, output_bytes=10)
    ...     for i in range(3)
    ... ]
    >>> [(point.budget_bytes, point.predicted.seconds) for point in frontier(Problem(units, input_bytes=10))]
    [(100, 12.0), (110, 11.0), (170, 10.0), (230, 9.0)]
    """
    session = Session(problem, time_limit_s=time_limit_s, solvers=solvers)
    return session.frontier(num_points=num_points, budgets=budgets)


def _is_faster(one: Plan, other: Plan) -> bool:
    return one.predicted.seconds < other.predicted.seconds * (1 - _SAME_SECONDS)


def _spread(budgets: list[int], num_points: int) -> list[int]:
    """At most ``num_points`` of sorted budgets, the first and the last among them, evenly spaced in bytes."""
    if len(budgets) <= num_points:
        return budgets
    low, high = budgets[0], budgets[-1]
    wanted = [low + (high - low) * index // max(num_points - 1, 1) for index in range(num_points)]
    return sorted({min(budgets, key=lambda budget: (abs(budget - target), budget)) for target in wanted})


class Session:
    """A problem with the solvers' shared work, across budgets.

    NOTE [ Rounded numbers ]
        Solvers calculate with additive numbers (``recoup.planning.additive_numbers``), which exceed the bytes of some
        plans where values have other lifetimes than a solver knows. What they answer for larger budgets, or in numbers
        that are rounded down, may therefore fit, too: such answers for a few budgets, the same ones whatever is asked
        for so that more bytes never cost more seconds, are simulated, and the fastest that fits is taken. Answers for
        more bytes are faster, so they are looked at from the largest budget down, until one fits. Without such values
        there is one answer.

    Args:
        problem: the step in numbers.
        time_limit_s: roughly how long one solver may take.
        solvers: which to try, best first.
        proves: whether plans need the best bound that solvers can prove; without, it may be lower.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        time_limit_s: float = 10.0,
        solvers: Sequence[Solver] = SOLVERS,
        proves: bool = True,
    ) -> None:
        check_seconds("The planner", time_limit_s=time_limit_s)
        self.problem = problem
        self.time_limit_s, self._proves = time_limit_s, proves
        self._numbers = additive(problem)
        self._rounded_bytes = rounded_bytes(problem)
        self._relaxation = Relaxation(problem)
        self.solvers = [solver for solver in solvers if solver.applies(self._numbers)]
        if not self.solvers:
            raise ProblemError(
                f"None of the solvers ({', '.join(s.name for s in solvers)}) applies to this problem."
            )
        self._prepared: dict[tuple[str, bool], Prepared] = {}
        self._simulated: dict[Schedule, Simulation] = {}
        self._spread: dict[tuple[str, bool], list[int]] = {}
        self._answered: dict[tuple[str, bool, int], Candidate | None] = {}

    def prepared(self, solver: Solver, *, is_low: bool = False) -> Prepared:
        """A solver's work on the problem, done once; in numbers that are rounded up or down."""
        key = (solver.name, is_low)
        if key not in self._prepared:
            numbers = additive(self.problem, is_bound=True) if is_low else self._numbers
            # What is proven in numbers that are rounded down says nothing about the others.
            asked = solver if self._proves and not is_low else solver.unproven()
            self._prepared[key] = asked.prepare(numbers, time_limit_s=self.time_limit_s)
        return self._prepared[key]

    def _simulate(self, schedule: Schedule) -> Simulation:
        if schedule not in self._simulated:
            self._simulated[schedule] = simulate(self.problem, schedule)
        return self._simulated[schedule]

    @cached_property
    def smallest_bytes(self) -> int:
        """The smallest budget at which any solver answers."""
        return min(peak for solver in self.solvers for peak in self._tight_peaks(solver))

    def has_plan_within(self, num_bytes: int) -> bool:
        """Whether `smallest_bytes` is no more than that. One answer tells, and one for less has less as a rule."""
        peaks = (peak for solver in self.solvers for peak in self._tight_peaks(solver, num_bytes))
        return any(peak <= num_bytes for peak in peaks)

    def is_near_smallest(self, budget_bytes: int) -> bool:
        """Whether a budget is so small that answers for other seconds may need more, or less, than it."""
        return bool(self._rounded_bytes) and not self.has_plan_within(budget_bytes - self._rounded_bytes)

    def _tight_peaks(self, solver: Solver, first_bytes: int = -1) -> Iterator[int]:
        """Of answers for no more than ``first_bytes``, then of the others."""
        smallest = self.prepared(solver).smallest_bytes
        if not self._rounded_bytes and smallest is not None:
            yield smallest
        for low_bytes, high_bytes in ((-1, first_bytes), (first_bytes, sys.maxsize)):
            for is_low in (False, True):
                for candidate in self._answers(solver, is_low, low_bytes, high_bytes):
                    yield self._simulate(candidate.schedule).peak_bytes

    def _answers(
        self, solver: Solver, is_low: bool, above_bytes: int = -1, most_bytes: int = sys.maxsize
    ) -> Iterator[Candidate]:
        """A solver's answers for a few budgets in a range, the fastest first: see NOTE [ Rounded numbers ]."""
        for budget in self._budgets(solver, is_low):
            key = (solver.name, is_low, budget)
            if above_bytes < budget <= most_bytes:
                if key not in self._answered:
                    self._answered[key] = self.prepared(solver, is_low=is_low).best(budget)
                if (candidate := self._answered[key]) is not None:
                    yield candidate

    def _budgets(self, solver: Solver, is_low: bool) -> list[int]:
        """For which budgets a solver is asked, whatever the budget of a plan; the largest first."""
        key = (solver.name, is_low)
        if key not in self._spread:
            is_little = is_low and len(self._budgets(solver, False)) < 2
            found = set() if is_little or not self._rounded_bytes else self._spread_budgets(solver, is_low)
            self._spread[key] = sorted(found, reverse=True)
        return self._spread[key]

    def _spread_budgets(self, solver: Solver, is_low: bool) -> set[int]:
        prepared = self.prepared(solver, is_low=is_low)
        if (low := prepared.smallest_bytes) is None:
            return set()
        span = max([*prepared.suggested_budgets(), low]) - low
        budgets = {low}
        if self._rounded_bytes > span * _LITTLE:
            num_budgets = max(2, min(_MOST_BUDGETS, _MOST_ANSWERED_UNITS // self.problem.num_units))
            budgets |= {low + span * index // (num_budgets - 1) for index in range(num_budgets)}
            budgets |= {low + (self._rounded_bytes >> shift) for shift in range(4)}
        return budgets

    def suggested_budgets(self) -> list[int]:
        """The smallest one, and those at which the first solver that has an opinion may change its answer.

        Below that solver's smallest the others are asked.
        """
        budgets = [self.smallest_bytes]
        above = float("inf")
        for solver in self.solvers:
            suggested = [budget for budget in self.prepared(solver).suggested_budgets() if budget < above]
            budgets += suggested
            above = min([above, *suggested])
        return sorted(set(budgets))

    def frontier(self, *, num_points: int, budgets: Iterable[int | str] | None) -> tuple[Plan, ...]:
        """As few plans as describe the best seconds for every budget."""
        if type(num_points) is not int or num_points < 1:
            raise ProblemError(f"A frontier needs at least one point; got num_points={num_points!r}.")
        if budgets is None:
            chosen = _spread(self.suggested_budgets(), num_points)
        else:
            chosen = sorted({parse_bytes(budget) for budget in budgets})
        found = [self.tightest(budget) for budget in chosen if budget >= self.smallest_bytes]
        points: list[Plan] = []
        for point in sorted(found, key=lambda point: (point.budget_bytes, point.predicted.seconds)):
            if not points or _is_faster(point, points[-1]):
                points.append(point)
        return tuple(points)

    def tightest(self, budget_bytes: int) -> Plan:
        """The plan for the smallest budget that is known to give as fast a one as this budget."""
        found = self.plan(budget_bytes)
        while self.smallest_bytes <= found.predicted.peak_bytes < found.budget_bytes:
            closer = self.plan(found.predicted.peak_bytes)
            if _is_faster(found, closer):
                break
            found = closer
        return found

    def plan(self, budget_bytes: int) -> Plan:
        """The best plan of all solvers that have a chance.

        Raises:
            BudgetError: nothing fits.
        """
        if (found := self.find(budget_bytes)) is None:
            raise self._budget_error(budget_bytes)
        return found

    def find(self, budget_bytes: int) -> Plan | None:
        """As `plan`; ``None`` if nothing fits, which is below `smallest_bytes`."""
        best: Plan | None = None
        solved: set[str] = set()
        relaxed = self._relaxation.bound(budget_bytes)
        for solver in self.solvers:
            if solver.schedules in solved or ALL_SCHEDULES in solved:
                continue
            found = self._try(solver, budget_bytes, relaxed)
            if found is None:
                continue
            if found.is_optimal:
                solved.add(found.bound.schedules)
            if best is None or _is_faster(found, best):
                best = found
        return best

    def _try(self, solver: Solver, budget_bytes: int, bound: Bound) -> Plan | None:
        best = self.prepared(solver).best(budget_bytes)
        # Of answers for no more bytes in the same numbers, `best` is the fastest.
        rounded_up = self._fitting(self._answers(solver, False, budget_bytes), budget_bytes)
        rounded_down = self._fitting(self._answers(solver, True), budget_bytes)
        fitting = [
            (self._simulate(candidate.schedule), candidate)
            for candidate in (self._fitting([best] if best else [], budget_bytes), rounded_up, rounded_down)
            if candidate is not None
        ]
        if not fitting:
            if best is not None and not self._rounded_bytes:
                peak_bytes = self._simulate(best.schedule).peak_bytes
                raise AssertionError(f"{solver.name} passed the budget: {peak_bytes} > {budget_bytes} bytes")
            return None
        predicted, candidate = min(fitting, key=lambda entry: entry[0].seconds)
        if self._rounded_bytes:
            # What fits the budget fits so much more in the solver's numbers.
            more_bytes = budget_bytes + self._rounded_bytes
            proven = self.prepared(solver).best(more_bytes) if self._proves else None
            candidate = replace(candidate, bound=proven.bound if proven else None)
        is_proven = bound.seconds >= predicted.seconds * (1 - _SAME_SECONDS)
        if candidate.bound is not None and not is_proven:
            # What holds for all schedules holds for every class of them.
            seconds = max(bound.seconds, candidate.bound.seconds)
            bound = Bound(seconds, schedules=candidate.bound.schedules)
        bound = Bound(min(bound.seconds, predicted.seconds), schedules=bound.schedules)
        return Plan(self.problem, budget_bytes, candidate.schedule, solver.name, bound, predicted)

    def _fitting(self, candidates: Iterable[Candidate], budget_bytes: int) -> Candidate | None:
        """The first of several schedules that fits a budget."""
        fitting = (one for one in candidates if self._simulate(one.schedule).peak_bytes <= budget_bytes)
        return next(fitting, None)

    def _budget_error(self, budget_bytes: int) -> BudgetError:
        smallest = self.smallest_bytes
        if budget_bytes >= smallest:
            names = ", ".join(solver.name for solver in self.solvers)
            raise AssertionError(f"{names}: no answer for {budget_bytes} bytes; the smallest is {smallest}")
        tight = self.plan(smallest)
        unit = self.problem.units[tight.predicted.peak.unit].name
        message = (
            f"No schedule fits {format_bytes(budget_bytes)} ({budget_bytes} bytes). The smallest feasible"
            f" budget is {format_bytes(smallest)} ({smallest} bytes), set by the {tight.predicted.peak.phase}"
            f" of unit {unit!r}. Raise the budget, or give that unit an option with fewer bytes."
        )
        return BudgetError(message, budget_bytes=budget_bytes, smallest_bytes=smallest, unit=unit)
