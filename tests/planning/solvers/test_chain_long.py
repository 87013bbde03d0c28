from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

import numpy as np
import pytest
from planning.problems import equal_problem, random_problem

from recoup.planning import Problem, simulate
from recoup.planning.solvers.chain.costs import ChainCosts
from recoup.planning.solvers.chain.floors import ChainFloors
from recoup.planning.solvers.chain.groups import group_chain
from recoup.planning.solvers.chain.long import PreparedLongChain
from recoup.planning.solvers.chain.prepared import PreparedChain
from recoup.planning.solvers.chain.runs import Run, RunTable, find_run, read_run_schedule
from recoup.planning.solvers.chain.table import ChainTable, Rounding


@pytest.mark.parametrize("again_s", [0.0, 1.25])
@pytest.mark.parametrize("parameter_gradient_bytes", [0, 1, 3])
def test_parts_that_share_rows_equal_parts_that_do_not(parameter_gradient_bytes: int, again_s: float) -> None:
    problem = equal_problem(14, parameter_gradient_bytes=parameter_gradient_bytes, again_s=again_s)
    run = find_run(problem)
    assert run == Run(1, 13)
    check_shared_rows(problem, run)


@pytest.mark.parametrize("once", [(13,), (0, 13), (0, 1, 12, 13), (0, 6, 13), range(1, 13)], ids=str)
def test_parts_share_rows_beside_units_that_run_once(once: Collection[int]) -> None:
    problem = equal_problem(14, parameter_gradient_bytes=1, once=once)
    run = find_run(problem)
    assert len({problem.units[index].runs_once for index in range(run.first, run.stop)}) == 1
    check_shared_rows(problem, run)


def check_shared_rows(problem: Problem, run: Run) -> None:
    costs = ChainCosts(problem)
    floors = ChainFloors(costs)
    for rounding in Rounding:
        # One byte a level: no rounding, so that only the recurrence is compared.
        shared = RunTable(costs, run, level_bytes=1, num_levels=floors.full_bytes, rounding=rounding)
        apart = ChainTable(costs, floors, level_bytes=1, num_levels=floors.full_bytes, rounding=rounding)
        assert np.allclose(shared.whole_row, apart.whole_row, rtol=1e-12), rounding


@pytest.mark.parametrize("once", [(), (0, 39), (0, 1, 5, 38, 39)], ids=str)
@pytest.mark.parametrize("rounding", list(Rounding))
def test_schedules_of_shared_rows_take_the_rows_seconds(rounding: Rounding, once: Collection[int]) -> None:
    problem = equal_problem(40, scale=1009, parameter_gradient_bytes=1, once=once, again_s=1.25)
    costs = ChainCosts(problem)
    top = sum(option.kept_bytes for option in costs.first_options.fastest)
    table = RunTable(costs, find_run(problem), level_bytes=top // 150, num_levels=150, rounding=rounding)
    levels = [level for level in range(151) if table.whole_row[level] < float("inf")]
    for level in levels[::7]:
        result = simulate(problem, read_run_schedule(table, level))
        assert result.seconds == pytest.approx(float(table.whole_row[level]), rel=1e-9)
        if rounding is Rounding.UP:
            assert result.peak_bytes - problem.input_bytes <= level * table.level_bytes


def test_units_that_run_once_are_groups_apart() -> None:
    def starts(once: Collection[int], *, num_units: int = 20, num_groups: int = 8) -> tuple[int, ...]:
        problem = random_problem(1, num_units=num_units, once=once)
        grouping = group_chain(problem, num_groups=num_groups)
        assert len(grouping.problem.units) <= num_groups
        for unit, (first, stop) in zip(grouping.problem.units, pairwise(grouping.starts), strict=True):
            assert unit.runs_once == any(index in once for index in range(first, stop))
        return grouping.starts

    assert starts(()) == (0, 3, 6, 9, 12, 15, 18, 20)
    assert starts((0, 19)) == (0, 1, 4, 7, 10, 13, 16, 19, 20)
    assert starts((0, 10, 11, 19)) == (0, 1, 4, 7, 10, 12, 16, 19, 20)
    # Too many stretches: those of one unit join their neighbours.
    assert starts((*range(0, 11, 2), 19)) == (0, 3, 6, 9, 11, 14, 17, 19, 20)
    assert starts(range(0, 20, 2)) == (0, 3, 6, 9, 12, 15, 18, 20)


@pytest.mark.parametrize("once", [(), (0, 59), (0, 20, 21, 40, 59), range(0, 60, 2)], ids=str)
def test_groups_need_no_more_than_they_say(once: Collection[int]) -> None:
    for seed in range(2 if once else 4):
        problem = random_problem(
            seed, num_units=60, num_options=3, scale=1009, jitter=400, once=once, again=seed % 2 == 1
        )
        grouping = group_chain(problem, num_groups=13)
        prepared = PreparedChain(grouping.problem, num_levels=300)
        high = prepared.fixed_bytes + prepared.floors.full_bytes
        for budget_bytes in (prepared.smallest_bytes, (prepared.smallest_bytes + high) // 2, high):
            found = prepared.best(budget_bytes)
            assert found is not None
            groups = simulate(grouping.problem, found.schedule)
            units = simulate(problem, grouping.expand(found.schedule))
            assert units.seconds == pytest.approx(groups.seconds, rel=1e-12)
            assert units.peak_bytes <= groups.peak_bytes <= budget_bytes


@pytest.mark.parametrize("once", [(), (0, 249), (0, 1, 247, 248, 249)], ids=str)
def test_long_equal_chains_are_monotone_and_bounded(once: Collection[int]) -> None:
    problem = equal_problem(250, scale=1009, parameter_gradient_bytes=1, once=once, again_s=1.25)
    prepared = PreparedLongChain(problem, time_limit_s=1.0)
    low, high = prepared.smallest_bytes, prepared.suggested_budgets()[-1]
    previous = float("inf")
    for share in (0.0, 0.01, 0.05, 0.12, 0.13, 0.3, 0.7, 1.0):
        budget_bytes = low + int((high - low) * share)
        found = prepared.best(budget_bytes)
        assert found is not None
        assert found.bound is not None
        result = simulate(problem, found.schedule)
        assert result.peak_bytes <= budget_bytes
        assert found.bound.seconds <= result.seconds * (1 + 1e-12)
        assert result.seconds <= previous * (1 + 1e-12)
        previous = result.seconds
    assert prepared.best(low - 1) is None


def test_the_usual_model_of_a_thousand_blocks() -> None:
    problem = equal_problem(1002, scale=1009, parameter_gradient_bytes=1, once=(0, 1001))
    prepared = PreparedLongChain(problem, time_limit_s=1.0)
    assert prepared.run == Run(1, 1001)
    # Parts that start at the head and end in the run can never be run, and cost nothing.
    assert prepared.run.num_kinds(prepared.costs) == 2
    # Parts in the run, from the head, to the loss, and to the end behind it.
    assert prepared.run.num_kinds(ChainCosts(equal_problem(1002))) == 4
    low, high = prepared.smallest_bytes, prepared.suggested_budgets()[-1]
    seconds = []
    for budget_bytes in (low, low + (high - low) // 20, (low + high) // 2, high):
        found = prepared.best(budget_bytes)
        assert found is not None
        assert found.bound is not None
        result = simulate(problem, found.schedule)
        assert result.peak_bytes <= budget_bytes
        assert found.bound.seconds <= result.seconds * (1 + 1e-12)
        seconds.append(result.seconds)
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize(("num_units", "once"), [(230, ()), (300, (0, 70, 71, 150, 220, 299))], ids=str)
def test_long_unequal_chains(num_units: int, once: Collection[int]) -> None:
    problem = random_problem(2, num_units=num_units, num_options=2, scale=1009, jitter=400, once=once)
    prepared = PreparedLongChain(problem, time_limit_s=1.0)
    low, high = prepared.smallest_bytes, prepared.suggested_budgets()[-1]
    seconds = []
    for budget_bytes in (low, low + (high - low) // 10, (low + high) // 2, high):
        found = prepared.best(budget_bytes)
        assert found is not None
        result = simulate(problem, found.schedule)
        assert result.peak_bytes <= budget_bytes
        seconds.append(result.seconds)
    assert seconds == sorted(seconds, reverse=True)
