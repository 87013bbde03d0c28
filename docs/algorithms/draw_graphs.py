"""Draws the pictures of dag.md and graph.md, as plain SVG: ``python docs/algorithms/draw_graphs.py``."""

from __future__ import annotations

import random
from pathlib import Path

from recoup.planning.graphs import Operation, OpGraph, OrderedGraph, simulate_actions
from recoup.planning.solvers.dag import DagPlan, solve_dag
from recoup.planning.solvers.graph import hold_frontier, hold_plans

HERE = Path(__file__).parent
WIDTH, HEIGHT, LEFT, TOP = 760, 300, 60, 30


def chain() -> OrderedGraph:
    """The example of dag.md: six forward operations and, in reverse, their backward operations."""
    sizes, seconds = (6, 4, 8, 3, 5, 7), (2.0, 5.0, 1.0, 4.0, 3.0, 2.0)
    forward = [(op - 1,) if op else () for op in range(6)]
    backward = [(5,), (4, 6), (3, 7), (2, 8), (1, 9), (0, 10)]
    return OrderedGraph(
        value_bytes=sizes + sizes[::-1],
        compute_s=seconds + tuple(2 * each for each in reversed(seconds)),
        inputs=(*forward, *backward),
    )


def svg(body: list[str]) -> str:
    """Wraps shapes into a page."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT + 85}"'
    page = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f'{head} font-family="sans-serif" font-size="12">', page, *body, "</svg>\n"])


def text(x: float, y: float, words: str, *, anchor: str = "middle", fill: str = "#333") -> str:
    """Words at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{words}</text>'


def timeline(plain: DagPlan, plan: DagPlan) -> str:
    """Live bytes of both schedules over their steps; repeats in orange."""
    live = [simulate_actions(each.graph, each.actions).live_bytes for each in (plain, plan)]
    top = max(live[0])
    body = []
    room = (WIDTH - LEFT - 20) / 2 - 20
    for column, (each, sizes) in enumerate(zip((plain, plan), live, strict=True)):
        left = LEFT + column * (room + 40)
        step = room / len(sizes)
        seen: set[int] = set()
        for index, (op, size) in enumerate(zip(each.order, sizes, strict=True)):
            fill = "#e8762d" if op in seen else "#4878a8"
            seen.add(op)
            height = size / top * HEIGHT
            x, y = left + index * step, TOP + HEIGHT - height
            body.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{step - 2:.1f}" height="{height:.1f}" fill="{fill}"/>'
            )
            body.append(text(x + step / 2 - 1, TOP + HEIGHT + 15, str(op)))
        words = f"{each.compute_s:g} s, peak {each.peak_bytes} bytes"
        body.append(text(left + room / 2, TOP + HEIGHT + 34, words))
    limit = TOP + HEIGHT - plan.budget_bytes / top * HEIGHT
    ends = f'x1="{LEFT}" x2="{WIDTH - 20}" y1="{limit:.1f}" y2="{limit:.1f}"'
    body.append(f'<line {ends} stroke="#b22" stroke-dasharray="5"/>')
    body.append(text(LEFT - 4, limit + 4, f"{plan.budget_bytes}", anchor="end", fill="#b22"))
    body.append(
        text(
            WIDTH / 2,
            18,
            "live bytes while each operation runs: plain, and within the budget (repeats orange)",
        )
    )
    return svg(body)


def block(seed: int) -> OpGraph:
    """The example of graph.md: a block's operations, some dear and small, some cheap and large."""
    rng = random.Random(seed)
    operations, sizes = [], [0]
    for op in range(14):
        read = {op} | ({rng.randrange(op)} if op > 2 else set())
        seconds = (8e-4 if rng.random() < 0.4 else 5e-5) * (0.5 + rng.random())
        operations.append(Operation(seconds, tuple(sorted(read)), (op + 1,)))
        sizes.append(rng.randint(2, 64) * 2**20)
    return OpGraph(tuple(sizes), tuple(operations), tuple(range(1, 15)), resident=(0,))


def hull(graph: OpGraph) -> str:
    """Corners of the hull, joined, and the best plans at limits between them."""
    points = hold_frontier(graph).points
    most_bytes, most_s = points[0].held_bytes, points[-1].recompute_s

    def at(size: int, seconds: float) -> tuple[float, float]:
        return LEFT + size / most_bytes * (WIDTH - LEFT - 40), TOP + HEIGHT - seconds / most_s * HEIGHT

    corners = [at(point.held_bytes, point.recompute_s) for point in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    body = [f'<polyline points="{line}" fill="none" stroke="#4878a8" stroke-width="2"/>']
    for plan in hold_plans(graph, limits_bytes=[most_bytes * k // 60 for k in range(61)]):
        if plan.solver == "program":
            x, y = at(plan.held_bytes, plan.recompute_s)
            body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#e8762d"/>')
    body.extend(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="#4878a8"/>' for x, y in corners)
    body.append(
        f'<line x1="{LEFT}" x2="{WIDTH - 40}" y1="{TOP + HEIGHT}" y2="{TOP + HEIGHT}" stroke="#333"/>'
    )
    body.append(f'<line x1="{LEFT}" x2="{LEFT}" y1="{TOP}" y2="{TOP + HEIGHT}" stroke="#333"/>')
    body.append(
        text(
            WIDTH / 2, TOP + HEIGHT + 22, f"bytes held between the passes, up to {most_bytes / 2**20:.0f} MiB"
        )
    )
    body.append(text(LEFT + 6, TOP - 8, f"recompute seconds, up to {most_s * 1e3:.2f} ms", anchor="start"))
    words = "blue: corners of the hull; orange: best plans between them (integer program)"
    body.append(text(WIDTH / 2, TOP + HEIGHT + 42, words))
    return svg(body)


def main() -> None:
    """Writes both pictures beside this file."""
    graph = chain()
    plain, plan = (solve_dag(graph, budget_bytes=size) for size in (graph.plain_peak_bytes, 22))
    (HERE / "dag.svg").write_text(timeline(plain, plan))
    (HERE / "graph.svg").write_text(hull(block(3)))


if __name__ == "__main__":
    main()
