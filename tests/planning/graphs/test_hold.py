"""``graph`` against brute force over all hold sets, and its promises on every graph."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from graph_cases import long_ops, random_ops
from hypothesis import given, settings
from hypothesis import strategies as st

from recoup.errors import BudgetError, GraphError
from recoup.planning.graphs import Operation, OpGraph, evaluate_held
from recoup.planning.graphs.hold import hold_frontier, hold_plan, hold_plans
from recoup.planning.graphs.hold.cut import Network

# Two readers of one intermediate value: its recomputation is charged once.
SHARED = OpGraph(
    (9, 4, 5, 6),
    (Operation(1.0, (0,), (1,)), Operation(2.0, (1,), (2,)), Operation(4.0, (1,), (3,))),
    needed=(2, 3),
    resident=(0,),
)


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def undominated(graph: OpGraph) -> list[tuple[int, int]]:
    """(bytes, nanoseconds) of all hold sets that no other beats, ascending in bytes."""
    free = [value for value in range(len(graph.value_bytes)) if value not in graph.resident]
    best: dict[int, int] = {}
    for count in range(len(free) + 1):
        for held in itertools.combinations(free, count):
            try:
                cost = evaluate_held(graph, held=held)
            except GraphError:
                continue
            time = nanoseconds(cost.recompute_s)
            best[cost.held_bytes] = min(time, best.get(cost.held_bytes, time))
    points: list[tuple[int, int]] = []
    for size, time in sorted(best.items()):
        if not points or time < points[-1][1]:
            points.append((size, time))
    return points


def lower_hull(points: list[tuple[int, int]]) -> list[tuple[int, int]]:
    hull: list[tuple[int, int]] = []
    for x, y in points:
        while len(hull) > 1 and (hull[-1][0] - hull[-2][0]) * (y - hull[-2][1]) <= (x - hull[-2][0]) * (
            hull[-1][1] - hull[-2][1]
        ):
            hull.pop()
        hull.append((x, y))
    return hull


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), num_ops=st.integers(1, 5))
def test_the_hull_is_that_of_all_hold_sets(seed, num_ops):
    graph = random_ops(random.Random(seed), num_ops)
    frontier = hold_frontier(graph)
    found = [(point.held_bytes, nanoseconds(point.recompute_s)) for point in frontier.points]
    assert found[::-1] == lower_hull(undominated(graph))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_plans_between_corners_are_the_best_hold_sets(seed):
    graph = random_ops(random.Random(seed), 4)
    frontier = hold_frontier(graph)
    for size, time in undominated(graph):
        plan = hold_plan(graph, limit_bytes=size, frontier=frontier)
        assert (nanoseconds(plan.recompute_s), plan.is_optimal) == (time, True)
        assert plan.held_bytes <= size


@pytest.mark.parametrize("needed_share", [0.7, 0.2])
def test_every_corner_is_what_evaluation_says(needed_share):
    graph = long_ops(300, seed=4, needed_share=needed_share)
    frontier = hold_frontier(graph)
    assert len(frontier.points) > 30
    for index, point in enumerate(frontier.points):
        cost = evaluate_held(graph, held=frontier.held(index))
        assert (cost.held_bytes, cost.recompute_s) == (point.held_bytes, point.recompute_s)
        assert cost.recomputed == frontier.recomputed(index)


def test_the_hull_is_strictly_convex_and_monotone():
    points = hold_frontier(long_ops(2000, seed=1)).points
    slopes = []
    for left, right in itertools.pairwise(points):
        assert left.held_bytes > right.held_bytes
        added = nanoseconds(right.recompute_s) - nanoseconds(left.recompute_s)
        slopes.append((added, left.held_bytes - right.held_bytes))
    assert all(a * d < c * b for (a, b), (c, d) in itertools.pairwise(slopes))


def test_a_value_that_two_need_is_charged_once():
    assert evaluate_held(SHARED, held=()).recompute_s == 7.0
    assert [(point.held_bytes, point.recompute_s) for point in hold_frontier(SHARED).points] == [
        (11, 0.0),
        (6, 3.0),
        (0, 7.0),
    ]


def test_a_chain_is_charged_in_full():
    ops = tuple(Operation(float(op + 1), (op,), (op + 1,)) for op in range(4))
    graph = OpGraph((0, 5, 5, 5, 5), ops, needed=(4,), resident=(0,))
    assert hold_plan(graph, limit_bytes=0).recompute_s == 1 + 2 + 3 + 4
    assert evaluate_held(graph, held=(2,)).recomputed == (2, 3)


def test_the_product_of_kept_factors_is_dropped_for_free():
    # Design note: the default partitioner keeps the product and both its factors.
    ops = (Operation(9.0, (0,), (1,)), Operation(9.0, (0,), (2,)), Operation(1e-3, (1, 2), (3,)))
    graph = OpGraph((8, 8, 8, 8), ops, needed=(1, 2, 3), resident=(0,))
    assert hold_plan(graph, limit_bytes=16).held == (1, 2)


def test_what_cannot_run_again_is_held():
    ops = (Operation(1.0, (0,), (1,), is_replayable=False), Operation(1.0, (1,), (2,)))
    graph = OpGraph((3, 5, 4), ops, needed=(1, 2), resident=(0,))
    frontier = hold_frontier(graph)
    assert [(point.held_bytes, point.recompute_s) for point in frontier.points] == [(9, 0.0), (5, 1.0)]
    with pytest.raises(BudgetError, match=r"at least 5 bytes held.*limit is 4 bytes"):
        hold_plan(graph, limit_bytes=4)


def test_a_joint_graph_is_cut_at_the_backward():
    ops = (
        Operation(1.0, (0,), (1,)),
        Operation(2.0, (1,), (2,)),
        Operation(3.0, (1, 2), (3,)),
        Operation(1.0, (3,), (4,)),
    )
    graph = OpGraph.from_joint((1, 2, 3, 4, 5), ops, num_forward=2, resident=[0])
    assert (graph.needed, len(graph.operations)) == ((1, 2), 2)
    with pytest.raises(GraphError, match="num_forward must be 0 to 4"):
        OpGraph.from_joint((1, 2, 3, 4, 5), ops, num_forward=5)


def test_large_numbers_stay_exact():
    # Products of bytes and nanoseconds near 2**90: 32-bit flow must be taken digit by digit.
    ops = tuple(Operation(10_000_000.0 + op, (0,), (op + 1,)) for op in range(6))
    sizes = (0, *(2**40 + 3 * op for op in range(6)))
    graph = OpGraph(sizes, ops, needed=tuple(range(1, 7)), resident=(0,))
    points = hold_frontier(graph).points
    assert [point.held_bytes for point in points] == [sum(sizes[1 + op :]) for op in range(7)]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), bits=st.integers(3, 100))
def test_flows_of_any_size_give_minimum_cuts(seed, bits):
    rng = random.Random(seed)
    size = 5
    ends = [(size, node) for node in range(size)] + [(node, size + 1) for node in range(size)]
    ends += [(a, b) for a in range(size) for b in range(a + 1, size) if rng.random() < 0.6]
    capacities = np.array([rng.randrange(2**bits) for _ in ends], dtype=object)
    tails, heads = np.array(ends, dtype=np.int32).T
    network = Network(size, tails, heads, np.zeros(size, np.int32))

    def value(inside) -> int:
        on_left = [*inside, True, False]
        return sum(cap for (a, b), cap in zip(ends, capacities, strict=True) if on_left[a] and not on_left[b])

    cuts = {inside: value(inside) for inside in itertools.product((False, True), repeat=size)}
    best = [inside for inside, cost in cuts.items() if cost == min(cuts.values())]
    assert tuple(network.smallest_cut(capacities).tolist()) == min(best, key=sum)
    assert tuple(network.largest_cut(capacities).tolist()) == max(best, key=sum)


def test_plans_are_monotone_and_the_same_each_time():
    graph = long_ops(200, seed=9)
    most = hold_frontier(graph).points[0].held_bytes
    limits = [most * k // 12 for k in range(13)]
    plans, again = (hold_plans(graph, limits_bytes=limits, time_limit_s=30.0) for _ in range(2))
    assert plans == again
    assert all(plan.held_bytes <= plan.limit_bytes for plan in plans)
    assert all(a.recompute_s >= b.recompute_s for a, b in itertools.pairwise(plans))
    assert all(plan.recompute_s >= plan.bound_s for plan in plans)
    assert hold_frontier(graph) == hold_frontier(graph)


def test_an_empty_pass_holds_nothing():
    assert hold_plan(OpGraph((), (), ()), limit_bytes=0).held == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((1, 1), (Operation(1.0, (1,), (0,)), Operation(1.0, (), (1,))), (0,)), "before they are made"),
        (((1,), (Operation(1.0, (), (0,)), Operation(1.0, (), (0,))), (0,)), "a second time"),
        (((1,), (Operation(1.0, (), (3,)),), (0,)), r"names values \[3\]"),
        (
            ((1,), (Operation(-1.0, (), (0,)),), (0,)),
            "seconds must be a finite number of seconds, at least 0; got -1.0",
        ),
        (((2**53, 1), (), (0,)), "OpGraph: its sizes add up to 9007199254740993 bytes"),
        (((1,), (Operation(2e9, (), (0,)),), (0,)), "OpGraph: its operations take more than 1e9 seconds"),
        (((1,), (), (7,)), r"needed names values \[7\]"),
    ],
)
def test_malformed_graphs_are_refused(arguments, message):
    with pytest.raises(GraphError, match=message):
        OpGraph(*arguments)


def test_a_hold_set_that_leaves_a_need_open_is_refused():
    graph = OpGraph((3, 5), (Operation(1.0, (0,), (1,)),), needed=(1,))
    with pytest.raises(GraphError, match="Value 0 is needed and cannot be recomputed"):
        evaluate_held(graph, held=())
