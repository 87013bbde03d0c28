from __future__ import annotations

from dataclasses import replace

import pytest
from planning.problems import random_problem

from recoup.planning import Option, Problem, Unit, simulate, trace
from recoup.planning.solvers.baselines import (
    BASELINES,
    every,
    greedy,
    keep_all,
    one_option_each,
    sqrt_segments,
)


def blocks(num_units: int) -> Problem:
    return Problem(
        [
            Unit.keep_or_recompute(f"b{i}", forward_s=i + 1, backward_s=2, held_bytes=50 + i, output_bytes=3)
            for i in range(num_units)
        ]
    )


def test_golden_traces() -> None:
    assert trace(keep_all(blocks(3))) == "F0:0 F1:0 F2:0 B2 B1 B0"
    assert trace(every(blocks(3), 1)) == "F0 F1i F2:0 B2 F1:0 B1 F0:0 B0"
    assert trace(every(blocks(5), 2)) == "F0 F1 F2i F3 F4:0 B4 F2:0 F3:0 B3 B2 F0:0 F1:0 B1 B0"
    assert trace(sqrt_segments(blocks(5))) == "F0 F1 F2 F3:0 F4:0 B4 B3 F0:0 F1:0 F2:0 B2 B1 B0"
    assert trace(one_option_each(blocks(3), [1, -1, 0])) == "F0:1 F1i F2:0 B2 F1:0 B1 B0"


def test_units_that_run_once_are_kept_between_segments() -> None:
    def problem(num_units: int, *once: int) -> Problem:
        return Problem([replace(u, runs_once=i in once) for i, u in enumerate(blocks(num_units).units)])

    assert trace(keep_all(problem(3, 1))) == "F0:0 F1:0 F2:0 B2 B1 B0"
    # Unit 3 is followed by nothing but what is kept, so it is kept too.
    expected = "F0:0 F1i F2 F3:0 F4:0 B4 B3 F1:0 F2:0 B2 B1 B0"
    assert trace(every(problem(5, 0, 4), 2)) == expected
    assert trace(every(problem(5, 1), 2)) == "F0 F1:0 F2i F3 F4:0 B4 F2:0 F3:0 B3 B2 B1 F0:0 B0"
    assert trace(every(problem(2, 0, 1), 2)) == "F0:0 F1:0 B1 B0"
    assert trace(greedy(problem(3, 0, 1, 2))[-1]) == "F0:1 F1:1 F2:1 B2 B1 B0"


def test_sqrt_uses_whole_roots() -> None:
    assert [trace(sqrt_segments(blocks(n))).split().index("B" + str(n - 1)) for n in (1, 4, 9, 10)] == [
        1,
        4,
        9,
        10,
    ]
    lengths = {n: len(sqrt_segments(blocks(n))) for n in (4, 9, 16)}
    assert lengths == {4: 10, 9: 24, 16: 44}


def test_greedy_frees_the_cheapest_bytes_first() -> None:
    schedules = greedy(blocks(4))
    results = [simulate(blocks(4), schedule) for schedule in schedules]
    assert [result.seconds for result in results] == [18.0, 19.0, 21.0, 24.0, 28.0]


def test_greedy_counts_what_a_second_run_costs() -> None:
    def unit(name: str, again_s: float) -> Unit:
        keep = Option("keep", forward_s=2, backward_s=3, held_bytes=50, again_s=again_s)
        return Unit(name, [keep], output_bytes=3)

    problem = Problem([unit("a", 0.5), unit("b", 0.25), unit("c", 4.0)])
    # The first to be replayed is b, then a.
    assert [simulate(problem, schedule).seconds for schedule in greedy(problem)[:3]] == [15.0, 17.25, 19.75]


def skips(*once: int) -> Problem:
    def unit(index: int, *sources: int) -> Unit:
        keep = Option("keep", forward_s=1 + index, backward_s=1, held_bytes=30)
        return Unit(f"u{index}", [keep], output_bytes=4 + index, skips=sources, runs_once=index in once)

    return Problem([unit(0), unit(1), unit(2), unit(3), unit(4, 1), unit(5, 0), unit(6, 2, 3)])


@pytest.mark.parametrize("solver", BASELINES, ids=lambda solver: solver.name)
def test_every_baseline_is_legal_with_and_without_skips(solver: object) -> None:
    once = random_problem(1, num_units=9, num_options=3, once=(0, 4, 8))
    for problem in (skips(), skips(2, 6), random_problem(1, num_units=9, num_options=3), once):
        prepared = solver.prepare(problem, time_limit_s=1.0)  # type: ignore[attr-defined]
        smallest = prepared.smallest_bytes
        assert prepared.best(smallest - 1) is None
        found = prepared.best(smallest)
        assert found is not None
        assert simulate(problem, found.schedule).peak_bytes == smallest
        assert smallest in prepared.suggested_budgets()


def test_more_bytes_never_cost_more_seconds() -> None:
    problem = random_problem(4, num_units=30, num_options=3)
    for solver in BASELINES:
        prepared = solver.prepare(problem, time_limit_s=1.0)
        found = [prepared.best(budget) for budget in range(prepared.smallest_bytes or 0, 500, 9)]
        seconds = [simulate(problem, candidate.schedule).seconds for candidate in found if candidate]
        assert seconds == sorted(seconds, reverse=True), solver.name
