"""Draws schedules over time with their memory below: the pictures of ``docs/algorithms`` and of the landing page.

Run it with ``python docs/draw_schedules.py``; the pictures only change if the solvers do. The landing page's decoder
is read from ``decoder.json``, which ``python docs/draw_schedules.py --measure`` makes: a Llama-style decoder of six
blocks with 4 x 2048 tokens in bfloat16; bytes are counted, seconds estimated for an H200.
"""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

from drawing import DOCS, GIB, LEFT, MIB, RIGHT, WIDTH, Axis, Picture, write

from recoup.planning import (
    Fetch,
    Link,
    Option,
    Problem,
    Schedule,
    Send,
    Unit,
    Value,
    from_json,
    plan,
    revolve,
    simulate,
    to_json,
)
from recoup.planning.solvers.baselines import keep_all
from recoup.planning.solvers.select import solve_select
from recoup.planning.solvers.spill import solve_spill
from recoup.report.chart import Curve
from recoup.report.memory_picture import moments_of, replays_in_backward

ROW, MEMORY, HEAD, FOOT = 18, 132, 30, 46
DECODER = DOCS / "decoder.json"
COLOURS = {
    "forward": "blue",
    "replay": "orange",
    "backward": "green",
    "send": "purple",
    "fetch": "brown",
}
MEANINGS = {"blue": "forward", "orange": "recompute", "green": "backward", "area": "memory in use"}
MOVES = {"purple": "to the CPU", "brown": "back"}


class Shown(NamedTuple):
    """One schedule of a picture."""

    title: str
    schedule: Schedule
    budget: int | None = None


class Span(NamedTuple):
    """Something that takes time."""

    unit: int
    kind: str
    start_s: float
    end_s: float


def five_blocks() -> Problem:
    """The chain of simulate.md and chain.md: five unequal blocks."""
    sizes = [(1, 30, 4), (2, 10, 6), (3, 50, 2), (4, 20, 5), (1, 5, 1)]
    units = [
        Unit.keep_or_recompute(
            f"u{i}",
            forward_s=ms / 1e3,
            backward_s=2 * ms / 1e3,
            held_bytes=held * MIB,
            output_bytes=out * MIB,
        )
        for i, (ms, held, out) in enumerate(sizes)
    ]
    return Problem(units, input_bytes=3 * MIB)


def steps(num_steps: int) -> Problem:
    """Equal time steps with a large record."""
    units = [
        Unit.keep_or_recompute(
            f"step {i}", forward_s=1e-3, backward_s=2e-3, held_bytes=20 * MIB, output_bytes=4 * MIB
        )
        for i in range(num_steps)
    ]
    return Problem(units, input_bytes=4 * MIB)


def small_unet() -> Problem:
    """The example of select.md."""
    sizes = [("down1", 2, 90, 40), ("down2", 3, 50, 20), ("middle", 4, 30, 10), ("up2", 3, 60, 20)]
    sizes.append(("up1", 2, 100, 40))
    skips = {"up2": [1], "up1": [0]}
    units = []
    for name, ms, held, output in sizes:
        forward_s, half = ms / 1e3, held * MIB // 2
        options = [
            Option("keep", forward_s=forward_s, backward_s=2 * forward_s, held_bytes=held * MIB),
            Option(
                "half",
                forward_s=forward_s,
                backward_s=2 * forward_s,
                extra_s=forward_s / 4,
                held_bytes=half,
                replay_transient_bytes=half,
                backward_transient_bytes=half,
            ),
        ]
        units.append(Unit(name, options, output_bytes=output * MIB, skips=skips.get(name, [])))
    return Problem(units, input_bytes=10 * MIB)


def six_blocks() -> Problem:
    """The example of spill.md."""
    keep = Option("keep", forward_s=2e-3, backward_s=4e-3, held_bytes=60 * MIB, held_links=("host",))
    units = [Unit(f"block{i}", [keep], output_bytes=10 * MIB) for i in range(6)]
    speed = 20 * MIB / 1e-3
    return Problem(units, links=[Link("host", send_bytes_per_s=speed, fetch_bytes_per_s=speed)])


def decoder() -> Problem:
    """The landing page's: a Llama-style decoder of six blocks."""
    problem = from_json(DECODER.read_text(encoding="utf-8"))
    assert isinstance(problem, Problem)
    return problem


def measure_decoder() -> None:
    """Writes the decoder's numbers."""
    import torch

    import recoup

    sys.path.append(str(DOCS.parent / "benchmarks"))
    from models import Llama

    with torch.device("meta"):
        model, tokens = Llama(num_layers=6).to(torch.bfloat16), torch.empty((4, 2048), dtype=torch.long)
    profile = recoup.measure(model, tokens, hardware="H200")
    DECODER.write_text(to_json(profile.problem, indent=1) + "\n", encoding="utf-8")


def computed(problem: Problem, schedule: Schedule) -> list[Span]:
    """Everything that is computed."""
    simulation = simulate(problem, schedule)
    moments = moments_of(simulation, replay_s=replays_in_backward(problem, schedule))
    shown = Curve([moment for moment in moments if moment.phase not in ("sent", "fetch")], simulation.seconds)
    pairs = zip(shown.points, shown.stretches(), strict=True)
    spans = [Span(moment.unit, moment.phase, start, end) for moment, (start, end, _) in pairs]
    return [span for span in spans if span.kind in COLOURS]


def moved(problem: Problem, schedule: Schedule) -> list[Span]:
    """Every move, by the queues' own rule."""
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
        found.append(Span(action.unit, kind, start_s, free_s[kind]))
    return found


class Panel:
    """One schedule over time, its memory below; the panels of a picture share their axes."""

    def __init__(self, picture: Picture, problem: Problem, top: float, time: Axis, most_bytes: float) -> None:
        self.picture, self.problem, self.top, self.time = picture, problem, top, time
        # Rows for what takes no time would be empty.
        self.rows = {
            index: row
            for row, index in enumerate(
                i for i, unit in enumerate(problem.units) if unit.options[0].total_s > time.high / 1e3 / 300
            )
        }
        unit_bytes, self.unit = (GIB, "GiB") if most_bytes >= GIB else (MIB, "MiB")
        self.unit_bytes = unit_bytes
        floor = top + HEAD + len(self.rows) * ROW + 16 + MEMORY
        self.memory = Axis(floor, floor - MEMORY, 0, most_bytes / unit_bytes * 1.06)

    @staticmethod
    def height(num_rows: int) -> float:
        """Of a panel with so many rows."""
        return HEAD + num_rows * ROW + 16 + MEMORY + FOOT

    def up(self, num_bytes: float) -> float:
        """Where bytes are drawn."""
        return self.memory.at(num_bytes / self.unit_bytes)

    def across(self, time_s: float) -> float:
        """Where a time is drawn."""
        return self.time.at(time_s * 1e3)

    def draw(self, shown: Shown) -> None:
        """Rows of what runs, and the memory."""
        picture, result = self.picture, simulate(self.problem, shown.schedule)
        peak = f"{result.peak_bytes / self.unit_bytes:.3g} {self.unit}"
        picture.text(LEFT, self.top + 16, shown.title, kind="title")
        picture.text(
            WIDTH - RIGHT, self.top + 16, f"{result.seconds * 1e3:.3g} ms, peak {peak}", anchor="end"
        )
        first = self.top + HEAD
        for index, row in self.rows.items():
            name = self.problem.units[index].name
            picture.text(LEFT - 9, first + row * ROW + 13, name, anchor="end", kind="soft")
        for spans, height, drop in (
            (computed(self.problem, shown.schedule), ROW - 4, 1),
            (moved(self.problem, shown.schedule), 5, 5),
        ):
            for span in spans:
                if span.unit in self.rows:
                    x, end = self.across(span.start_s), self.across(span.end_s)
                    y = first + self.rows[span.unit] * ROW + drop
                    picture.box(x, y, max(end - x - 0.8, 0.8), height, COLOURS[span.kind])
        self._memory(shown)

    def _memory(self, shown: Shown) -> None:
        picture, result = self.picture, simulate(self.problem, shown.schedule)
        picture.y_axis(self.memory, LEFT, self.unit, right=WIDTH - RIGHT, most=4)
        points = [(self.across(0.0), self.memory.start)]
        for start_s, end_s, num_bytes in Curve(moments_of(result), result.seconds).stretches():
            height = self.up(num_bytes)
            points += [(self.across(start_s), height), (self.across(end_s), height)]
        points.append((self.across(result.seconds), self.memory.start))
        picture.path(points, "blue", fill="area")
        picture.x_axis(self.time, self.memory.start, "ms")
        if shown.budget is not None:
            words = f"budget {shown.budget / self.unit_bytes:.3g} {self.unit}"
            picture.limit(self.up(shown.budget), words)


def draw(problem: Problem, shown: list[Shown]) -> str:
    """Panels one below the other, on the same axes."""
    results = [simulate(problem, each.schedule) for each in shown]
    longest_s = max(result.seconds for result in results)
    most_bytes = max(*(result.peak_bytes for result in results), *(each.budget or 0 for each in shown))
    time = Axis(LEFT, WIDTH - RIGHT - 30, 0.0, longest_s * 1e3)
    probe = Panel(Picture(0, ""), problem, 0, time, most_bytes)
    height = Panel.height(len(probe.rows))
    picture = Picture(height * len(shown) + 34, "; ".join(each.title for each in shown))
    for index, each in enumerate(shown):
        Panel(picture, problem, 8 + index * height, time, most_bytes).draw(each)
    picture.legend(LEFT, picture.height - 14, MEANINGS | (MOVES if problem.links else {}))
    return picture.svg()


def pictures() -> dict[str, str]:
    """All pictures by their names."""
    blocks, unet, linked, landing = five_blocks(), small_unet(), six_blocks(), decoder()
    chain_budget, unet_budget, linked_budget, budget = 70 * MIB, 400 * MIB, 250 * MIB, 5 * GIB
    return {
        "algorithms/simulate.svg": draw(blocks, [Shown("Five blocks, everything kept", keep_all(blocks))]),
        "algorithms/chain.svg": draw(
            blocks,
            [Shown("The same five blocks within 70 MiB", plan(blocks, chain_budget).schedule, chain_budget)],
        ),
        "algorithms/revolve.svg": draw(
            steps(10), [Shown("Ten equal steps, three slots", revolve(10, num_slots=3))]
        ),
        "algorithms/select.svg": draw(
            unet,
            [Shown("A small U-Net", solve_select(unet, budget_bytes=unet_budget).schedule, unet_budget)],
        ),
        "algorithms/spill.svg": draw(
            linked,
            [
                Shown(
                    "Six blocks and a link",
                    solve_spill(linked, budget_bytes=linked_budget).schedule,
                    linked_budget,
                )
            ],
        ),
        "schedule.svg": draw(
            landing,
            [
                Shown("A decoder of six blocks, plain step", keep_all(landing)),
                Shown("The same step within 5 GiB", plan(landing, budget).schedule, budget),
            ],
        ),
    }


def main() -> None:
    """Draws all pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true", help="estimate the decoder anew")
    if parser.parse_args().measure:
        measure_decoder()
    write(pictures())


if __name__ == "__main__":
    main()
