"""``revolve``: equal steps and a number of slots; the binomial optimum in closed form.

Griewank and Walther: Algorithm 799: revolve (ACM TOMS 26, 2000). With s slots, of which the input takes one,
and every step run forward at most r times before its own turn, at most C(s + r, s) steps can be reversed; l
steps cost r·l - C(s + r, r - 1) forwards beyond one each, r being the least that suffices.

A step's turn is ``F3:0 B3`` where the backward needs what its forward recorded, or ``B3`` where it needs only
the step's input. Unlike ``chain``, this never keeps what a step recorded for later: it needs no table, and is
the right tool for very many equal steps whose records are large.
"""

from __future__ import annotations

import math
from dataclasses import replace

from recoup.errors import ProblemError
from recoup.planning.actions import Action, Backward, Forward, Keep
from recoup.planning.problem import Problem
from recoup.planning.schedule import Schedule
from recoup.planning.simulate import simulate
from recoup.planning.solvers.base import PERSISTENT_SCHEDULES, Candidate, Prepared, Solver
from recoup.planning.solvers.baselines import fastest_option
from recoup.planning.solvers.chain.readout import sweep

__all__ = ["RevolveSolver", "extra_forwards", "num_repetitions", "reverse_part", "revolve"]


def num_repetitions(num_steps: int, *, num_slots: int) -> int:
    """How often a step is run forward at most, before its own turn: the least r with C(s + r, s) ≥ steps.

    >>> num_repetitions(10, num_slots=3)
    2
    """
    _check(num_steps, num_slots)
    repetitions = 0
    while math.comb(num_slots + repetitions, num_slots) < num_steps:
        repetitions += 1
    return repetitions


def extra_forwards(num_steps: int, *, num_slots: int) -> int:
    """The least number of forwards beyond one for each step.

    >>> extra_forwards(10, num_slots=3), extra_forwards(1000, num_slots=10)
    (15, 3636)
    """
    repetitions = num_repetitions(num_steps, num_slots=num_slots)
    if repetitions == 0:
        return 0
    return repetitions * num_steps - math.comb(num_slots + repetitions, repetitions - 1)


def _check(num_steps: int, num_slots: int) -> None:
    if type(num_steps) is not int or type(num_slots) is not int or num_steps < 1 or num_slots < 1:
        raise ProblemError(
            f"Revolve needs at least one step and one slot (the input takes one); got {num_steps!r} steps and"
            f" {num_slots!r} slots."
        )


def revolve(num_steps: int, *, num_slots: int, option: int = 0, records: bool = True) -> Schedule:
    """The schedule with the fewest forwards for equal steps.

    Args:
        num_steps: how many.
        num_slots: states that may be kept at once, the input among them.
        option: index of the steps' option.
        records: whether a backward needs what its own forward recorded (else only the step's input).

    Raises:
        ProblemError: if there is no step or no slot.

    >>> print(revolve(3, num_slots=1))
    F0 F1 F2:0 B2 F0 F1:0 B1 F0:0 B0
    >>> print(revolve(4, num_slots=2, records=False))
    F0 F1i F2 F3i B3 F1i B2 B1 B0
    """
    _check(num_steps, num_slots)
    actions = reverse_part(0, num_steps, num_slots=num_slots, option=option, records=records)
    if not records:
        # The last forward gives the output that the first gradient comes from.
        final = Forward(num_steps - 1, keep=Keep.INPUT) if num_steps > 1 else Forward(0)
        first_backward = next(i for i, action in enumerate(actions) if isinstance(action, Backward))
        actions.insert(first_backward, final)
    return Schedule(actions)


def reverse_part(first: int, stop: int, *, num_slots: int, option: int, records: bool) -> list[Action]:
    """Actions that reverse steps ``first`` … ``stop - 1``; the input of ``first`` is there and has a slot."""
    actions: list[Action] = []
    todo = [(first, stop, num_slots)]
    while todo:
        start, end, slots = todo.pop()
        if end - start == 1:
            if records:
                actions.append(Forward(start, keep=Keep.OPTION, option=option))
            actions.append(Backward(start, option=option))
            continue
        cut = start + _advance(end - start, slots)
        actions += sweep(start, cut)
        # The right part runs first, so it goes on top. Without a slot to spare it is a single step.
        todo += [(start, cut, slots), (cut, end, max(slots - 1, 1))]
    return actions


def _advance(num_steps: int, slots: int) -> int:
    """How far to the next checkpoint.

    Any k with C(s + r - 2, s) ≤ k ≤ C(s + r - 1, s) and C(s + r - 2, s - 1) ≤ l - k ≤ C(s + r - 1, s - 1) is
    optimal (Griewank and Walther); this is the smallest.
    """
    if slots == 1:
        return num_steps - 1
    repetitions = num_repetitions(num_steps, num_slots=slots)
    left = math.comb(slots + repetitions - 2, slots) if repetitions > 1 else 0
    return max(1, left, num_steps - math.comb(slots + repetitions - 1, slots - 1))


class RevolveSolver(Solver):
    """Revolve for problems whose units are all equal."""

    name = "revolve"
    schedules = PERSISTENT_SCHEDULES

    def applies(self, problem: Problem) -> bool:
        """All units are equal but for their names, may run again, and there are no skips."""
        first = problem.units[0]
        is_equal = all(replace(unit, name=first.name) == first for unit in problem.units)
        return is_equal and not first.runs_once and not problem.has_skips

    def prepare(self, problem: Problem, *, time_limit_s: float) -> Prepared:
        """Nothing to do beforehand: the closed form answers at once."""
        return _PreparedRevolve(problem)


class _PreparedRevolve(Prepared):
    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._option = fastest_option(problem.units[0])
        self._peaks: dict[int, int] = {}

    def _schedule(self, num_slots: int) -> Schedule:
        return revolve(self._problem.num_units, num_slots=num_slots, option=self._option)

    def _peak(self, num_slots: int) -> int:
        if num_slots not in self._peaks:
            self._peaks[num_slots] = simulate(self._problem, self._schedule(num_slots)).peak_bytes
        return self._peaks[num_slots]

    @property
    def smallest_bytes(self) -> int:
        """The peak with one slot, unless that has too many forwards to be worth simulating."""
        return self._peak(self._fewest)

    @property
    def _fewest(self) -> int:
        """One slot costs l²/2 forwards; past a million, start with more."""
        slots = 1
        while extra_forwards(self._problem.num_units, num_slots=slots) > 1_000_000:
            slots += 1
        return slots

    def best(self, budget_bytes: int) -> Candidate | None:
        """The most slots that fit. The peak grows with the slots, so bisection finds them."""
        low, high = self._fewest, max(self._fewest, self._problem.num_units)
        if self._peak(low) > budget_bytes:
            return None
        while low < high:
            middle = (low + high + 1) // 2
            if self._peak(middle) <= budget_bytes:
                low = middle
            else:
                high = middle - 1
        return Candidate(self._schedule(low))
