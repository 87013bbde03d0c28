"""Any solver, for problems in which options free their units' inputs.

Whether an option frees the input depends on whether the unit is replayed from it (NOTE [ The memory model ] in
``recoup.planning.problem``, 6): that is no sum over units, which is all that solvers know. So they plan two other
problems, and ``simulate`` tells which of their schedules fits the real one:

- the *prudent* one, in which all inputs stay until the backward. Every schedule needs at least as much there;
- the *hopeful* one, in which kept units hold fewer bytes instead, though they be replayed from their inputs. Held bytes
  cannot fall below zero, so there is a rest; with a budget larger by this rest, every schedule that fits the real
  problem fits the hopeful one, and what holds for all of the latter holds for all of the former.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial

from recoup.planning.problem import Option, Problem, Unit
from recoup.planning.simulate import simulate
from recoup.planning.simulation import Simulation
from recoup.planning.solvers.base import Candidate, Prepared, Solver

__all__ = ["PreparedFreeing", "frees_inputs", "hopeful", "prudent"]

_MOST_TRIES = 4


def frees_inputs(problem: Problem) -> bool:
    """Whether any option frees its unit's input."""
    return any(option.freed_input_bytes for unit in problem.units for option in unit.options)


def prudent(problem: Problem) -> Problem:
    """The problem in which all inputs stay."""
    return _changed(problem, lambda option, before: replace(option, freed_input_bytes=0))


def hopeful(problem: Problem) -> Problem:
    """The problem in which kept units hold fewer bytes.

    >>> keep = Option("keep", forward_s=1, backward_s=2, held_bytes=60)
    >>> freeing = replace(keep, freed_input_bytes=10)
    >>> units = [Unit("a", [keep], output_bytes=10), Unit("b", [freeing], output_bytes=10)]
    >>> [unit.options[0].held_bytes for unit in hopeful(Problem(units)).units]
    [60, 50]
    """
    return _changed(problem, _lessened)


def _lessened(option: Option, before: Unit | None) -> Option:
    freed_bytes = _credit(option, before)
    return replace(
        option,
        held_bytes=option.held_bytes - freed_bytes,
        forward_transient_bytes=option.forward_transient_bytes + freed_bytes,
        freed_input_bytes=0,
    )


def _credit(option: Option, before: Unit | None) -> int:
    """By how much less an option may hold. One that holds anything goes on holding something: it needs its forward."""
    if before is None or any(other.holds_output for other in before.options):
        return 0
    most_bytes = option.held_bytes - (option.held_bytes > 0 and not option.holds_output)
    return min(most_bytes, option.freed_input_bytes)


def _rest_bytes(problem: Problem) -> int:
    """By how much a schedule may at most need less than it does in the hopeful problem."""
    pairs = zip([None, *problem.units], problem.units, strict=False)
    return sum(
        max(option.freed_input_bytes - _credit(option, before) for option in unit.options)
        for before, unit in pairs
    )


def _changed(problem: Problem, change: Callable[[Option, Unit | None], Option]) -> Problem:
    units = []
    for index, unit in enumerate(problem.units):
        before = problem.units[index - 1] if index else None
        units.append(replace(unit, options=tuple(change(option, before) for option in unit.options)))
    return replace(problem, units=tuple(units))


class PreparedFreeing(Prepared):
    """A solver's work on both problems.

    Args:
        problem: with options that free inputs.
        solver: that applies to it.
        time_limit_s: for each of the two.
    """

    def __init__(self, problem: Problem, solver: Solver, *, time_limit_s: float) -> None:
        self.problem = problem
        self.rest_bytes = _rest_bytes(problem)
        self.hopeful = solver.prepare(hopeful(problem), time_limit_s=time_limit_s)
        self._prepare_prudent = partial(solver.prepare, prudent(problem), time_limit_s=time_limit_s)

    @cached_property
    def prudent(self) -> Prepared:
        """The solver's work on the prudent problem, which is seldom needed."""
        return self._prepare_prudent()

    @property
    def smallest_bytes(self) -> int | None:
        """The least that the schedules at the smallest budgets of both problems really need."""
        return self._smallest_bytes

    @cached_property
    def _smallest_bytes(self) -> int | None:
        hoped = self._smallest(self.hopeful)
        if hoped and not self.rest_bytes and hoped[1].peak_bytes == self.hopeful.smallest_bytes:
            return hoped[1].peak_bytes
        found = [hoped, self._smallest(self.prudent)]
        return min((predicted.peak_bytes for _, predicted in filter(None, found)), default=None)

    def best(self, budget_bytes: int) -> Candidate | None:
        """The fastest of the schedules that fit, with a bound of the hopeful problem."""
        fitting = [
            (predicted.seconds, candidate)
            for candidate, predicted in self._tried(budget_bytes)
            if predicted.peak_bytes <= budget_bytes
        ]
        if not fitting:
            return None
        _, found = min(fitting, key=lambda pair: pair[0])
        within = self.hopeful.best(budget_bytes + self.rest_bytes)
        return replace(found, bound=None if within is None else within.bound)

    def suggested_budgets(self) -> list[int]:
        """Those of the hopeful problem."""
        return self.hopeful.suggested_budgets()

    def _tried(self, budget_bytes: int) -> Iterator[tuple[Candidate, Simulation]]:
        within_bytes = budget_bytes
        for _ in range(_MOST_TRIES):
            found = self._at(self.hopeful, within_bytes)
            if found is None:
                break
            yield found
            excess_bytes = found[1].peak_bytes - budget_bytes
            if excess_bytes <= 0 and within_bytes == budget_bytes and not self.rest_bytes:
                return  # nothing that fits can be faster
            if excess_bytes <= 0:
                break
            within_bytes -= excess_bytes
        others = (
            self._smallest(self.hopeful),
            self._at(self.prudent, budget_bytes) or self._smallest(self.prudent),
        )
        yield from filter(None, others)

    def _smallest(self, prepared: Prepared) -> tuple[Candidate, Simulation] | None:
        smallest = prepared.smallest_bytes
        return None if smallest is None else self._at(prepared, smallest)

    def _at(self, prepared: Prepared, budget_bytes: int) -> tuple[Candidate, Simulation] | None:
        candidate = prepared.best(budget_bytes)
        return None if candidate is None else (candidate, simulate(self.problem, candidate.schedule))
