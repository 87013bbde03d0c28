"""README stays short, names what people search for, and claims nothing that no test and no result backs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The text under a heading of the second level."""
    return README.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def table(text: str) -> list[list[str]]:
    """The rows of the first table in a text, without its head."""
    lines = re.findall(r"^\| (.*) \|$", text, re.MULTILINE)
    return [line.split(" | ") for line in lines[1:]]


def test_it_is_short() -> None:
    assert len(README.split()) <= 700


@pytest.mark.parametrize(
    "words",
    ["activation checkpointing", "gradient checkpointing", "rematerialization", "memory budget", "PyTorch"],
)
def test_the_first_sentence_has_the_words_that_people_search_for(words: str) -> None:
    first = " ".join(README.split("\n## ", 1)[0].split())
    assert words in first


def test_the_sections_are_in_order() -> None:
    titles = re.findall(r"^## (.*)$", README, re.MULTILINE)
    assert titles == [
        "Install",
        "Fit a transformers model",
        "Figures",
        "Two commands",
        "Works with",
        "Limits",
        "More",
    ]


ROWS = table(section("Works with"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_works_has_a_test(row: list[str]) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", row[2])
    assert named, row[0]
    for name in named:
        assert (ROOT / name).is_file(), name
        assert re.search(r"^\s*def test_", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE), name


def test_every_figure_is_in_the_results() -> None:
    files = ("llama_h200_202611.md", "compiled_h200_202611.md")
    results = "\n".join(
        (ROOT / "benchmarks" / "results" / file).read_text(encoding="utf-8") for file in files
    )
    rows = table(section("Figures"))
    assert rows
    for budget, baseline, baseline_ms, recoup_ms in rows:
        wanted = rf"^\| {budget} \| {baseline} \| {baseline_ms} \([\d.]+\) \| {recoup_ms} \([\d.]+\) \|"
        assert re.search(wanted, results, re.MULTILINE), (budget, baseline_ms, recoup_ms)


def test_the_gain_of_plans_by_size_is_in_the_results() -> None:
    (shown, file) = re.findall(r"trained\s+\[([\d.]+) % faster\]\(([\w/.]+)\) than under one plan", README)[0]
    results = (ROOT / file).read_text(encoding="utf-8")
    row = next(line for line in results.splitlines() if line.startswith("| one plan for the longest |"))
    assert f"| +{shown} % |" in row


def test_there_are_five_limits() -> None:
    assert len(re.findall(r"^- ", section("Limits"), re.MULTILINE)) == 5


def test_the_two_commands_exist() -> None:
    targets = re.findall(r"^make (\w+) ", section("Two commands"), re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets == ["demo", "test"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_extra_that_is_named_exists() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for extra in re.findall(
            r"""pip install ['"](?:\.|recoup)\[(\w+)\]""", page.read_text(encoding="utf-8")
        ):
            assert re.search(rf"^{extra} = \[", pyproject, re.MULTILINE), f"{page.name}: {extra}"
