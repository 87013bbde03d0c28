"""Plans for options that free their units' inputs, against all persistent schedules of small chains."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from planning.problems import budgets_between, random_problem

from recoup.planning import Action, Backward, Forward, Keep, Problem, Schedule, minimum_budget, plan, simulate
from recoup.planning.solvers.chain import ChainSolver
from recoup.planning.solvers.freed import frees_inputs, hopeful, prudent
from recoup.planning.solvers.select import SelectSolver

SOLVERS = (ChainSolver(), SelectSolver())
KEEP_NOTHING = "less0"
"""The option of `random_problem` that holds nothing, and replays from its input."""


def freeing_problem(seed: int, *, num_units: int) -> Problem:
    """A random one in which every other option that is kept frees its input, or a part of it."""
    rng = random.Random(seed)
    problem = random_problem(seed, num_units=num_units)
    units = [problem.units[0]]
    for unit in problem.units[1:]:
        freed_bytes = rng.choice([0, units[-1].output_bytes, rng.randint(1, units[-1].output_bytes)])
        options = [
            option if option.name == KEEP_NOTHING else replace(option, freed_input_bytes=freed_bytes)
            for option in unit.options
        ]
        units.append(replace(unit, options=options))
    return replace(problem, units=units)


def persistent_schedules(problem: Problem, first: int, last: int) -> Iterator[list[Action]]:
    """All ways to run units forward and backward from the input of the first one."""
    if first > last:
        yield []
        return
    for index in range(len(problem.units[first].options)):
        forward, backward = Forward(first, keep=Keep.OPTION, option=index), Backward(first, option=index)
        for rest in persistent_schedules(problem, first + 1, last):
            yield [forward, *rest, backward]
        if first == last < len(problem.units) - 1 and not problem.units[first].options[index].needs_forward:
            yield [backward]
    for end in range(first, last):
        sweep = [Forward(first, keep=Keep.INPUT), *map(Forward, range(first + 1, end + 1))]
        for rest in persistent_schedules(problem, end + 1, last):
            for again in persistent_schedules(problem, first, end):
                yield [*sweep, *rest, *again]


@pytest.mark.parametrize("seed", range(12))
def test_plans_fit_and_bounds_hold(seed: int) -> None:
    problem = freeing_problem(seed, num_units=4)
    assert frees_inputs(problem)
    every = [simulate(problem, Schedule(actions)) for actions in persistent_schedules(problem, 0, 3)]
    smallest = minimum_budget(problem, solvers=SOLVERS)
    assert smallest >= min(found.peak_bytes for found in every)
    for budget_bytes in budgets_between(smallest, max(found.peak_bytes for found in every)):
        found = plan(problem, budget_bytes, solvers=SOLVERS)
        assert found.predicted.peak_bytes <= budget_bytes
        best_s = min(one.seconds for one in every if one.peak_bytes <= budget_bytes)
        assert found.bound.seconds <= best_s + 1e-9
        assert found.predicted.seconds <= 1.5 * best_s


@pytest.mark.parametrize("seed", range(12))
def test_no_schedule_needs_more_than_in_the_prudent_problem(seed: int) -> None:
    problem = freeing_problem(seed, num_units=3)
    careful, hoping = prudent(problem), hopeful(problem)
    assert not frees_inputs(careful)
    assert not frees_inputs(hoping)
    for actions in persistent_schedules(problem, 0, 2):
        schedule = Schedule(actions)
        assert simulate(problem, schedule).peak_bytes <= simulate(careful, schedule).peak_bytes


def test_the_plain_step_fits_what_it_needs() -> None:
    problem = freeing_problem(3, num_units=6)
    forwards = [Forward(unit, keep=Keep.OPTION, option=0) for unit in range(6)]
    schedule = Schedule([*forwards, *(Backward(unit, option=0) for unit in reversed(range(6)))])
    plain = simulate(problem, schedule)
    assert plain.peak_bytes < simulate(prudent(problem), schedule).peak_bytes
    assert plan(problem, plain.peak_bytes, solvers=SOLVERS).predicted.seconds == plain.seconds
