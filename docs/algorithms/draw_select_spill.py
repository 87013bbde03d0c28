"""Draws the pictures of ``select.md`` and ``spill.md``: a schedule over time, its moves, and its memory.

Plain SVG, so it needs nothing: ``python docs/algorithms/draw_select_spill.py``.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from recoup.planning import Fetch, Forward, Link, Option, Problem, Schedule, Send, Unit, Value, simulate
from recoup.planning.solvers.select import solve_select
from recoup.planning.solvers.spill import solve_spill

FOLDER = Path(__file__).resolve().parent
WIDTH, LEFT, RIGHT, ROW, MEMORY = 860, 70, 20, 18, 150
COLOURS = {
    "forward": "#4c78a8",
    "again": "#f58518",
    "replay": "#f58518",
    "backward": "#54a24b",
    "send": "#b279a2",
    "fetch": "#9d755d",
}
Span = tuple[int, str, float, float]


def small_unet() -> Problem:
    """The example of select.md."""
    sizes = [("down1", 2, 90, 40), ("down2", 3, 50, 20), ("middle", 4, 30, 10), ("up2", 3, 60, 20)]
    sizes.append(("up1", 2, 100, 40))
    skips = {"up2": [1], "up1": [0]}
    units = []
    for name, forward_s, held, output in sizes:
        options = [
            Option("keep", forward_s=forward_s, backward_s=2 * forward_s, held_bytes=held),
            Option(
                "half",
                forward_s=forward_s,
                backward_s=2 * forward_s,
                extra_s=forward_s / 4,
                held_bytes=held // 2,
                replay_transient_bytes=held // 2,
                backward_transient_bytes=held // 2,
            ),
        ]
        units.append(Unit(name, options, output_bytes=output, skips=skips.get(name, [])))
    return Problem(units, input_bytes=10)


def six_blocks() -> Problem:
    """The example of spill.md."""
    keep = Option("keep", forward_s=2, backward_s=4, held_bytes=60, held_links=("host",))
    units = [Unit(f"block{i}", [keep], output_bytes=10) for i in range(6)]
    return Problem(units, links=[Link("host", send_bytes_per_s=20.0, fetch_bytes_per_s=20.0)])


def compute_spans(problem: Problem, schedule: Schedule) -> list[Span]:
    """Unit, kind, start and end of everything that is computed."""
    seen: set[int] = set()
    found = []
    for moment, following in pairwise(
        m for m in simulate(problem, schedule).timeline if m.phase not in ("sent", "fetch")
    ):
        if moment.phase in ("forward", "replay", "backward"):
            action = schedule.actions[moment.action]
            kind = "again" if isinstance(action, Forward) and action.unit in seen else moment.phase
            seen.update([action.unit] if isinstance(action, Forward) else [])
            found.append((moment.unit, kind, moment.time_s, following.time_s))
    return found


def move_spans(problem: Problem, schedule: Schedule) -> list[Span]:
    """Unit, direction, start and end of every move, by the queues' own rule."""
    free_s = {"send": 0.0, "fetch": 0.0}
    ends_s: dict[int, float] = {}
    found, clock_s = [], 0.0
    ended = {m.action: m.time_s for m in simulate(problem, schedule).timeline if m.phase == "after"}
    for index, action in enumerate(schedule.actions):
        clock_s = max(clock_s, ended.get(index, 0.0))
        if not isinstance(action, (Send, Fetch)):
            continue
        kind = "send" if isinstance(action, Send) else "fetch"
        link = problem.link(action.link)
        speed = link.send_bytes_per_s if kind == "send" else link.fetch_bytes_per_s
        unit = problem.units[action.unit]
        num_bytes = unit.options[0].held_bytes if action.value is Value.HELD else unit.output_bytes
        start_s = max(clock_s, free_s[kind], ends_s.get(action.unit, 0.0))
        free_s[kind] = ends_s[action.unit] = start_s + num_bytes / speed
        found.append((action.unit, kind, start_s, free_s[kind]))
    return found


def text(x: float, y: float, content: str, *, anchor: str = "start", size: int = 11) -> str:
    """A label."""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{content}</text>'


def draw(name: str, problem: Problem, schedule: Schedule, *, budget: int, title: str) -> None:
    """Writes one picture."""
    result = simulate(problem, schedule)
    base, height = 40 + problem.num_units * ROW, 40 + problem.num_units * ROW + MEMORY + 60

    def across(time_s: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * time_s / result.seconds

    def up(num_bytes: float) -> float:
        return base + 30 + MEMORY * (1 - num_bytes / (budget * 1.1))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        text(LEFT, 18, title, size=13),
    ]
    for unit in range(problem.num_units):
        parts.append(text(LEFT - 8, 40 + unit * ROW + 12, problem.units[unit].name, anchor="end"))
    for spans, tall, drop in (
        (compute_spans(problem, schedule), ROW - 3, 0),
        (move_spans(problem, schedule), 5, 5),
    ):
        for unit, kind, start_s, end_s in spans:
            x, wide = across(start_s), max(across(end_s) - across(start_s) - 0.6, 0.6)
            box = f'x="{x:.1f}" y="{40 + unit * ROW + drop}" width="{wide:.1f}" height="{tall}"'
            parts.append(f'<rect {box} fill="{COLOURS[kind]}"/>')
    points = [(across(0.0), up(0))]
    for moment, following in zip(result.timeline, [*result.timeline[1:], None], strict=True):
        end_s = following.time_s if following else result.seconds
        points += [(across(moment.time_s), up(moment.num_bytes)), (across(end_s), up(moment.num_bytes))]
    points.append((across(result.seconds), up(0)))
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts.append(f'<polygon points="{path}" fill="#c6dbef" stroke="#3182bd" stroke-width="1"/>')
    line = f'x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(budget):.1f}" y2="{up(budget):.1f}"'
    legend = "blue: forward, orange: forward or part of it again, green: backward"
    if problem.links:
        legend += "; thin: on the way out (purple) and back (brown)"
    parts += [
        f'<line {line} stroke="#d62728"/>',
        text(WIDTH - RIGHT, up(budget) - 4, f"budget {budget} bytes", anchor="end"),
        text(LEFT - 8, up(0), "0", anchor="end"),
        text(LEFT, height - 10, "0 s"),
        text(WIDTH - RIGHT, height - 10, f"{result.seconds:g} s", anchor="end"),
        text(WIDTH / 2, height - 10, legend, anchor="middle"),
        "</svg>",
    ]
    (FOLDER / f"{name}.svg").write_text("\n".join(parts) + "\n", encoding="utf-8")


def main() -> None:
    """Draws both pictures."""
    unet, blocks = small_unet(), six_blocks()
    draw("select", unet, solve_select(unet, budget_bytes=400).schedule, budget=400, title="A small U-Net")
    draw(
        "spill",
        blocks,
        solve_spill(blocks, budget_bytes=250).schedule,
        budget=250,
        title="Six blocks, a link",
    )


if __name__ == "__main__":
    main()
