from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from planning.selections import brute_force, large_problem, least_seconds, random_problem, seeds

from recoup.errors import BudgetError
from recoup.planning import Problem, Unit, simulate, trace
from recoup.planning.plan import plan
from recoup.planning.solvers.select import (
    ONE_OPTION_SCHEDULES,
    PreparedSelect,
    SelectSolver,
    solve_select,
)


def three_units() -> Problem:
    """Keep all: 12 s, 240 bytes, as 'c' runs its backward (outputs 20, held 200, gradients 20)."""
    units = [
        Unit.keep_or_recompute(name, forward_s=forward_s, backward_s=2, held_bytes=held, output_bytes=10)
        for name, forward_s, held in (("a", 1, 100), ("b", 2, 60), ("c", 3, 40))
    ]
    return Problem(units)


@pytest.mark.parametrize(
    ("budget_bytes", "seconds", "peak_bytes", "expected"),
    [
        (240, 12.0, 240, "F0:0 F1:0 F2:0 B2 B1 B0"),
        # Recomputing 'a' frees 100 at once; 'b' would have to be rebuilt beside them (190 bytes, 14 s).
        (239, 13.0, 140, "F0:1 F1:0 F2:0 B2 B1 B0"),
        (140, 13.0, 140, "F0:1 F1:0 F2:0 B2 B1 B0"),
        (139, 15.0, 120, "F0:1 F1:1 F2:0 B2 B1 B0"),
        (120, 15.0, 120, "F0:1 F1:1 F2:0 B2 B1 B0"),
    ],
)
def test_figures_by_hand(budget_bytes: int, seconds: float, peak_bytes: int, expected: str) -> None:
    candidate = solve_select(three_units(), budget_bytes=budget_bytes)
    result = simulate(three_units(), candidate.schedule)
    assert (result.seconds, result.peak_bytes) == (seconds, peak_bytes)
    assert trace(candidate.schedule) == expected
    assert candidate.bound is not None
    assert (candidate.bound.seconds, candidate.bound.schedules) == (seconds, ONE_OPTION_SCHEDULES)


def test_a_budget_below_the_smallest_names_it_and_its_unit() -> None:
    with pytest.raises(
        BudgetError, match=r"fits 119 B .*smallest feasible budget is 120 B .*replay of unit 'a'"
    ) as caught:
        solve_select(three_units(), budget_bytes=119)
    assert (caught.value.budget_bytes, caught.value.smallest_bytes, caught.value.unit) == (119, 120, "a")
    assert PreparedSelect(three_units(), time_limit_s=1).best(119) is None


def test_the_solver_works_in_plan() -> None:
    found = plan(three_units(), 140, solvers=[SelectSolver()])
    assert (found.solver, found.predicted.seconds, found.is_optimal) == ("select", 13.0, True)


@settings(max_examples=150, deadline=None)
@given(seed=seeds)
def test_brute_force_finds_nothing_better(seed: int) -> None:
    rng = random.Random(seed)
    share_once = rng.choice([0.0, 0.0, 0.4])
    problem = random_problem(rng, num_units=rng.randint(1, 6), max_options=2, share_once=share_once)
    figures = brute_force(problem) if problem.num_units < 5 else brute_force_of_two(problem)
    prepared = PreparedSelect(problem, time_limit_s=1)
    smallest = min(peak_bytes for peak_bytes, _ in figures)
    assert prepared.smallest_bytes == smallest
    assert prepared.best(smallest - 1) is None
    highest = max(peak_bytes for peak_bytes, _ in figures)
    budgets = sorted({smallest + (highest - smallest) * step // 6 for step in range(7)})
    previous_s = float("inf")
    for budget_bytes in budgets:
        candidate = prepared.best(budget_bytes)
        assert candidate is not None
        assert candidate.bound is not None
        result = simulate(problem, candidate.schedule)
        assert result.peak_bytes <= budget_bytes
        assert result.seconds == pytest.approx(least_seconds(figures, budget_bytes), rel=1e-12)
        assert candidate.bound.seconds == pytest.approx(result.seconds, rel=1e-12)
        assert result.seconds <= previous_s
        previous_s = result.seconds


def brute_force_of_two(problem: Problem) -> list[tuple[int, float]]:
    """Five and six units with their first option only (kept, plain or replayed): 3^6 schedules at most."""
    units = [
        Unit(
            unit.name,
            unit.options[:1],
            output_bytes=unit.output_bytes,
            gradient_bytes=unit.gradient_bytes,
            parameter_gradient_bytes=unit.parameter_gradient_bytes,
            skips=unit.skips,
            runs_once=unit.runs_once,
        )
        for unit in problem.units
    ]
    object.__setattr__(problem, "units", tuple(units))
    return brute_force(problem)


def test_two_hundred_different_units_are_solved_exactly_and_monotonously() -> None:
    problem = large_problem(200, num_options=6, seed=3)
    prepared = PreparedSelect(problem, time_limit_s=10)
    budgets = prepared.suggested_budgets()
    assert len(budgets) == 20
    figures = []
    for budget_bytes in budgets:
        candidate = prepared.best(budget_bytes)
        assert candidate is not None
        assert candidate.bound is not None
        result = simulate(problem, candidate.schedule)
        assert result.peak_bytes <= budget_bytes
        assert result.seconds <= candidate.bound.seconds * (1 + 1e-4)
        figures.append(result.seconds)
    assert all(later <= earlier for earlier, later in pairwise(figures))
    assert figures[0] > figures[-1]


def test_the_same_input_gives_the_same_plan() -> None:
    problem = large_problem(60, num_options=4, seed=5)
    budget_bytes = 2 * PreparedSelect(problem, time_limit_s=1).smallest_bytes
    schedules = {solve_select(problem, budget_bytes=budget_bytes).schedule for _ in range(3)}
    assert len(schedules) == 1


def test_a_batch_gives_the_same_seconds_as_one_by_one() -> None:
    problem = large_problem(40, num_options=5, seed=7)
    together = PreparedSelect(problem, time_limit_s=5)
    for budget_bytes in together.suggested_budgets():
        alone = solve_select(problem, budget_bytes=budget_bytes, time_limit_s=5)
        selection = together.selector.select([budget_bytes])[0]
        assert simulate(problem, alone.schedule).seconds == pytest.approx(selection.seconds, rel=1e-11)


def test_more_budget_than_needed_keeps_everything() -> None:
    candidate = solve_select(three_units(), budget_bytes=10**15)
    assert simulate(three_units(), candidate.schedule).seconds == 12.0
