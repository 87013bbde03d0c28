from __future__ import annotations

import numpy as np
import pytest
from planning.problems import equal_problem, random_problem

from recoup.planning import simulate
from recoup.planning.solvers.chain_costs import ChainCosts
from recoup.planning.solvers.chain_floors import ChainFloors
from recoup.planning.solvers.chain_groups import group_chain
from recoup.planning.solvers.chain_long import PreparedLongChain
from recoup.planning.solvers.chain_prepared import PreparedChain
from recoup.planning.solvers.chain_runs import Run, RunTable, find_run, read_run_schedule
from recoup.planning.solvers.chain_table import ChainTable, Rounding


@pytest.mark.parametrize("parameter_gradient_bytes", [0, 1, 3])
def test_parts_that_share_rows_equal_parts_that_do_not(parameter_gradient_bytes: int) -> None:
    problem = equal_problem(14, parameter_gradient_bytes=parameter_gradient_bytes)
    costs = ChainCosts(problem)
    floors, run = ChainFloors(costs), find_run(problem)
    assert run == Run(1, 13)
    for rounding in Rounding:
        # One byte a level: no rounding, so that only the recurrence is compared.
        shared = RunTable(costs, run, level_bytes=1, num_levels=floors.full_bytes, rounding=rounding)
        apart = ChainTable(costs, floors, level_bytes=1, num_levels=floors.full_bytes, rounding=rounding)
        assert np.allclose(shared.whole_row, apart.whole_row, rtol=1e-12), rounding


@pytest.mark.parametrize("rounding", list(Rounding))
def test_schedules_of_shared_rows_take_the_rows_seconds(rounding: Rounding) -> None:
    problem = equal_problem(40, scale=1009, parameter_gradient_bytes=1)
    costs = ChainCosts(problem)
    top = sum(option.kept_bytes for option in costs.fastest)
    table = RunTable(costs, find_run(problem), level_bytes=top // 150, num_levels=150, rounding=rounding)
    levels = [level for level in range(151) if table.whole_row[level] < float("inf")]
    for level in levels[::7]:
        result = simulate(problem, read_run_schedule(table, level))
        assert result.seconds == pytest.approx(float(table.whole_row[level]), rel=1e-9)
        if rounding is Rounding.UP:
            assert result.peak_bytes - problem.input_bytes <= level * table.level_bytes


def test_groups_need_no_more_than_they_say() -> None:
    for seed in range(4):
        problem = random_problem(seed, num_units=60, num_options=3, scale=1009, jitter=400)
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


def test_long_equal_chains_are_monotone_and_bounded() -> None:
    problem = equal_problem(250, scale=1009, parameter_gradient_bytes=1)
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


def test_long_unequal_chains() -> None:
    problem = random_problem(2, num_units=230, num_options=2, scale=1009, jitter=400)
    prepared = PreparedLongChain(problem, time_limit_s=1.0)
    low, high = prepared.smallest_bytes, prepared.suggested_budgets()[-1]
    seconds = []
    for budget_bytes in (low, (low + high) // 2, high):
        found = prepared.best(budget_bytes)
        assert found is not None
        result = simulate(problem, found.schedule)
        assert result.peak_bytes <= budget_bytes
        seconds.append(result.seconds)
    assert seconds == sorted(seconds, reverse=True)
