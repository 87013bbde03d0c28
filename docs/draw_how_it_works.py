"""Draws the pictures of ``docs/how_it_works.md`` as plain SVG, beside it.

Run it with ``python docs/draw_how_it_works.py``; the pictures only change if the solvers do.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from recoup.planning import (
    Backward,
    Forward,
    Problem,
    Schedule,
    Simulation,
    Unit,
    minimum_budget,
    plan,
    simulate,
)
from recoup.planning.solvers.baselines import keep_all

HERE = Path(__file__).resolve().parent
WIDTH, LEFT, RIGHT = 860, 84, 20
ROW, MEMORY, GAP = 16, 120, 26
COLOURS = {"forward": "#4c78a8", "again": "#f58518", "replay": "#f58518", "backward": "#54a24b"}
LEGEND = (("forward", "forward"), ("again", "forward again, or replay"), ("backward", "backward"))


def six_units() -> Problem:
    """The step of the page, in made-up numbers: an embedding, four unequal blocks, a head."""
    rows = [
        ("embed", 1, 4),
        ("block0", 3, 60),
        ("block1", 4, 70),
        ("block2", 3, 50),
        ("block3", 4, 70),
        ("head", 2, 40),
    ]
    units = [
        Unit.keep_or_recompute(
            name,
            forward_s=forward,
            backward_s=2 * forward,
            held_bytes=held,
            output_bytes=10,
            parameter_gradient_bytes=5,
        )
        for name, forward, held in rows
    ]
    return Problem(units, resident_bytes=60)


def text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 11, fill: str = "#222") -> str:
    """Words at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, *, more: str = "") -> str:
    """A filled rectangle."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"{more}/>'


def page(height: float, body: list[str]) -> str:
    """Wraps shapes into a picture."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif">'
    return "\n".join([head, box(0, 0, WIDTH, height, "white"), *body, "</svg>"]) + "\n"


def computed(schedule: Schedule, result: Simulation) -> list[tuple[int, str, float, float]]:
    """Unit, kind, start and end of everything that runs."""
    found, seen = [], set()
    for moment, following in pairwise(result.timeline):
        if moment.phase not in ("forward", "replay", "backward"):
            continue
        action, kind = schedule.actions[moment.action], moment.phase
        assert isinstance(action, (Forward, Backward))
        if isinstance(action, Forward):
            kind = "again" if action.unit in seen else "forward"
            seen.add(action.unit)
        found.append((action.unit, kind, moment.time_s, following.time_s))
    return found


class Panel:
    """One schedule over time, its memory below; several share their axes."""

    def __init__(self, top: float, longest_s: float, most_bytes: int) -> None:
        self.top, self.longest_s, self.most_bytes = top, longest_s, most_bytes * 1.05

    @staticmethod
    def height(num_units: int) -> float:
        """Of a panel with so many units."""
        return 24 + num_units * ROW + 12 + MEMORY + GAP

    def across(self, time_s: float) -> float:
        """From seconds to the picture."""
        return LEFT + (WIDTH - LEFT - RIGHT) * time_s / self.longest_s

    def draw(self, problem: Problem, schedule: Schedule, title: str, budget: int | None) -> list[str]:
        """Its shapes."""
        result = simulate(problem, schedule)
        rows = self.top + 24
        floor = rows + problem.num_units * ROW + 12 + MEMORY

        def up(num_bytes: float) -> float:
            return floor - MEMORY * num_bytes / self.most_bytes

        body = [text(LEFT, self.top + 14, title, size=13)]
        for index, unit in enumerate(problem.units):
            body.append(text(LEFT - 8, rows + index * ROW + 12, unit.name, anchor="end"))
        for index, kind, start_s, end_s in computed(schedule, result):
            x = self.across(start_s)
            width = max(self.across(end_s) - x - 0.8, 0.8)
            body.append(box(x, rows + index * ROW + 1, width, ROW - 3, COLOURS[kind]))
        points = [(self.across(0.0), floor)]
        for moment, following in zip(result.timeline, [*result.timeline[1:], None], strict=True):
            end_s = following.time_s if following else result.seconds
            points += [
                (self.across(moment.time_s), up(moment.num_bytes)),
                (self.across(end_s), up(moment.num_bytes)),
            ]
        points.append((self.across(result.seconds), floor))
        outline = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        body.append(f'<polygon points="{outline}" fill="#c6dbef" stroke="#3182bd"/>')
        if budget is not None:
            ends = f'x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(budget):.1f}" y2="{up(budget):.1f}"'
            body.append(f'<line {ends} stroke="#d62728" stroke-dasharray="5"/>')
            body.append(text(WIDTH - RIGHT, up(budget) - 4, f"budget {budget}", anchor="end", fill="#d62728"))
        body.append(text(LEFT - 8, up(result.peak_bytes) + 4, f"{result.peak_bytes} B", anchor="end"))
        body.append(text(self.across(result.seconds), floor + 14, f"{result.seconds:g} s", anchor="end"))
        return body


def legend(y: float) -> list[str]:
    """What the colours mean."""
    body, x = [], float(LEFT)
    for kind, words in LEGEND:
        body += [box(x, y - 9, 11, 11, COLOURS[kind]), text(x + 16, y, words)]
        x += 44 + 5 * len(words)
    return [*body, box(x, y - 9, 11, 11, "#c6dbef"), text(x + 16, y, "bytes that live")]


def schedules(name: str, problem: Problem, shown: list[tuple[str, Schedule, int | None]]) -> None:
    """Panels one below the other, on the same axes."""
    results = [simulate(problem, schedule) for _, schedule, _ in shown]
    longest_s = max(result.seconds for result in results)
    most_bytes = max(result.peak_bytes for result in results)
    height, body = Panel.height(problem.num_units), []
    for index, (title, schedule, budget) in enumerate(shown):
        body += Panel(10 + index * height, longest_s, most_bytes).draw(problem, schedule, title, budget)
    bottom = 10 + height * len(shown) + 14
    (HERE / f"{name}.svg").write_text(page(bottom + 12, [*body, *legend(bottom)]), encoding="utf-8")


def streaming() -> None:
    """A step as autograd sees it, and cut around its units."""
    names = ("embed", "block0", "block1", "block2", "head", "loss")
    step = (WIDTH - LEFT - RIGHT) / len(names)
    body = []
    for row, title in enumerate(
        ("A plain step: one graph, all that it saved lives", "Measured: cut around every unit")
    ):
        y = 40 + row * 120
        body.append(text(LEFT, y - 14, title, size=13))
        for index, name in enumerate(names):
            x = LEFT + index * step
            is_code = name == "loss"
            lives = row == 0 or index == 2
            outline = ' stroke="#4c78a8" rx="4"' + (' stroke-dasharray="3"' if is_code else "")
            body.append(box(x, y, step - 34, 30, "#c6dbef" if lives else "white", more=outline))
            body.append(text(x + (step - 34) / 2, y + 19, name, anchor="middle"))
            if index + 1 < len(names):
                middle = x + step - 17
                body.append(text(middle, y + 20, "&#8594;", anchor="middle", size=18))
                if row:
                    body.append(
                        f'<line x1="{middle:.1f}" x2="{middle:.1f}" y1="{y - 4}" y2="{y + 36}" stroke="#d62728"/>'
                    )
        if row:
            x = LEFT + 2 * step
            body.append(
                text(x, y + 50, "forward, backward, seconds, bytes; then it is let go", fill="#3182bd")
            )
    body.append(
        text(LEFT, 236, "filled: what it saved lives; red: detached arguments, outputs without history")
    )
    (HERE / "how_streaming.svg").write_text(page(250, body), encoding="utf-8")


def main() -> None:
    """Draws all pictures."""
    problem = six_units()
    within = plan(problem, 270)
    schedules(
        "how_schedule",
        problem,
        [
            ("Plain: everything kept", keep_all(problem), None),
            ("Planned within 270 bytes", within.schedule, 270),
        ],
    )
    smallest = minimum_budget(problem)
    tight = plan(problem, smallest)
    schedules("how_nested", problem, [(f"As few bytes as will do: {smallest}", tight.schedule, smallest)])
    streaming()


if __name__ == "__main__":
    main()
