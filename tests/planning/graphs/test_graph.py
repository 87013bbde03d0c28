"""The cost model of ordered graphs: figures by hand, and every way to be illegal."""

from __future__ import annotations

import pytest
from graph_cases import instance

from recoup.errors import GraphError
from recoup.planning.graphs import Compute, Drop, OrderedGraph, actions_of, simulate_actions

GRAPH = OrderedGraph(
    value_bytes=(7, 5, 3, 2), compute_s=(1.0, 2.0, 4.0, 8.0), inputs=((), (0,), (1,), (0, 2))
)


def trace(actions) -> str:
    return " ".join(map(str, actions))


@pytest.mark.parametrize(
    ("name", "peak_bytes", "seconds"),
    [
        ("vgg16_train", 15_825_108_992, 15_500),
        ("vgg_unet_train", 20_959_461_376, 31_005),
        ("layered_100", 46_319, 47_769),
    ],
)
def test_plain_figures_are_the_published_ones(name, peak_bytes, seconds):
    graph = instance(name)
    assert (graph.plain_peak_bytes, graph.plain_s) == (peak_bytes, seconds)


def test_plain_schedule_by_hand():
    actions = actions_of(GRAPH, range(4))
    assert trace(actions) == "C0 C1 C2 D1 C3 D0 D2 D3"
    assert simulate_actions(GRAPH, actions).live_bytes == (7, 12, 15, 12)


def test_recomputing_the_first_value_by_hand():
    actions = actions_of(GRAPH, [0, 1, 2, 0, 3])
    assert trace(actions) == "C0 C1 D0 C2 D1 C0 C3 D0 D2 D3"
    cost = simulate_actions(GRAPH, actions)
    assert cost.live_bytes == (7, 12, 8, 10, 12)
    assert (cost.peak_bytes, cost.peak_op, cost.compute_s, cost.num_recomputed) == (12, 1, 16.0, 1)


def test_a_value_that_nobody_reads_lives_for_one_step():
    graph = OrderedGraph((5, 6), (1.0, 1.0), ((), ()))
    assert trace(actions_of(graph, [0, 1])) == "C0 D0 C1 D1"
    assert graph.plain_peak_bytes == 6


def test_empty_graph_costs_nothing():
    graph = OrderedGraph((), (), ())
    assert (graph.plain_peak_bytes, graph.plain_s, graph.floor_bytes) == (0, 0.0, 0)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([Compute(0), Compute(2)], "C2 comes too early"),
        ([Compute(0), Compute(0)], "still there; drop it first"),
        ([Compute(0), Drop(0), Compute(1)], r"C1 needs values \[0\]"),
        ([Drop(0)], "drops a value that is not there"),
        ([Compute(0), Drop(0)], "ends before operation 1 of 4"),
        ([*actions_of(GRAPH, range(4))][:-1], r"values \[3\] still held"),
    ],
)
def test_illegal_schedules_are_refused(actions, message):
    with pytest.raises(GraphError, match=message):
        simulate_actions(GRAPH, actions)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((1,), (1.0, 2.0), ((), ())), "one entry per operation"),
        (
            ((1, -1), (1.0, 2.0), ((), ())),
            "Operation 1: value_bytes must be a whole number of bytes, at least 0; got -1",
        ),
        (
            ((1, 1), (1.0, float("nan")), ((), ())),
            "Operation 1: compute_s must be a finite number of seconds, at least 0; got nan",
        ),
        (((2**62, 1), (1.0, 2.0), ((), ())), "OrderedGraph: its sizes add up to 4611686018427387905 bytes"),
        (((1, 1), (1.0, 1e308), ((), ())), "Operation 1: compute_s must be 0 or from 1e-100 to"),
        (((1, 1), (1.0, 2.0), ((1,), ())), "must be distinct earlier operations"),
        (((1, 1), (1.0, 2.0), ((), (0, 0))), "must be distinct earlier operations"),
    ],
)
def test_malformed_graphs_are_refused(arguments, message):
    with pytest.raises(GraphError, match=message):
        OrderedGraph(*arguments)


def test_edges_outside_the_graph_are_refused():
    with pytest.raises(GraphError, match="points outside the 2 operations"):
        OrderedGraph.from_edges([1, 1], [1.0, 1.0], edges=[(0, 2)])


@pytest.mark.parametrize(
    ("order", "message"), [([0, 9], "computes operation 9"), ([1], "before its input 0")]
)
def test_impossible_orders_are_refused(order, message):
    with pytest.raises(GraphError, match=message):
        actions_of(GRAPH, order)
