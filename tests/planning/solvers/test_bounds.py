from __future__ import annotations

from hypothesis import given, settings
from planning.brute_force import brute_force
from planning.problems import small_problems

from recoup.planning import Link, Option, Problem, Unit
from recoup.planning.solvers.bounds import relaxed_bound


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(problem=small_problems(max_units=4, max_options=2))
def test_no_schedule_at_all_is_below_the_bound(problem: Problem) -> None:
    for budget_bytes in (25, 35, 45, 60, 90):
        found = brute_force(problem, budget_bytes, persistent=False)
        if found is not None:
            assert relaxed_bound(problem, budget_bytes).seconds <= found[0] * (1 + 1e-12)


def test_what_runs_once_is_there() -> None:
    # 'a' cannot be made again: 3 s and 101 bytes under 'keep', 4 s and 1 byte under 'recompute'.
    def problem(*, runs_once: bool) -> Problem:
        block = Unit.keep_or_recompute(
            "a", forward_s=1, backward_s=2, held_bytes=100, output_bytes=1, runs_once=runs_once
        )
        keep = Option("keep", forward_s=3, backward_s=4, held_bytes=50)
        return Problem([block, Unit("b", [keep], output_bytes=0, runs_once=runs_once)])

    once, often = problem(runs_once=True), problem(runs_once=False)
    assert [relaxed_bound(once, num_bytes).seconds for num_bytes in (51, 101, 151)] == [11.0, 10.5, 10.0]
    assert relaxed_bound(often, 151).seconds == 10.0
    for num_bytes in (51, 101):
        found = brute_force(once, num_bytes, persistent=False)
        assert found is None or found[0] >= relaxed_bound(once, num_bytes).seconds


def test_bytes_that_may_leave_count_as_none() -> None:
    option = Option("keep", forward_s=1, backward_s=2, held_bytes=100, held_links=("host",))
    links = [Link("host", send_bytes_per_s=1, fetch_bytes_per_s=1)]
    units = [Unit("a", [option], output_bytes=1, gradient_bytes=0), Unit("b", [option], output_bytes=1)]
    assert relaxed_bound(Problem(units, links=links), 2).seconds == 6.0
