"""Draws the README's picture: step time against activation memory, eager and compiled, by hand and by `recoup.fit`.

Run it with ``python docs/draw_frontier.py``; it reads the newest ``benchmarks/results/llama_h200_*.md`` and
``compiled_h200_*.md``, which ``python benchmarks/llama.py`` and ``compiled.py`` write on a GPU for the same model.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from drawing import DOCS, LEFT, RIGHT, WIDTH, Axis, Picture, write

TOP, FLOOR, HEIGHT = 70, 394, 488


class Point(NamedTuple):
    """A way to run the step."""

    name: str
    gib: float
    ms: float

    @property
    def what(self) -> str:
        """As the picture says it where one points."""
        return f"{self.name}: {self.ms:g} ms, {self.gib:g} GiB"


def newest_results(name: str = "llama") -> Path:
    """What to draw."""
    return sorted((DOCS.parent / "benchmarks" / "results").glob(f"{name}_h200_*.md"))[-1]


def read(path: Path) -> dict[str, list[Point]]:
    """The points by colour: checkpoint on k blocks, the selective checkpoint, and ours."""
    found: dict[str, list[Point]] = {"grey": [], "orange": [], "blue": []}
    for line in path.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0].startswith("checkpoint on"):
            found["grey"].append(Point(cells[0], float(cells[2]), float(cells[1])))
        elif cells[0] == "selective checkpoint":
            found["orange"].append(Point(cells[0], float(cells[2]), float(cells[1])))
        elif re.fullmatch(r"\d+\.\d+", cells[0]) and (ours := re.match(r"([\d.]+) \(([\d.]+)\)", cells[3])):
            found["blue"].append(Point(f"recoup.fit at {cells[0]} GiB", float(ours[2]), float(ours[1])))
    return found


def read_compiled(path: Path) -> dict[str, list[Point]]:
    """The points of compiled code by colour: the fastest of torch's own settings that fits each budget, and ours."""
    found: dict[str, list[Point]] = {"purple": [], "green": []}
    text = path.read_text(encoding="utf-8")
    for line in text[text.index("## Compiled") :].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not re.fullmatch(r"\d+\.\d+", cells[0]):
            continue
        names = {
            "purple": f"{cells[1]}, at {cells[0]} GiB",
            "green": f"compiled recoup.fit at {cells[0]} GiB",
        }
        for (colour, name), figures in zip(names.items(), cells[2:4], strict=True):
            if match := re.match(r"([\d.]+) \(([\d.]+)\)", figures):
                found[colour].append(Point(name, float(match[2]), float(match[1])))
    return found


def draw(found: dict[str, list[Point]]) -> str:
    """The picture as SVG."""
    points = [point for kind in found.values() for point in kind]
    low_ms, high_ms = min(p.ms for p in points) - 4, max(p.ms for p in points) + 4
    memory = Axis(LEFT, WIDTH - RIGHT - 20, 0, max(p.gib for p in points) * 1.04)
    time = Axis(FLOOR, TOP, low_ms, high_ms)
    picture = Picture(HEIGHT, "Step time against activation memory: recoup.fit and what torch has")
    picture.text(24, 26, "Llama-style decoder, 1.1 B parameters, one H200", kind="title")
    picture.text(24, 48, "time of a step against activation memory at its peak", kind="soft")
    picture.y_axis(time, LEFT, "ms", right=memory.end)
    picture.x_axis(memory, FLOOR, "GiB", top=TOP)
    for colour in ("blue", "green"):
        ours = sorted(found[colour], key=lambda point: point.gib)
        picture.path([(memory.at(p.gib), time.at(p.ms)) for p in ours], colour, width=2)
    for colour, kind in found.items():
        for point in kind:
            picture.dot(memory.at(point.gib), time.at(point.ms), 5, colour, point.what)
    picture.legend(
        24,
        HEIGHT - 40,
        {
            "blue": "recoup.fit",
            "grey": "torch checkpoint on k of 16 blocks",
            "orange": "torch selective checkpoint",
        },
    )
    picture.legend(
        24,
        HEIGHT - 14,
        {"green": "recoup.fit of compiled code", "purple": "fastest compiled setting of torch that fits"},
    )
    return picture.svg()


def pictures() -> dict[str, str]:
    """The picture by its name."""
    return {"frontier.svg": draw(read(newest_results()) | read_compiled(newest_results("compiled")))}


if __name__ == "__main__":
    write(pictures())
