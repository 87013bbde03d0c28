"""The pictures of the documentation: what their scripts draw today, in one style, with the figures of the results."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).parent.parent / "docs"
SCRIPTS = ("draw_frontier", "draw_gathers", "draw_graphs", "draw_how_it_works", "draw_schedules")
PICTURES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    before = list(sys.path)
    sys.path.insert(0, str(DOCS))
    yield {name: importlib.import_module(name) for name in SCRIPTS}
    sys.path[:] = before


@pytest.fixture(scope="module")
def drawn(scripts: dict[str, ModuleType]) -> dict[str, str]:
    return {name: text for script in scripts.values() for name, text in script.pictures().items()}


def test_every_picture_has_a_script(drawn: dict[str, str]) -> None:
    assert sorted(drawn) == PICTURES


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_as_drawn_today(name: str, drawn: dict[str, str]) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == drawn[name], f"{name} is old: run its script in docs/"


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_can_be_read(name: str) -> None:
    """Type of 13 px or more, nothing outside the picture, colours for light and for dark pages."""
    text = (DOCS / name).read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    sizes = [int(size) for size in re.findall(r"(\d+)px", text)]
    assert min(sizes) >= 13, name
    assert "prefers-color-scheme: dark" in text
    coloured = {each.get(what, "none") for each in root.iter() for what in ("fill", "stroke")}
    assert all(value == "none" or re.fullmatch(r"var\(--\w+\)", value) for value in coloured), coloured
    _, _, width, height = map(float, root.get("viewBox", "").split())
    for each in root.iter(f"{SVG}text"):
        assert 0 <= float(each.get("x", "")) <= width, each.text
        assert 0 < float(each.get("y", "")) < height, each.text


def test_the_frontier_shows_its_results(scripts: dict[str, ModuleType]) -> None:
    """Every point says what it stands for; the results' tables say the same, and it is drawn where it belongs."""
    results = scripts["draw_frontier"].newest_results().read_text(encoding="utf-8")
    root = ElementTree.parse(DOCS / "frontier.svg").getroot()
    assert root is not None
    shown = {}
    for circle in root.iter(f"{SVG}circle"):
        match = re.fullmatch(r"(.+): ([\d.]+) ms, ([\d.]+) GiB", circle.findtext(f"{SVG}title") or "")
        assert match is not None
        place = (float(circle.get("cx", "")), float(circle.get("cy", "")))
        shown[match[1]] = (float(match[2]), float(match[3]), *place)
    wanted = {}
    for line in results.splitlines():
        if match := re.match(
            r"\| (checkpoint on [^|]+|selective checkpoint) \| ([\d.]+) \| ([\d.]+) \|", line
        ):
            wanted[match[1]] = (float(match[2]), float(match[3]))
        elif match := re.match(r"\| ([\d.]+) \| [^|]+ \| [^|]* \| ([\d.]+) \(([\d.]+)\) \|", line):
            wanted[f"recoup.fit at {match[1]} GiB"] = (float(match[2]), float(match[3]))
    compiled = scripts["draw_frontier"].newest_results("compiled").read_text(encoding="utf-8")
    for line in compiled.partition("\n## Compiled\n")[2].splitlines():
        figures = r"([\d.]+) \(([\d.]+)\)"
        if match := re.match(rf"\| ([\d.]+) \| ([^|]+) \| {figures} \| {figures} \|", line):
            wanted[f"{match[2]}, at {match[1]} GiB"] = (float(match[3]), float(match[4]))
            wanted[f"compiled recoup.fit at {match[1]} GiB"] = (float(match[5]), float(match[6]))
    assert {name: point[:2] for name, point in shown.items()} == wanted
    assert len(wanted) >= 20 + 16
    # Places are to one decimal: two points give the scale, all others must lie on it.
    for figure, place in ((0, 3), (1, 2)):
        points = sorted((point[figure], point[place]) for point in shown.values())
        (low, start), (high, end) = points[0], points[-1]
        for value, where in points:
            assert where == pytest.approx(start + (end - start) * (value - low) / (high - low), abs=0.11)


def test_the_report_is_a_small_picture() -> None:
    picture = (DOCS / "report.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(picture[16:20], "big") == 1200
    assert len(picture) < 200_000
