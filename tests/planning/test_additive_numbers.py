"""Additive numbers of values: above the simulation of any plan, or below it."""

from __future__ import annotations

from hypothesis import given, settings
from planning.problems import equal_problem, value_problems
from planning.selections import one_option_schedules

from recoup.planning import Problem, minimum_budget, plan, simulate
from recoup.planning.additive_numbers import additive, rounded_bytes


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(problem=value_problems())
def test_rounded_up_no_plan_takes_more_and_rounded_down_none_less(problem: Problem) -> None:
    above, below = additive(problem), additive(problem, is_bound=True)
    for schedule in one_option_schedules(problem):
        peak_bytes = simulate(problem, schedule).peak_bytes
        most_bytes = simulate(above, schedule).peak_bytes
        assert simulate(below, schedule).peak_bytes <= peak_bytes <= most_bytes
        assert most_bytes - peak_bytes <= rounded_bytes(problem)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(problem=value_problems())
def test_plans_fit_and_none_of_one_option_each_is_faster(problem: Problem) -> None:
    low = minimum_budget(problem)
    results = [simulate(problem, schedule) for schedule in one_option_schedules(problem)]
    high = max(result.peak_bytes for result in results)
    for budget_bytes in {low, (low + high) // 2, high}:
        found = plan(problem, budget_bytes)
        assert found.predicted.peak_bytes <= budget_bytes
        fitting = [result.seconds for result in results if result.peak_bytes <= budget_bytes]
        assert found.bound.seconds <= min(fitting, default=found.predicted.seconds) + 1e-9


def test_without_values_there_is_nothing_to_round() -> None:
    problem = equal_problem(3)
    assert additive(problem) is problem
    assert rounded_bytes(problem) == 0
