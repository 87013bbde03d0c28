"""Plans for options that free their units' inputs, beyond chains (``test_chain`` compares those with all schedules)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from planning.problems import equal_problem, random_problem
from planning.selections import least_seconds, one_option_schedules

from recoup.planning import Backward, Forward, Keep, Problem, Schedule, minimum_budget, plan, simulate
from recoup.planning.additive_numbers import AdditiveOption
from recoup.planning.solvers.chain import ChainSolver
from recoup.planning.solvers.chain.long import PreparedLongChain
from recoup.planning.solvers.select import SelectSolver

KEEP_NOTHING = "less0"
"""The option of `random_problem` that holds nothing, and replays from its input."""


def freeing_problem(seed: int, *, num_units: int, skips: bool = False) -> Problem:
    """A random one in which every other option that is kept frees its input, or a part of it."""
    rng = random.Random(seed)
    problem = random_problem(seed, num_units=num_units)
    units = [problem.units[0]]
    for index, unit in enumerate(problem.units[1:], start=1):
        freed_bytes = rng.choice([0, units[-1].output_bytes, rng.randint(1, units[-1].output_bytes)])
        options = [
            option if option.name == KEEP_NOTHING else AdditiveOption.of(option, freed=freed_bytes)
            for option in unit.options
        ]
        sources = [source for source in range(index - 1) if skips and rng.random() < 0.4]
        units.append(replace(unit, options=options, skips=sources))
    return replace(problem, units=units)


def without(problem: Problem) -> Problem:
    """The same with inputs that stay."""
    units = [
        replace(unit, options=[AdditiveOption.of(option, freed=0) for option in unit.options])
        for unit in problem.units
    ]
    return replace(problem, units=units)


@pytest.mark.parametrize("seed", range(20))
def test_selections_fit_and_their_bounds_hold(seed: int) -> None:
    problem = freeing_problem(seed, num_units=4, skips=seed % 2 > 0)
    results = [simulate(problem, schedule) for schedule in one_option_schedules(problem)]
    figures = [(result.peak_bytes, result.seconds) for result in results]
    prepared = SelectSolver().prepare(problem, time_limit_s=1.0)
    least = min(peak_bytes for peak_bytes, _ in figures)
    is_exact = prepared.prover is prepared.selector
    assert prepared.smallest_bytes == least if is_exact else prepared.smallest_bytes >= least
    for budget_bytes in range(prepared.smallest_bytes, max(peak_bytes for peak_bytes, _ in figures) + 1, 3):
        found = prepared.best(budget_bytes)
        assert found is not None
        assert found.bound is not None
        predicted, best_s = simulate(problem, found.schedule), least_seconds(figures, budget_bytes)
        assert predicted.peak_bytes <= budget_bytes
        assert found.bound.seconds <= best_s + 1e-9
        assert predicted.seconds == pytest.approx(best_s) or not is_exact


def test_the_plain_step_fits_what_it_needs() -> None:
    problem = freeing_problem(3, num_units=6)
    forwards = [Forward(unit, keep=Keep.OPTION, option=0) for unit in range(6)]
    schedule = Schedule([*forwards, *(Backward(unit, option=0) for unit in reversed(range(6)))])
    plain = simulate(problem, schedule)
    assert plain.peak_bytes < simulate(without(problem), schedule).peak_bytes
    solvers = (ChainSolver(), SelectSolver())
    assert plan(problem, plain.peak_bytes, solvers=solvers).predicted.seconds == plain.seconds


def test_long_chains_free_inputs_within_groups() -> None:
    problem = equal_problem(250, scale=1009, parameter_gradient_bytes=1)
    units = [problem.units[0]]
    for unit in problem.units[1:]:
        keep, *others = unit.options
        freeing = AdditiveOption.of(keep, freed=units[-1].output_bytes)
        units.append(replace(unit, options=[freeing, *others]))
    problem = replace(problem, units=units)
    prepared = PreparedLongChain(problem, time_limit_s=1.0)
    staying = PreparedLongChain(without(problem), time_limit_s=1.0)
    low, high = prepared.smallest_bytes, staying.suggested_budgets()[-1]
    for budget_bytes in (low, low + (high - low) // 16, (low + high) // 2, high):
        found, other = prepared.best(budget_bytes), staying.best(budget_bytes)
        assert found is not None
        assert found.bound is not None
        assert other is not None
        result = simulate(problem, found.schedule)
        assert result.peak_bytes <= budget_bytes
        assert (
            found.bound.seconds <= result.seconds <= simulate(problem, other.schedule).seconds * (1 + 1e-12)
        )
    assert minimum_budget(problem, solvers=[ChainSolver()], time_limit_s=1.0) == low
    assert prepared.best(low - 1) is None
