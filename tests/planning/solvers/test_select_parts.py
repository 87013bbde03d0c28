"""The parts of ``select``: levels, prices, labels."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given, settings
from planning.selections import (
    integer_program_s,
    large_problem,
    random_problem,
    repeated_problem,
    seeds,
)

from recoup.planning import Problem, Unit, simulate
from recoup.planning.solvers.select import PreparedSelect
from recoup.planning.solvers.select.labels import search_labels
from recoup.planning.solvers.select.levels import Levels
from recoup.planning.solvers.select.prices import Pricer
from recoup.planning.solvers.select.search import Selector


def equal_blocks(num_units: int, *, num_options: int = 6) -> Problem:
    block = large_problem(2, num_options=num_options, seed=5).units[0]
    units = [
        Unit(f"b{i}", block.options, output_bytes=block.output_bytes, parameter_gradient_bytes=3 * 2**20)
        for i in range(num_units)
    ]
    return Problem(units, resident_bytes=10**9)


def middle(levels: Levels) -> int:
    return (levels.smallest()[0] + levels.peak_bytes(levels.fastest())) // 2


@settings(max_examples=60, deadline=None)
@given(seed=seeds)
def test_levels_are_what_simulate_says(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng, num_units=rng.randint(1, 4))
    levels = Levels(problem)
    for selection in product(*(range(len(choices)) for choices in levels.choices)):
        result = simulate(problem, levels.schedule(selection))
        assert result.peak_bytes == levels.peak_bytes(selection)
        assert result.seconds == pytest.approx(levels.seconds(selection), rel=1e-12)


@settings(max_examples=80, deadline=None)
@given(seed=seeds)
def test_equal_units_are_solved_as_by_the_integer_program(seed: int) -> None:
    rng = random.Random(seed)
    levels = Levels(repeated_problem(rng, num_units=rng.randint(2, 5)))
    low, high = levels.smallest()[0], levels.peak_bytes(levels.fastest())
    for budget_bytes in {low, (low + high) // 2, max(low, high)}:
        best = Selector(levels, time_limit_s=1).select([budget_bytes])[0]
        assert levels.peak_bytes(best.positions) <= budget_bytes
        assert best.seconds == pytest.approx(integer_program_s(levels, budget_bytes), rel=1e-8)
        assert best.bound_s == pytest.approx(best.seconds, rel=1e-9)


def test_a_thousand_equal_blocks_are_solved_exactly() -> None:
    problem = equal_blocks(1000)
    prepared = PreparedSelect(problem, time_limit_s=10)
    budget_bytes = middle(prepared.levels)
    candidate = prepared.best(budget_bytes)
    assert candidate is not None
    assert candidate.bound is not None
    result = simulate(problem, candidate.schedule)
    assert result.peak_bytes <= budget_bytes
    assert result.seconds == pytest.approx(candidate.bound.seconds, rel=1e-9)


def test_prices_bound_and_labels_and_branch_and_bound_agree_on_different_units() -> None:
    levels = Levels(large_problem(60, num_options=5, seed=11))
    budget_bytes = middle(levels)
    prices = Pricer(levels).price(budget_bytes)
    best = Selector(levels, time_limit_s=5).select([budget_bytes])[0]
    assert prices.bound_ticks * levels.tick_s <= best.seconds
    assert best.seconds <= prices.bound_ticks * levels.tick_s * 1.005
    assert levels.peak_bytes(best.positions) <= budget_bytes
    assert best.seconds == pytest.approx(integer_program_s(levels, budget_bytes), rel=1e-8)


def test_a_target_below_the_optimum_finds_nothing_and_thinned_labels_prove_nothing() -> None:
    levels = Levels(large_problem(60, num_options=5, seed=11))
    budget_bytes = middle(levels)
    prices = Pricer(levels).price(budget_bytes)
    best = Selector(levels, time_limit_s=5).select([budget_bytes])[0]
    optimum = best.seconds / levels.tick_s
    target = (prices.bound_ticks + 3 * optimum) / 4
    missed = search_labels(levels, prices, target_ticks=target, max_labels=10**6)
    assert missed.is_complete
    assert missed.selection is None or missed.ticks > target
    thin = search_labels(levels, prices, target_ticks=optimum * 1.01, max_labels=20)
    assert not thin.is_complete
    assert thin.selection is None or levels.peak_bytes(thin.selection) <= budget_bytes


@pytest.mark.parametrize("is_equal", [False, True])
def test_thinned_labels_stay_near_the_relaxation(is_equal: bool) -> None:
    levels = Levels(equal_blocks(400) if is_equal else large_problem(40, num_options=5, seed=2))
    budget_bytes = middle(levels)
    exact = Selector(levels, time_limit_s=5).select([budget_bytes])[0]
    thinned = Selector(levels, time_limit_s=5)
    thinned.max_labels = 200
    selection = thinned.select([budget_bytes])[0]
    assert levels.peak_bytes(selection.positions) <= budget_bytes
    assert selection.bound_s <= exact.seconds <= selection.seconds <= exact.seconds * (1 + 3e-4)


@pytest.mark.parametrize("num_units", [1990, 2010])
def test_simplex_and_interior_points_give_prices_as_good(num_units: int) -> None:
    levels = Levels(equal_blocks(num_units, num_options=2))
    budget_bytes = middle(levels)
    best = Selector(levels, time_limit_s=10).select([budget_bytes])[0]
    assert levels.peak_bytes(best.positions) <= budget_bytes
    assert best.bound_s <= best.seconds <= best.bound_s * (1 + 1e-6)


@pytest.mark.parametrize("num_bytes", [10**6, 10**12])
def test_no_tolerance_of_the_solver_passes_a_budget(num_bytes: int) -> None:
    rng = random.Random(num_bytes)
    units = [
        Unit.keep_or_recompute(
            f"u{i}",
            forward_s=rng.uniform(1e-4, 1e-3),
            backward_s=1e-3,
            held_bytes=rng.randint(num_bytes // 2, num_bytes),
            output_bytes=rng.randint(1, num_bytes // 10),
        )
        for i in range(14)
    ]
    levels = Levels(Problem(units))
    low, high = levels.smallest()[0], levels.peak_bytes(levels.fastest())
    for step in range(1, 8):
        budget_bytes = low + (high - low) * step // 8
        best = Selector(levels, time_limit_s=1).select([budget_bytes])[0]
        assert levels.peak_bytes(best.positions) <= budget_bytes
        # One byte less than a selection's own peak must not give that selection again.
        tight = levels.peak_bytes(best.positions) - 1
        again = Selector(levels, time_limit_s=1).select([tight])[0]
        assert levels.peak_bytes(again.positions) <= tight
