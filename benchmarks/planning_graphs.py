"""Times the `dag` and `graph` solvers: ``python benchmarks/planning_graphs.py [--save] [--runs 5]``.

Every result is checked before it is timed: plans are simulated, corners evaluated, costs compared with the
proven optima. Contenders run interleaved in one process; medians with the spread. ``--save`` writes the
tables to ``benchmarks/results/planning_graphs_cpu_YYYYMM.md``.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy
import scipy

import recoup
from recoup.errors import BudgetError
from recoup.planning.graphs import OpGraph, OrderedGraph, actions_of, evaluate_held, simulate_actions
from recoup.planning.graphs.dag import Effort, solve_dag
from recoup.planning.graphs.dag.greedy import greedy_order
from recoup.planning.graphs.dag.milp import solve_staged
from recoup.planning.graphs.dag.prune import pruned_order
from recoup.planning.graphs.hold import HoldFrontier, hold_frontier, hold_plan

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from graph_cases import budget_of, instance, long_ops, training_graph, wide_graph

OPTIMA = {
    ("vgg16_train", 0.9): 15_805,
    ("vgg_unet_train", 0.9): 31_355,
    ("vgg_unet_train", 0.8): 31_620,
    ("vgg_unet_train", 0.6): 32_385,
    ("vgg_unet_train", 0.42): 34_495,
    ("layered_100", 0.9): 48_146,
    ("layered_100", 0.8): 48_866,
}

EFFORTS: tuple[tuple[Effort, float], ...] = (("first", 10.0), ("search", 10.0), ("exact", 290.0))


def timed(call: Callable[[], object], runs: int) -> tuple[float, float, float]:
    """Median, least and most seconds."""
    seconds = []
    for _ in range(runs):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), min(seconds), max(seconds)


def spread(times: tuple[float, float, float]) -> str:
    return f"{times[0]:.2f} ({times[1]:.2f} to {times[2]:.2f})"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def first_order(graph: OrderedGraph, budget: int) -> list[int]:
    order = greedy_order(graph, budget_bytes=budget)
    assert order is not None
    return pruned_order(graph, order, budget_bytes=budget)


def first_plans(runs: int) -> str:
    """The first plan for long training graphs, and how the time grows."""
    rows, least = [], {}
    for num_ops in (300, 1_000, 3_000, 10_000):
        graph = training_graph(num_ops, seed=0)
        for share in (0.8, 0.5, 0.2):
            budget = budget_of(graph, share)
            first = partial(first_order, graph, budget)
            cost = simulate_actions(graph, actions_of(graph, first()))
            assert cost.peak_bytes <= budget
            plan = solve_dag(graph, budget_bytes=budget, effort="first")
            times = timed(first, runs)
            least[num_ops] = times[1]
            rows.append(
                [
                    f"{num_ops:,}",
                    f"{share}",
                    spread(times),
                    f"{cost.compute_s / graph.plain_s - 1:.2%}",
                    f"{plan.bound_s / graph.plain_s - 1:.2%}",
                ]
            )
    exponent = math.log(least[10_000] / least[1_000]) / math.log(10)
    head = ["operations", "budget", "seconds", "extra cost", "least extra cost (bound)"]
    note = f"Growth from 1,000 to 10,000 operations at 0.2: exponent {exponent:.2f} (least times)."
    return f"{table(head, rows)}\n\n{note} Limits: 0.5 s and 10 s."


def wide(runs: int) -> str:
    """Wide random layers, where the walk alone fails: the first plan of the whole solver, bound included."""
    rows = []
    for num_ops in (100, 300, 1_000, 3_000):
        graph = wide_graph(num_ops, seed=1)
        for share in (0.95, 0.9, 0.8):
            budget = budget_of(graph, share)
            walk = greedy_order(graph, budget_bytes=budget)
            cells = [f"{num_ops:,}", f"{share}", "nothing" if walk is None else "feasible"]
            solve = partial(solve_dag, graph, budget_bytes=budget, effort="first")
            try:
                plan = solve()
            except BudgetError:
                rows.append([*cells, "nothing", "", ""])
                continue
            assert simulate_actions(graph, plan.actions).peak_bytes <= budget
            extra, bound = plan.compute_s / graph.plain_s - 1, plan.bound_s / graph.plain_s - 1
            rows.append([*cells, spread(timed(solve, runs)), f"{extra:.2%}", f"{bound:.2%}"])
    head = ["operations", "budget", "greedy walk", "first plan, s", "extra cost", "least extra cost (bound)"]
    return table(head, rows)


def instances(runs: int) -> str:
    """The shared graphs against the proven optima, each step of the solver for itself."""
    rows = []
    for (name, share), optimum in OPTIMA.items():
        graph = instance(name)
        budget = budget_of(graph, share)
        cells = []
        for effort, limit_s in EFFORTS:
            solve = partial(solve_dag, graph, budget_bytes=budget, effort=effort, time_limit_s=limit_s)
            plan = solve()
            assert simulate_actions(graph, plan.actions).peak_bytes <= budget
            assert plan.compute_s >= optimum
            times = timed(solve, 1 if effort == "exact" else runs)
            cells.append(f"+{(plan.compute_s - optimum) / graph.plain_s:.2%} in {times[0]:.2f} s")
        started = time.perf_counter()
        alone = solve_staged(graph, budget_bytes=budget, time_limit_s=60.0)
        took = time.perf_counter() - started
        if alone.order is None:
            cells.append(f"nothing in {took:.0f} s")
        else:
            found = simulate_actions(graph, actions_of(graph, alone.order)).compute_s
            cells.append(f"+{(found - optimum) / graph.plain_s:.2%} in {took:.1f} s")
        rows.append([name, f"{share}", f"{optimum:,}", *cells, plan.claim])
    head = [
        "graph",
        "budget",
        "proven optimum",
        "first",
        "search",
        "exact",
        "program alone",
        "claim of exact",
    ]
    return table(head, rows)


def hulls(runs: int) -> str:
    """The whole hull for long passes in which all operations differ."""
    rows = []
    for num_ops in (500, 2_000, 6_000, 20_000):
        for needed_share in (0.7, 0.3):
            graph = long_ops(num_ops, seed=0, needed_share=needed_share)
            frontier = hold_frontier(graph)
            check(graph, frontier)
            times = timed(partial(hold_frontier, graph), runs)
            limit = frontier.points[0].held_bytes // 3
            one = partial(hold_plan, graph, limit_bytes=limit, frontier=frontier)
            plan = one()
            assert plan.held_bytes <= limit
            between = timed(one, runs)
            rows.append(
                [
                    f"{num_ops:,}",
                    f"{needed_share}",
                    f"{len(frontier.points):,}",
                    spread(times),
                    spread(between),
                    f"{plan.recompute_s / plan.bound_s - 1:.4%}",
                ]
            )
    head = [
        "operations",
        "needed share",
        "corners",
        "whole hull, s",
        "one plan between corners, s",
        "its gap",
    ]
    return f"{table(head, rows)}\n\nLimits: 2 s for 2,000 operations, 30 s for 20,000."


def check(graph: OpGraph, frontier: HoldFrontier) -> None:
    step = max(1, len(frontier.points) // 7)
    for index in range(0, len(frontier.points), step):
        cost = evaluate_held(graph, held=frontier.held(index))
        point = frontier.points[index]
        assert (cost.held_bytes, cost.recompute_s) == (point.held_bytes, point.recompute_s)


def machine() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = names[0].split(":")[1].strip() if names else platform.processor()
    return (
        f"{datetime.date.today().isoformat()}. {os.cpu_count()} cores, {cpu}; Python "
        f"{platform.python_version()}, numpy {numpy.__version__}, scipy {scipy.__version__}, "
        f"highspy {version('highspy')}, recoup {recoup.__version__}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="runs of each measurement")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    arguments = parser.parse_args()
    runs = arguments.runs
    parts = [
        "# Planning graphs: `dag` and `graph`\n",
        f"{machine()} Medians of {runs} runs with the least and the most; `exact` once.\n",
        f"## First plan (greedy and pruning)\n\n{first_plans(runs)}\n",
        f"## Wide graphs (the cases that the greedy loses)\n\n{wide(runs)}\n",
        f"## The shared instances: how far above the proven optimum, in plain cost\n\n{instances(runs)}\n",
        f"## The hull of held bytes\n\n{hulls(runs)}\n",
    ]
    text = "\n".join(parts)
    print(text)
    if arguments.save:
        month = datetime.date.today().strftime("%Y%m")
        path = Path(__file__).parent / "results" / f"planning_graphs_cpu_{month}.md"
        path.write_text(text)


if __name__ == "__main__":
    main()
