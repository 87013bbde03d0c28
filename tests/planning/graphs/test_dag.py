"""``dag`` against brute force on small graphs, and its promises on every graph."""

from __future__ import annotations

import heapq
import itertools
import math
import random

import pytest
from graph_cases import budget_of, random_ordered, training_graph, wide_graph
from hypothesis import given, settings
from hypothesis import strategies as st

from recoup.errors import BudgetError, GraphError
from recoup.planning.graphs import OrderedGraph, actions_of, simulate_actions
from recoup.planning.graphs.dag import dag_frontier, minimum_dag_budget, solve_dag
from recoup.planning.graphs.dag.bound import gap_bound_s
from recoup.planning.graphs.dag.greedy import greedy_order
from recoup.planning.graphs.dag.milp import solve_staged
from recoup.planning.graphs.dag.prune import pruned_order
from recoup.planning.graphs.dag.search import Cooling, annealed_order
from recoup.planning.graphs.dag.shave import shaved_order


def least_seconds(graph: OrderedGraph, budget: int) -> float:
    """The optimum over all legal schedules: Dijkstra over (held values, operations reached)."""
    sizes = graph.value_bytes
    queue, done = [(0.0, 0, 0)], set()
    while queue:
        seconds, held, reached = heapq.heappop(queue)
        if reached == len(graph):
            return seconds
        if (held, reached) in done:
            continue
        done.add((held, reached))
        live = sum(size for value, size in enumerate(sizes) if held >> value & 1)
        for op in range(reached + 1):
            if held >> op & 1:
                heapq.heappush(queue, (seconds, held & ~(1 << op), reached))
            elif live + sizes[op] <= budget and all(held >> value & 1 for value in graph.inputs[op]):
                step = (seconds + graph.compute_s[op], held | 1 << op, max(reached, op + 1))
                heapq.heappush(queue, step)
    return math.inf


def least_staged_seconds(graph: OrderedGraph, budget: int) -> float:
    """The optimum over staged schedules, by listing them all."""
    best = math.inf
    stages = [
        [again for count in range(stage + 1) for again in itertools.combinations(range(stage), count)]
        for stage in range(len(graph))
    ]
    for again in itertools.product(*stages):
        order = [op for stage, repeats in enumerate(again) for op in (*repeats, stage)]
        seconds = math.fsum(graph.compute_s[op] for op in order)
        if seconds < best and simulate_actions(graph, actions_of(graph, order)).peak_bytes <= budget:
            best = seconds
    return best


def budgets_of(graph: OrderedGraph) -> list[int]:
    low, high = graph.floor_bytes, graph.plain_peak_bytes
    budgets = {low - 1, low, (2 * low + high) // 3, (low + high) // 2, high - 1, high}
    return sorted(budget for budget in budgets if budget >= 0)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), num_ops=st.integers(1, 6))
def test_nothing_is_better_than_the_proven_bounds(seed, num_ops):
    graph = random_ordered(random.Random(seed), num_ops)
    for budget in budgets_of(graph):
        optimum = least_seconds(graph, budget)
        if math.isinf(optimum):
            with pytest.raises(BudgetError):
                solve_dag(graph, budget_bytes=budget)
            continue
        try:
            plan = solve_dag(graph, budget_bytes=budget)
        except BudgetError:
            assert math.isinf(solve_staged(graph, budget_bytes=budget).bound_s), (
                "only unstaged ones are missed"
            )
            continue
        assert plan.bound_s <= optimum + 1e-9, "the bound holds for every schedule"
        assert plan.compute_s >= optimum - 1e-9
        if plan.claim == "optimal among all schedules":
            assert plan.compute_s == pytest.approx(optimum, abs=1e-9)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), num_ops=st.integers(2, 5))
def test_program_equals_listing_all_staged_schedules(seed, num_ops):
    graph = random_ordered(random.Random(seed), num_ops)
    for budget in budgets_of(graph):
        optimum = least_staged_seconds(graph, budget)
        answer = solve_staged(graph, budget_bytes=budget)
        assert answer.bound_s == pytest.approx(optimum, abs=1e-6)
        if math.isfinite(optimum):
            cost = simulate_actions(graph, actions_of(graph, answer.order))
            assert (cost.compute_s, cost.peak_bytes <= budget) == (pytest.approx(optimum, abs=1e-9), True)
            plan = solve_dag(graph, budget_bytes=budget)
            assert plan.compute_s <= optimum + 1e-9, "the solver is at least as good as its own class"


def test_a_cutoff_below_the_optimum_is_itself_the_bound():
    graph = OrderedGraph((4, 4, 2, 1), (1.0, 3.0, 1.0, 1.0), ((), (), (1,), (0, 2)))
    answer = solve_staged(graph, budget_bytes=8, known_s=6.5)
    assert answer.order is None
    assert answer.bound_s == 6.5


@pytest.mark.parametrize("num_ops", [40, 150, 500])
@pytest.mark.parametrize("share", [0.9, 0.6, 0.3])
def test_never_over_the_budget(num_ops, share):
    graph = training_graph(num_ops, seed=num_ops)
    budget = max(int(share * graph.plain_peak_bytes), graph.floor_bytes * 5 // 4)
    plan = solve_dag(graph, budget_bytes=budget, effort="first")
    cost = simulate_actions(graph, plan.actions)
    assert cost.peak_bytes == plan.peak_bytes <= budget
    assert cost.compute_s == plan.compute_s
    assert plan.bound_s <= plan.compute_s


@pytest.mark.parametrize(("effort", "num_ops"), [("first", 400), ("search", 30), ("exact", 24)])
def test_same_input_same_plan(effort, num_ops):
    graph = training_graph(num_ops, seed=3)
    budget = graph.plain_peak_bytes // 2
    plans = [solve_dag(graph, budget_bytes=budget, effort=effort, time_limit_s=60.0) for _ in range(2)]
    assert plans[0] == plans[1]


def test_more_effort_never_costs_more():
    graph = training_graph(60, seed=5)
    budget = graph.plain_peak_bytes // 2
    first, search = (solve_dag(graph, budget_bytes=budget, effort=effort) for effort in ("first", "search"))
    assert search.compute_s <= first.compute_s


def test_frontier_is_monotone_and_within_each_budget():
    graph = training_graph(80, seed=7)
    peak = graph.plain_peak_bytes
    plans = dag_frontier(graph, budgets_bytes=[peak * k // 20 for k in range(21)], effort="first")
    assert [plan.budget_bytes for plan in plans] == sorted(plan.budget_bytes for plan in plans)
    assert all(plan.peak_bytes <= plan.budget_bytes for plan in plans)
    assert all(a.compute_s >= b.compute_s for a, b in itertools.pairwise(plans))
    assert plans[-1].compute_s == graph.plain_s


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_proven_plans_are_monotone(seed):
    graph = random_ordered(random.Random(seed), 7)
    budgets = range(minimum_dag_budget(graph), graph.plain_peak_bytes + 1)
    seconds = [solve_dag(graph, budget_bytes=budget).compute_s for budget in budgets]
    assert seconds == sorted(seconds, reverse=True)


def test_a_budget_that_fits_all_gives_the_plain_schedule():
    graph = training_graph(30, seed=1)
    plan = solve_dag(graph, budget_bytes=graph.plain_peak_bytes)
    assert plan.order == tuple(range(30))
    assert (plan.solver, plan.claim, plan.gap) == ("plain", "optimal among all schedules", 0.0)


def test_a_budget_too_small_names_the_smallest():
    graph = OrderedGraph((4, 4, 2, 1), (1.0, 3.0, 1.0, 1.0), ((), (), (1,), (0, 2)))
    with pytest.raises(
        BudgetError, match=r"within 6 B \(6 bytes\).*with a schedule: 7 bytes, set by operation 3"
    ):
        solve_dag(graph, budget_bytes=6)
    assert solve_dag(graph, budget_bytes=minimum_dag_budget(graph)).peak_bytes == 7


def test_budgets_may_be_text():
    graph = OrderedGraph((4096, 1024), (1.0, 1.0), ((), (0,)))
    assert solve_dag(graph, budget_bytes="5KiB").peak_bytes == 5120


def test_unknown_effort_is_refused():
    with pytest.raises(GraphError, match="first, search, exact; got 'all'"):
        solve_dag(OrderedGraph((1,), (1.0,), ((),)), budget_bytes=1, effort="all")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), num_ops=st.integers(2, 30), share=st.floats(0.3, 1.0))
def test_greedy_and_pruning_keep_to_the_budget(seed, num_ops, share):
    graph = random_ordered(random.Random(seed), num_ops)
    budget = max(graph.floor_bytes, int(share * graph.plain_peak_bytes))
    order = greedy_order(graph, budget_bytes=budget)
    if order is None:
        return
    before = simulate_actions(graph, actions_of(graph, order))
    pruned = pruned_order(graph, order, budget_bytes=budget)
    after = simulate_actions(graph, actions_of(graph, pruned))
    assert max(before.peak_bytes, after.peak_bytes) <= budget
    assert after.compute_s <= before.compute_s
    assert gap_bound_s(graph, budget_bytes=budget) <= after.compute_s + 1e-9


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6), num_ops=st.integers(2, 30), share=st.floats(0.5, 1.0), is_varied=st.booleans()
)
def test_shaving_keeps_to_the_budget(seed, num_ops, share, is_varied):
    graph = random_ordered(random.Random(seed), num_ops)
    budget = max(graph.floor_bytes, int(share * graph.plain_peak_bytes))
    order = shaved_order(graph, budget_bytes=budget, seed=seed if is_varied else None)
    if order is not None:
        assert simulate_actions(graph, actions_of(graph, order)).peak_bytes <= budget


@pytest.mark.parametrize(("num_ops", "share"), [(100, 0.9), (300, 0.9), (1000, 0.9), (1000, 0.8)])
def test_wide_graphs_get_a_first_plan(num_ops, share):
    graph = wide_graph(num_ops, seed=1)
    plan = solve_dag(graph, budget_bytes=budget_of(graph, share), effort="first")
    assert plan.peak_bytes <= budget_of(graph, share)
    assert plan.compute_s <= 1.05 * graph.plain_s


def test_pruning_leaves_only_what_the_budget_needs():
    graph = training_graph(40, seed=2)
    wasteful = [op for position in range(40) for op in (*graph.inputs[position], position)]
    assert pruned_order(graph, wasteful, budget_bytes=graph.plain_peak_bytes) == list(range(40))


def test_annealing_gives_up_where_nothing_fits():
    graph = OrderedGraph((4, 4, 2, 1), (1.0, 3.0, 1.0, 1.0), ((), (), (1,), (0, 2)))
    assert annealed_order(graph, budget_bytes=6, start=range(4), cooling=Cooling(num_moves=500)) is None


def test_long_chains_do_not_recurse():
    size = 4000
    chain = tuple((op - 1,) if op else () for op in range(size))
    last = (*chain, (0, size - 1))
    graph = OrderedGraph((3,) + (2,) * size, (1.0,) * (size + 1), last)
    # The first value must come back at the end; everything between needs two values at a time.
    plan = solve_dag(graph, budget_bytes=7, effort="first")
    assert plan.peak_bytes <= 7


@pytest.mark.parametrize("time_limit_s", [math.nan, math.inf, None])
def test_time_limits_that_are_none(time_limit_s):
    graph = OrderedGraph((4, 4, 2, 1), (1.0, 3.0, 1.0, 1.0), ((), (), (1,), (0, 2)))
    with pytest.raises(
        GraphError, match="solve_dag: time_limit_s must be a finite number of seconds, at least 0"
    ):
        solve_dag(graph, budget_bytes=8, time_limit_s=time_limit_s)
