"""What all pictures of the documentation share: size, type, colours for light and dark pages, axes with ticks.

A script beside this file makes each picture: it has ``pictures()``, the text of every file by name, and writes them
when run. ``tests/test_drawings.py`` draws them again and compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path

from recoup.report.chart import Axis, round_values

__all__ = ["DOCS", "GIB", "LEFT", "MIB", "RIGHT", "WIDTH", "Axis", "Picture", "write"]

DOCS = Path(__file__).resolve().parent
MIB, GIB = 2**20, 2**30
WIDTH, LEFT, RIGHT = 760, 88, 20
_STYLE = """
text { font: 15px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: var(--ink); }
.title { font-weight: 600; font-size: 16px; }
.soft { fill: var(--soft); }
.limit { fill: var(--red); }
svg {
  --page: #ffffff; --ink: #1f2430; --soft: #5b6472; --grid: #e3e6eb; --axis: #8a93a1;
  --blue: #3a6ea5; --orange: #d9730d; --green: #3d8f47; --purple: #9159a8; --brown: #8c6450; --red: #c22f36;
  --grey: #8b929c; --area: #cfe0f2;
}
@media (prefers-color-scheme: dark) {
  svg {
    --page: #1c2128; --ink: #e6e9ef; --soft: #a7b0be; --grid: #343b46; --axis: #6c7685;
    --blue: #6ea8e0; --orange: #f0974a; --green: #6cbf76; --purple: #c592d8; --brown: #c49a80; --red: #ff7b80;
    --grey: #a3abb7; --area: #2b4460;
  }
}
"""


class Picture:
    """Shapes from the back to the front. Colours are names: what they are depends on the page."""

    def __init__(self, height: float, title: str, *, description: str = "") -> None:
        self.height = round(height)
        self._parts = [f"<title>{escape(title)}</title>"]
        if description:
            self._parts.append(f"<desc>{escape(description)}</desc>")
        self.box(0, 0, WIDTH, self.height, "page", round_px=8)

    def text(self, x: float, y: float, words: str, *, anchor: str = "start", kind: str = "") -> None:
        """Words at a place; of a kind: title, soft, limit."""
        style = f' class="{kind}"' if kind else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(words)}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        colour: str,
        *,
        outline: str = "",
        round_px: float = 0,
    ) -> None:
        """A filled rectangle."""
        more = f' stroke="var(--{outline})"' if outline else ""
        more += f' rx="{round_px:g}"' if round_px else ""
        size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self._parts.append(f'<rect {size} fill="var(--{colour})"{more}/>')

    def line(self, ends: tuple[float, float, float, float], colour: str, *, dashed: bool = False) -> None:
        """From one point to another: x, y, x, y."""
        x1, y1, x2, y2 = (f"{each:.1f}" for each in ends)
        more = ' stroke-dasharray="6 4"' if dashed else ""
        self._parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="var(--{colour})"{more}/>')

    def path(
        self, points: Iterable[tuple[float, float]], colour: str, *, fill: str = "", width: float = 1
    ) -> None:
        """Joined points; filled, they are an area."""
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        kind, inside = ("polygon", f"var(--{fill})") if fill else ("polyline", "none")
        self._parts.append(
            f'<{kind} points="{places}" fill="{inside}" stroke="var(--{colour})" stroke-width="{width:g}"/>'
        )

    def dot(self, x: float, y: float, radius: float, colour: str, what: str = "") -> None:
        """A point, and what it stands for: shown where one points at it."""
        shape = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="var(--{colour})"'
        self._parts.append(f"{shape}><title>{escape(what)}</title></circle>" if what else f"{shape}/>")

    def x_axis(self, axis: Axis, y: float, unit: str, *, top: float | None = None, most: int = 11) -> None:
        """Ticks below, with a grid up to ``top``; the last is followed by the unit."""
        marks = round_values(axis.low, axis.high, most=most)
        for mark in marks:
            x = axis.at(mark)
            if top is not None:
                self.line((x, top, x, y), "grid")
            self.line((x, y, x, y + 5), "axis")
            words = f"{mark:g} {unit}" if mark == marks[-1] else f"{mark:g}"
            self.text(x, y + 20, words, anchor="middle", kind="soft")
        self.line((axis.start, y, axis.end, y), "axis")

    def y_axis(self, axis: Axis, x: float, unit: str, *, right: float, most: int = 6) -> None:
        """Ticks on the left, with a grid up to ``right``; the highest has the unit."""
        marks = round_values(axis.low, axis.high, most=most)
        for mark in marks:
            y = axis.at(mark)
            self.line((x, y, right, y), "grid")
            self.line((x - 5, y, x, y), "axis")
            words = f"{mark:g} {unit}" if mark == marks[-1] else f"{mark:g}"
            self.text(x - 9, y + 5, words, anchor="end", kind="soft")
        self.line((x, axis.start, x, axis.end), "axis")

    def limit(self, y: float, words: str) -> None:
        """A budget."""
        self.line((LEFT, y, WIDTH - RIGHT, y), "red", dashed=True)
        self.text(WIDTH - RIGHT, y - 6, words, anchor="end", kind="limit")

    def legend(self, x: float, y: float, meanings: Mapping[str, str]) -> None:
        """What the colours mean, in a row."""
        for colour, words in meanings.items():
            self.box(x, y - 11, 12, 12, colour, round_px=2)
            self.text(x + 18, y, words)
            x += 44 + 8 * len(words)

    def svg(self) -> str:
        """The picture as a file's text."""
        size = f'viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" height="{self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
        return "\n".join([head, f"<style>{_STYLE}</style>", *self._parts, "</svg>"]) + "\n"


def write(pictures: Mapping[str, str]) -> None:
    """Writes pictures by their names below ``docs``."""
    for name, text in pictures.items():
        (DOCS / name).write_text(text, encoding="utf-8")
