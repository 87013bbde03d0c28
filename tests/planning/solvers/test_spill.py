from __future__ import annotations

import random
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from planning.selections import random_problem, seeds

from recoup.errors import BudgetError
from recoup.planning import (
    Backward,
    Fetch,
    Link,
    Option,
    Problem,
    Schedule,
    Send,
    Unit,
    Value,
    Wait,
    simulate,
    trace,
)
from recoup.planning.plan import plan
from recoup.planning.solvers.select.levels import Levels, Run, backward_actions, forward_action
from recoup.planning.solvers.spill import SPILL_SCHEDULES, PreparedSpill, SpillSolver, solve_spill
from recoup.planning.solvers.spill.choices import SpillChoices
from recoup.planning.solvers.spill.transfers import place_moves


def late_need(bytes_per_s: float, *, capacity_bytes: int | None = None) -> Problem:
    """'a' holds 60 bytes and is dear to replay (10 s); b and c hold none. Keep all: 15 s, 100 bytes.

    The peak is the backward of 'c' at 12 s: outputs 20, held 60, gradients 20.
    """
    link = Link(
        "host",
        send_bytes_per_s=bytes_per_s,
        fetch_bytes_per_s=bytes_per_s,
        capacity_bytes=capacity_bytes,
    )
    keep = Option("keep", forward_s=10, backward_s=1, held_bytes=60, held_links=("host",))
    light = Option("light", forward_s=1, backward_s=1)
    units = [Unit("a", [keep], output_bytes=10), *(Unit(n, [light], output_bytes=10) for n in "bc")]
    return Problem(units, links=[link])


@pytest.mark.parametrize(
    ("bytes_per_s", "seconds", "wait_s", "expected"),
    [
        # Sent 10-11, back 13-14 beside the backward of 'b'.
        (60.0, 15.0, 0.0, "F0:0 S0h F1:0 F2:0 B2 R0h B1 B0"),
        # Sent 10-13: c's backward waits 1 s. Back 14-17: a's backward waits 2 s.
        (20.0, 18.0, 3.0, "F0:0 S0h F1:0 F2:0 W0h B2 R0h B1 B0"),
        # 60 s each way: 10 s of replay are cheaper.
        (1.0, 25.0, 0.0, "F0i F1:0 F2:0 B2 B1 F0:0 B0"),
    ],
    ids=["hidden", "partly hidden", "too slow"],
)
def test_overlap_by_hand(bytes_per_s: float, seconds: float, wait_s: float, expected: str) -> None:
    problem = late_need(bytes_per_s)
    candidate = solve_spill(problem, budget_bytes=99)
    result = simulate(problem, candidate.schedule)
    assert (result.seconds, result.wait_s) == (seconds, wait_s)
    assert result.peak_bytes <= 99
    assert trace(candidate.schedule) == expected


def test_nothing_moves_where_everything_fits() -> None:
    candidate = solve_spill(late_need(20.0), budget_bytes=100)
    assert trace(candidate.schedule) == "F0:0 F1:0 F2:0 B2 B1 B0"
    assert candidate.bound is not None
    assert candidate.bound.schedules == SPILL_SCHEDULES
    assert candidate.bound.seconds == pytest.approx(15.0, rel=1e-9)


def test_a_store_that_is_too_small_takes_nothing() -> None:
    problem = late_need(60.0, capacity_bytes=59)
    assert simulate(problem, solve_spill(problem, budget_bytes=99).schedule).seconds == 25.0


def test_an_output_leaves_after_its_last_reader_and_is_back_for_that_readers_backward() -> None:
    """The output of 'a' (50 bytes) is read by b and, by a skip, by c; it can be away while d and e run."""
    light = Option("light", forward_s=1, backward_s=1)
    link = Link("host", send_bytes_per_s=50.0, fetch_bytes_per_s=50.0)
    units = [
        Unit("a", [light], output_bytes=50, gradient_bytes=0, output_links=("host",)),
        Unit("b", [light], output_bytes=1),
        Unit("c", [light], output_bytes=1, skips=[0]),
        Unit("d", [light], output_bytes=1),
        Unit("e", [Option("big", forward_s=1, backward_s=1, forward_transient_bytes=100)], output_bytes=1),
    ]
    problem = Problem(units, links=[link])
    assert simulate(problem, solve_spill(problem, budget_bytes=1000).schedule).peak_bytes == 154
    candidate = solve_spill(problem, budget_bytes=110)
    result = simulate(problem, candidate.schedule)
    assert trace(candidate.schedule) == "F0:0 F1:0 F2:0 S0y F3:0 F4:0 B4 R0y B3 B2 B1 B0"
    assert (result.seconds, result.wait_s, result.peak_bytes) == (10.0, 0.0, 104)


def test_a_budget_below_the_smallest_names_it_and_its_unit() -> None:
    problem = late_need(60.0)
    smallest = PreparedSpill(problem, time_limit_s=1).smallest_bytes
    with pytest.raises(
        BudgetError, match=rf"The smallest is {smallest} B .* unit 'a'.*leave over a link"
    ) as e:
        solve_spill(problem, budget_bytes=smallest - 1)
    assert (e.value.smallest_bytes, e.value.unit) == (smallest, "a")


def test_the_solver_applies_where_something_may_leave() -> None:
    light = Option("light", forward_s=1, backward_s=1)
    assert not SpillSolver().applies(Problem([Unit("a", [light], output_bytes=1)]))
    assert SpillSolver().applies(late_need(1.0))
    found = plan(late_need(60.0), 99, solvers=[SpillSolver()])
    assert (found.solver, found.predicted.seconds, found.is_optimal) == ("spill", 15.0, True)


def test_two_links_share_the_load() -> None:
    keep = Option("keep", forward_s=1, backward_s=1, held_bytes=60, held_links=("host", "disk"))
    units = [Unit(f"u{i}", [keep], output_bytes=1) for i in range(6)]
    links = [Link(name, send_bytes_per_s=30.0, fetch_bytes_per_s=30.0) for name in ("host", "disk")]
    one = Problem([_over(unit, "host") for unit in units], links=links[:1])
    seconds = []
    for problem in (one, Problem(units, links=links)):
        prepared = PreparedSpill(problem, time_limit_s=2)
        candidate = prepared.best(200)
        assert candidate is not None
        seconds.append(simulate(problem, candidate.schedule).seconds)
    assert seconds == [13.0, 12.0]


def _over(unit: Unit, link: str) -> Unit:
    (keep,) = unit.options
    only = Option("keep", forward_s=1, backward_s=1, held_bytes=keep.held_bytes, held_links=(link,))
    return Unit(unit.name, [only], output_bytes=unit.output_bytes)


def links_of(rng: random.Random) -> tuple[Link, ...]:
    speeds = [rng.choice([1.0, 3.0, 8.0, 20.0, 1000.0]) for _ in range(2)]
    return (Link("host", send_bytes_per_s=speeds[0], fetch_bytes_per_s=speeds[1]),)


@settings(max_examples=60, deadline=None)
@given(seed=seeds)
def test_never_over_budget_never_worse_than_without_links_and_monotone(seed: int) -> None:
    rng = random.Random(seed)
    num_units, share_once = rng.randint(1, 6), rng.choice([0.0, 0.0, 0.4])
    problem = random_problem(
        rng, num_units=num_units, max_options=2, links=links_of(rng), share_once=share_once
    )
    prepared = PreparedSpill(problem, time_limit_s=0.02)
    low, high = prepared.smallest_bytes, prepared.without.selector.fastest_bytes
    assert prepared.best(low - 1) is None
    figures = []
    for budget_bytes in sorted({low + max(high - low, 0) * step // 5 for step in range(6)}):
        candidate = prepared.best(budget_bytes)
        assert candidate is not None
        assert candidate.bound is not None
        result = simulate(problem, candidate.schedule)
        assert result.peak_bytes <= budget_bytes
        assert candidate.bound.seconds <= result.seconds
        plain = prepared.without.best(budget_bytes)
        if plain is not None:
            assert result.seconds <= simulate(problem, plain.schedule).seconds
        figures.append(result.seconds)
    assert all(later <= earlier for earlier, later in pairwise(figures))


def brute_force(problem: Problem, budget_bytes: int) -> float:
    """All options, all subsets of moves, all fetch points; waits for sends where room is short."""
    best_s, num_units = float("inf"), problem.num_units
    for chosen in product(*SpillChoices(problem).choices):
        levels = Levels(problem, [[choice] for choice in chosen])
        if levels.peak_bytes([0] * num_units) > budget_bytes or levels.seconds([0] * num_units) >= best_s:
            continue
        moves = [(move, unit) for unit, choice in enumerate(chosen) for move in choice.moves]
        for points in product(*(range(unit, num_units) for _, unit in moves)):
            actions = []
            for unit, choice in enumerate(chosen):
                actions.append(forward_action(unit, choice))
                actions += (Send(move.unit, value=move.value, link=move.link) for move in choice.moves)
            for unit in reversed(range(num_units)):
                due = [
                    (need, move) for (move, need), point in zip(moves, points, strict=True) if point == unit
                ]
                due.sort(key=lambda entry: -entry[0])
                actions += (Fetch(move.unit, value=move.value, link=move.link) for _, move in due)
                actions += backward_actions(unit, chosen[unit])
            best_s = min(best_s, with_waits(problem, actions, budget_bytes, best_s))
    return best_s


def with_waits(problem: Problem, actions: list, budget_bytes: int, best_s: float) -> float:
    while True:
        result = simulate(problem, Schedule(actions))
        if result.seconds >= best_s:
            return best_s
        if result.peak_bytes <= budget_bytes:
            return result.seconds
        index = next(moment.action for moment in result.timeline if moment.num_bytes > budget_bytes)
        sent = [(a.unit, a.value) for a in actions[:index] if isinstance(a, Send)]
        done = [(a.unit, a.value) for a in actions[: index + 1] if isinstance(a, Wait)]
        left = [entry for entry in sent if entry not in done]
        if not left:
            return best_s
        actions = [*actions[:index], Wait(left[0][0], value=left[0][1]), *actions[index:]]


def test_against_brute_force_over_all_moves_on_tiny_chains() -> None:
    """A rule places the moves, so a few schedules are missed: how many and by how much is pinned here."""
    rng = random.Random(0)
    excesses = []
    while len(excesses) < 80:
        problem = random_problem(rng, num_units=rng.randint(2, 3), max_options=2, links=links_of(rng))
        prepared = PreparedSpill(problem, time_limit_s=1)
        low, high = prepared.smallest_bytes, prepared.without.selector.fastest_bytes
        for budget_bytes in {low, (low + high) // 2}:
            candidate = prepared.best(max(budget_bytes, low))
            assert candidate is not None
            assert candidate.bound is not None
            best_s = brute_force(problem, max(budget_bytes, low))
            seconds = simulate(problem, candidate.schedule).seconds
            assert candidate.bound.seconds <= best_s * (1 + 1e-9)
            assert seconds >= best_s * (1 - 1e-9)
            excesses.append(seconds / best_s - 1)
    assert sum(excess > 1e-9 for excess in excesses) <= 4
    assert max(excesses) <= 0.1


def test_a_move_placed_without_a_budget_never_waits_for_room() -> None:
    problem = late_need(20.0)
    moved = next(choice for choice in SpillChoices(problem).choices[0] if choice.moves)
    others = [choices[0] for choices in SpillChoices(problem).choices[1:]]
    schedule = place_moves(problem, [moved, *others], budget_bytes=None)
    assert schedule is not None
    assert not any(isinstance(action, Wait) for action in schedule)
    assert moved.moves[0].value is Value.HELD


def test_what_a_second_run_costs_hides_a_move_too() -> None:
    moved = Option("keep", forward_s=1, backward_s=1, held_bytes=60, held_links=("host",))
    replayed = Option("keep", forward_s=1, backward_s=1, held_bytes=10, again_s=5)
    units = [Unit(name, [option], output_bytes=1) for name, option in (("a", moved), ("b", replayed))]
    last = Unit("c", [Option("keep", forward_s=1, backward_s=1)], output_bytes=1)
    link = Link("host", send_bytes_per_s=60.0, fetch_bytes_per_s=10.0)
    problem = Problem([*units, last], links=[link])
    choices = SpillChoices(problem).choices
    chosen = [
        next(choice for choice in choices[0] if choice.moves),
        next(choice for choice in choices[1] if choice.run is Run.REPLAYED),
        choices[2][0],
    ]
    schedule = place_moves(problem, chosen, budget_bytes=None)
    assert schedule is not None
    actions = list(schedule)
    # The move takes 6 seconds; b's replay and backward take 1, 5 and 1.
    fetch = next(index for index, action in enumerate(actions) if isinstance(action, Fetch))
    assert actions[fetch - 1] == Backward(2, option=0)
    assert simulate(problem, schedule).wait_s == 0.0


def test_the_same_input_gives_the_same_plan() -> None:
    rng = random.Random(4)
    problem = random_problem(rng, num_units=8, max_options=2, links=links_of(rng))
    budget_bytes = PreparedSpill(problem, time_limit_s=0.1).smallest_bytes + 20
    found = {solve_spill(problem, budget_bytes=budget_bytes, time_limit_s=0.1).schedule for _ in range(3)}
    assert len(found) == 1
