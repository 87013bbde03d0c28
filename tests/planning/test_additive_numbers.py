"""Additive numbers of values: above the simulation of any plan, or below it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hypothesis import given, settings
from planning.problems import equal_problem, value_problems
from planning.selections import one_option_schedules

from recoup.planning import (
    Forward,
    Keep,
    Lifetime,
    Phase,
    Problem,
    Schedule,
    Unit,
    Use,
    minimum_budget,
    plan,
    simulate,
)
from recoup.planning.additive_numbers import additive, rounded_bytes
from recoup.planning.solvers.chain import ChainSolver


def chain_schedules(problem: Problem) -> Iterator[Schedule]:
    """The chain solver's answers, (nested) segments among them, for every budget at which they may change."""
    prepared = ChainSolver().prepare(problem, time_limit_s=10.0)
    assert prepared.smallest_bytes is not None
    for budget_bytes in sorted({prepared.smallest_bytes, *prepared.suggested_budgets()}):
        candidate = prepared.best(budget_bytes)
        assert candidate is not None
        yield candidate.schedule


def has_segments(schedule: Schedule) -> bool:
    return any(isinstance(action, Forward) and action.keep is Keep.NOTHING for action in schedule)


def assert_rounded(problem: Problem, schedules: Iterable[Schedule]) -> None:
    above, below = additive(problem), additive(problem, is_bound=True)
    for schedule in schedules:
        peak_bytes = simulate(problem, schedule).peak_bytes
        most_bytes = simulate(above, schedule).peak_bytes
        assert simulate(below, schedule).peak_bytes <= peak_bytes <= most_bytes
        assert most_bytes - peak_bytes <= rounded_bytes(problem)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(problem=value_problems())
def test_rounded_up_no_plan_takes_more_and_rounded_down_none_less(problem: Problem) -> None:
    assert_rounded(problem, one_option_schedules(problem))


def test_so_it_is_for_segments_of_the_chain_solver() -> None:
    num_swept = num_nested = 0

    @settings(max_examples=80, deadline=None, derandomize=True, database=None)
    @given(problem=value_problems(max_units=8, stays_share=0.4))
    def check(problem: Problem) -> None:
        nonlocal num_swept, num_nested
        for numbers in (additive(problem), additive(problem, is_bound=True)):
            schedules = list(chain_schedules(numbers))
            assert_rounded(problem, schedules)
            for schedule in schedules:
                forwards = [action.unit for action in schedule if isinstance(action, Forward)]
                num_swept += has_segments(schedule)
                num_nested += max(map(forwards.count, forwards)) > 2

    check()
    assert num_swept > 100
    assert num_nested > 10


def test_what_stays_and_is_made_again_is_scratch_of_a_backward_without_a_forward() -> None:
    units = [
        Unit.keep_or_recompute(f"u{i}", forward_s=1, backward_s=2, held_bytes=50, output_bytes=0)
        for i in range(3)
    ]
    stays = Lifetime("y", 7, made=Use(Phase.FORWARD, 1), stays=True)
    numbers = additive(Problem(units, values=[stays]))
    needs = [[option.backward_transient_bytes for option in unit.options] for unit in numbers.units]
    plain = [[option.backward_transient_bytes for option in unit.options] for unit in units]
    added = [
        [one - other for one, other in zip(*pair, strict=True)] for pair in zip(needs, plain, strict=True)
    ]
    assert added == [[0, 0], [0, 7], [0, 0]]
    assert numbers.resident_bytes == 7
    assert rounded_bytes(Problem(units, values=[stays])) == 14


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
