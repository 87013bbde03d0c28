"""Draws the README's picture: step time against activation memory, hand-made recipes and `recoup.fit`.

Run it with ``python docs/draw_frontier.py``; it reads ``benchmarks/results/llama_h200_*.md``, which
``python benchmarks/llama.py`` writes on a GPU.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 400, 64, 24, 46, 52
OURS, THEIRS, SELECTIVE = "#2563a8", "#9a9a9a", "#c2671f"
Point = tuple[float, float]


def read(path: Path) -> tuple[list[Point], list[Point], list[Point]]:
    """Activation GiB and milliseconds: checkpoints on k blocks, the selective checkpoint, and ours."""
    blocks, selective, ours = [], [], []
    for line in path.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0].startswith("checkpoint on"):
            blocks.append((float(cells[2]), float(cells[1])))
        elif cells[0] == "selective checkpoint":
            selective.append((float(cells[2]), float(cells[1])))
        elif re.fullmatch(r"\d+\.\d+", cells[0]) and (found := re.match(r"([\d.]+) \(([\d.]+)\)", cells[3])):
            ours.append((float(found[2]), float(found[1])))
    return blocks, selective, sorted(ours)


def draw(blocks: list[Point], selective: list[Point], ours: list[Point]) -> str:
    """The picture as SVG."""
    points = [*blocks, *selective, *ours]
    high = max(gib for gib, _ in points) * 1.04
    low_ms, high_ms = min(ms for _, ms in points) - 4, max(ms for _, ms in points) + 4

    def at(point: Point) -> Point:
        x = LEFT + point[0] / high * (WIDTH - LEFT - RIGHT)
        y = TOP + (high_ms - point[1]) / (high_ms - low_ms) * (HEIGHT - TOP - BOTTOM)
        return x, y

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        label(
            LEFT,
            24,
            "Llama-style decoder, 1.1 B parameters, one H200, eager: time of a step against memory",
            15,
        ),
    ]
    for gib in range(0, int(high) + 1, 2):
        x, _ = at((gib, low_ms))
        lines.append(f'<line x1="{x:.0f}" x2="{x:.0f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#ececec"/>')
        lines.append(label(x, HEIGHT - BOTTOM + 18, str(gib), 12, "middle"))
    for ms in range(int(low_ms / 10 + 1) * 10, int(high_ms) + 1, 10):
        _, y = at((0, ms))
        lines.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.0f}" y2="{y:.0f}" stroke="#ececec"/>')
        lines.append(label(LEFT - 8, y + 4, str(ms), 12, "end"))
    lines.append(label((LEFT + WIDTH) / 2, HEIGHT - 12, "activation memory at the peak, GiB", 13, "middle"))
    lines.append(label(8, TOP - 8, "ms", 13))
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, ours))
    lines.append(f'<polyline points="{path}" fill="none" stroke="{OURS}" stroke-width="2"/>')
    for kind, colour, radius in ((blocks, THEIRS, 4), (selective, SELECTIVE, 5), (ours, OURS, 4.5)):
        lines += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"/>' for x, y in map(at, kind)
        ]
    legend = (
        ("recoup.fit", OURS),
        ("torch checkpoint on k of 16 blocks", THEIRS),
        ("torch selective checkpoint", SELECTIVE),
    )
    for index, (text, colour) in enumerate(legend):
        x, y = WIDTH - RIGHT - 262, TOP + 20 + 22 * index
        lines += [f'<circle cx="{x}" cy="{y}" r="5" fill="{colour}"/>', label(x + 12, y + 4, text, 13)]
    return "\n".join([*lines, "</svg>", ""])


def label(x: float, y: float, text: str, size: int, anchor: str = "start") -> str:
    """A piece of text."""
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" text-anchor="{anchor}" fill="#333333">{text}</text>'


def main() -> None:
    """Draws the newest results."""
    newest = sorted((DOCS.parent / "benchmarks" / "results").glob("llama_h200_*.md"))[-1]
    (DOCS / "frontier.svg").write_text(draw(*read(newest)))


if __name__ == "__main__":
    main()
