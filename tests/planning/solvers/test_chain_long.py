from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

import pytest
from planning.problems import equal_problem, random_problem
from slowly import slow_but

from recoup.planning import simulate
from recoup.planning.solvers.chain.groups import group_chain
from recoup.planning.solvers.chain.long import PreparedLongChain
from recoup.planning.solvers.chain.prepared import PreparedChain


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


@pytest.mark.parametrize("once", slow_but([(0, 249)], [(), (0, 249), (0, 1, 247, 248, 249)]), ids=str)
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
