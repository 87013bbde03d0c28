"""Draws the pictures of ``algorithms/dag.md`` and ``algorithms/graph.md``: ``python docs/draw_graphs.py``."""

from __future__ import annotations

import random

from drawing import LEFT, MIB, RIGHT, WIDTH, Axis, Picture, write

from recoup.planning.graphs import Operation, OpGraph, OrderedGraph, simulate_actions
from recoup.planning.graphs.dag import DagPlan, solve_dag
from recoup.planning.graphs.hold import hold_frontier, hold_plans

TOP, FLOOR, HEIGHT = 64, 290, 352


def chain() -> OrderedGraph:
    """The example of dag.md: six forward operations and, in reverse, their backward operations."""
    sizes, times_ms = (6, 4, 8, 3, 5, 7), (2, 5, 1, 4, 3, 2)
    forward = [(op - 1,) if op else () for op in range(6)]
    backward = [(5,), (4, 6), (3, 7), (2, 8), (1, 9), (0, 10)]
    return OrderedGraph(
        value_bytes=tuple(size * MIB for size in sizes + sizes[::-1]),
        compute_s=tuple(ms / 1e3 for ms in (*times_ms, *(2 * each for each in reversed(times_ms)))),
        inputs=(*forward, *backward),
    )


def timeline(plain: DagPlan, planned: DagPlan) -> str:
    """Memory while each operation of both schedules runs."""
    live = [simulate_actions(each.graph, each.actions).live_bytes for each in (plain, planned)]
    picture = Picture(HEIGHT, "Memory while each operation runs: plain, and within a budget of 22 MiB")
    memory = Axis(FLOOR, TOP, 0, max(live[0]) / MIB * 1.05)
    picture.y_axis(memory, LEFT, "MiB", right=WIDTH - RIGHT)
    step = (WIDTH - LEFT - RIGHT - 30) / (len(live[0]) + len(live[1]))
    left = LEFT + 6.0
    for each, sizes, title in zip((plain, planned), live, ("Plain", "Within 22 MiB"), strict=True):
        seen: set[int] = set()
        picture.text(left, 24, title, kind="title")
        picture.text(
            left, 46, f"{each.compute_s * 1e3:g} ms, peak {each.peak_bytes / MIB:g} MiB", kind="soft"
        )
        for index, (op, size) in enumerate(zip(each.order, sizes, strict=True)):
            kind = "orange" if op in seen else "blue" if op < 6 else "green"
            seen.add(op)
            x, y = left + index * step, memory.at(size / MIB)
            picture.box(x, y, step - 3, FLOOR - y, kind)
            picture.text(x + step / 2 - 1.5, FLOOR + 20, str(op), anchor="middle", kind="soft")
        left += len(sizes) * step + 24
    picture.limit(memory.at(planned.budget_bytes / MIB), "")
    picture.text(
        WIDTH - RIGHT, memory.at(planned.budget_bytes / MIB) - 6, "22 MiB", anchor="end", kind="limit"
    )
    picture.legend(LEFT, HEIGHT - 12, {"blue": "forward", "orange": "recompute", "green": "backward"})
    picture.text(WIDTH - RIGHT, HEIGHT - 12, "number: operation", anchor="end", kind="soft")
    return picture.svg()


def block(seed: int) -> OpGraph:
    """A block's operations, some dear and small, some cheap and large."""
    rng = random.Random(seed)
    operations, sizes = [], [0]
    for op in range(14):
        read = {op} | ({rng.randrange(op)} if op > 2 else set())
        seconds = (8e-4 if rng.random() < 0.4 else 5e-5) * (0.5 + rng.random())
        operations.append(Operation(seconds, tuple(sorted(read)), (op + 1,)))
        sizes.append(rng.randint(2, 64) * MIB)
    return OpGraph(tuple(sizes), tuple(operations), tuple(range(1, 15)), resident=(0,))


def hull(graph: OpGraph) -> str:
    """Corners of the hull, joined, and the best plans at limits between them."""
    points = hold_frontier(graph).points
    most_bytes, most_s = points[0].held_bytes, points[-1].recompute_s
    picture = Picture(
        HEIGHT + 24, "Recompute time against memory held: corners of the hull, plans between them"
    )
    x_axis = Axis(LEFT, WIDTH - RIGHT - 24, 0, most_bytes / MIB * 1.02)
    y_axis = Axis(FLOOR, TOP, 0, most_s * 1e3 * 1.02)
    picture.text(LEFT, 24, "Which values to hold: time against memory", kind="title")
    picture.text(LEFT, 48, "recompute time", kind="soft")
    picture.y_axis(y_axis, LEFT, "ms", right=x_axis.end)
    picture.x_axis(x_axis, FLOOR, "MiB", top=TOP)
    picture.text(
        (LEFT + WIDTH) / 2, FLOOR + 42, "held between forward and backward", anchor="middle", kind="soft"
    )
    corners = [(x_axis.at(p.held_bytes / MIB), y_axis.at(p.recompute_s * 1e3)) for p in points]
    picture.path(corners, "blue", width=2)
    for plan in hold_plans(graph, limits_bytes=[most_bytes * k // 60 for k in range(61)]):
        if plan.solver == "program":
            picture.dot(x_axis.at(plan.held_bytes / MIB), y_axis.at(plan.recompute_s * 1e3), 3.5, "orange")
    for x, y in corners:
        picture.dot(x, y, 5, "blue")
    picture.legend(
        LEFT,
        HEIGHT + 10,
        {"blue": "corners of the hull (minimum cuts)", "orange": "best plans between (integer program)"},
    )
    return picture.svg()


def pictures() -> dict[str, str]:
    """All pictures by their names."""
    graph = chain()
    plain, planned = (solve_dag(graph, budget_bytes=size) for size in (graph.plain_peak_bytes, 22 * MIB))
    return {"algorithms/dag.svg": timeline(plain, planned), "algorithms/graph.svg": hull(block(3))}


if __name__ == "__main__":
    write(pictures())
