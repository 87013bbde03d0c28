"""Draws the pictures of ``docs/algorithms``: a schedule over time, and its memory below, as plain SVG.

Run it with ``python docs/draw_schedules.py``; the pictures only change if the solvers do.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from recoup.planning import Backward, Forward, Problem, Schedule, Unit, plan, revolve, simulate
from recoup.planning.solvers.baselines import keep_all

FOLDER = Path(__file__).resolve().parent / "algorithms"
WIDTH, LEFT, RIGHT, ROW, MEMORY = 860, 70, 20, 18, 150
COLOURS = {"forward": "#4c78a8", "again": "#f58518", "backward": "#54a24b", "replay": "#f58518"}


def five_blocks() -> Problem:
    """The chain of the pictures: five unequal blocks."""
    sizes = [(1.0, 30, 4), (2.0, 10, 6), (3.0, 50, 2), (4.0, 20, 5), (1.0, 5, 1)]
    units = [
        Unit.keep_or_recompute(f"u{i}", forward_s=f, backward_s=2 * f, held_bytes=held, output_bytes=out)
        for i, (f, held, out) in enumerate(sizes)
    ]
    return Problem(units, input_bytes=3)


def steps(num_steps: int) -> Problem:
    """Equal time steps with a large record."""
    units = [
        Unit.keep_or_recompute(f"s{i}", forward_s=1.0, backward_s=2.0, held_bytes=20, output_bytes=4)
        for i in range(num_steps)
    ]
    return Problem(units, input_bytes=4)


def spans(problem: Problem, schedule: Schedule) -> list[tuple[int, str, float, float]]:
    """Unit, kind, start and end of everything that is computed."""
    timeline, seen = simulate(problem, schedule).timeline, set()
    found = []
    actions = schedule.actions
    for moment, following in pairwise(timeline):
        if moment.phase not in ("forward", "replay", "backward"):
            continue
        action = actions[moment.action]
        kind = moment.phase
        if isinstance(action, Forward):
            kind = "again" if action.unit in seen else "forward"
            seen.add(action.unit)
        assert isinstance(action, (Forward, Backward))
        found.append((action.unit, kind, moment.time_s, following.time_s))
    return found


def text(x: float, y: float, content: str, *, anchor: str = "start", size: int = 11) -> str:
    """A label."""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{content}</text>'


def draw(name: str, problem: Problem, schedule: Schedule, *, budget: int | None, title: str) -> None:
    """Writes one picture."""
    result = simulate(problem, schedule)
    top = max(result.peak_bytes, budget or 0) * 1.08
    num_units = problem.num_units
    base = 40 + num_units * ROW
    height = base + 30 + MEMORY + 30

    def across(time_s: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * time_s / result.seconds

    def up(num_bytes: float) -> float:
        return base + 30 + MEMORY * (1 - num_bytes / top)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        text(LEFT, 18, title, size=13),
    ]
    for unit in range(num_units):
        parts.append(text(LEFT - 8, 40 + unit * ROW + 12, problem.units[unit].name, anchor="end"))
    for unit, kind, start_s, end_s in spans(problem, schedule):
        x, width = across(start_s), max(across(end_s) - across(start_s) - 0.6, 0.6)
        box = f'x="{x:.1f}" y="{40 + unit * ROW}" width="{width:.1f}" height="{ROW - 3}"'
        parts.append(f'<rect {box} fill="{COLOURS[kind]}"/>')
    points = [(across(0.0), up(0))]
    for moment, following in zip(result.timeline, [*result.timeline[1:], None], strict=True):
        end_s = following.time_s if following else result.seconds
        points += [(across(moment.time_s), up(moment.num_bytes)), (across(end_s), up(moment.num_bytes))]
    points.append((across(result.seconds), up(0)))
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts.append(f'<polygon points="{path}" fill="#c6dbef" stroke="#3182bd" stroke-width="1"/>')
    if budget is not None:
        y = up(budget)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d62728"/>')
        parts.append(text(WIDTH - RIGHT, y - 4, f"budget {budget} bytes", anchor="end"))
    parts += [
        text(LEFT - 8, up(result.peak_bytes) + 4, str(result.peak_bytes), anchor="end"),
        text(LEFT - 8, up(0), "0", anchor="end"),
        text(LEFT, height - 10, "0 s"),
        text(WIDTH - RIGHT, height - 10, f"{result.seconds:g} s", anchor="end"),
        text(
            WIDTH / 2, height - 10, "blue: forward, orange: forward again, green: backward", anchor="middle"
        ),
        "</svg>",
    ]
    (FOLDER / f"{name}.svg").write_text("\n".join(parts) + "\n", encoding="utf-8")


def main() -> None:
    """Draws all pictures."""
    blocks = five_blocks()
    draw("simulate", blocks, keep_all(blocks), budget=None, title="Five blocks, everything kept")
    draw("chain", blocks, plan(blocks, 70).schedule, budget=70, title="The same five blocks in 70 bytes")
    draw("revolve", steps(10), revolve(10, num_slots=3), budget=None, title="Ten equal steps, three slots")


if __name__ == "__main__":
    main()
