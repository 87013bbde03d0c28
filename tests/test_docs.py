"""Every Python block in README and docs runs, one page in one namespace, and prints what the page says."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from slowly import slow_but

import recoup

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LONG = [
    ROOT / "docs" / name
    for name in (
        "howto/seventy_billion.md",
        "howto/peft.md",
        "howto/varying_batches.md",
        "howto/gans.md",
        "cli.md",
    )
]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    """accelerate's state is the process's, and Trainer makes it too: the next page starts afresh."""
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState, PartialState

        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


def _only_python(text: str) -> str:
    """A page with all lines blank that are not Python."""
    lines = [""] * (text.count("\n") + 1)
    for match in BLOCK.finditer(text):
        if match[1] == "python":
            first, block = text.count("\n", 0, match.start(2)), match[2].splitlines()
            lines[first : first + len(block)] = block
    return "\n".join(lines)


# What other libraries say of themselves, and of machines without an accelerator.
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*num_workers.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*less than the logging interval.*:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf.*:UserWarning")
@pytest.mark.parametrize(
    "page",
    slow_but([page for page in PAGES if page not in LONG], PAGES),
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_block_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    # Torch's compiler looks up a function's module by name, and reads the whole file: both have to be Python.
    module, file = ModuleType("docs"), tmp_path / "docs.py"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    file.write_text(_only_python(text), encoding="utf-8")
    previous = ""
    for match in BLOCK.finditer(text):
        kind, block = match.groups()
        if kind == "python":
            line = text.count("\n", 0, match.start(2))
            capsys.readouterr()
            exec(compile("\n" * line + block, str(file), "exec"), module.__dict__)
        elif kind == "text" and previous == "python":
            assert capsys.readouterr().out == block
        previous = kind


def test_links_and_pictures_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_anchors_lead_to_headings() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if "://" in target:
                continue
            text = (page.parent / target if target else page).read_text(encoding="utf-8")
            headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            known = {
                re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
            }
            assert anchor in known, f"{page.name}: {target}#{anchor}"


def test_every_error_has_an_entry() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^### (\w+)$", page, re.MULTILINE)) == recoup.errors.__all__


def test_the_comparison_has_every_row_of_the_results() -> None:
    """Budget, baseline, milliseconds and ratio: the page's table is the results' own."""
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    results = (ROOT / "benchmarks" / "results" / "llama_h200_202611.md").read_text(encoding="utf-8")
    measured = re.findall(
        r"^\| ([\d.]+) \| ([^|]+) \| ([\d.]+) \([\d.]+\) \| ([\d.]+) \([\d.]+\) \| ([\d.]+) \|",
        results,
        re.MULTILINE,
    )
    shown = re.findall(r"^\| ([\d.]+) \| ([^|]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert shown == measured
    assert shown


def test_the_comparison_shows_what_was_compiled() -> None:
    """Rows of the results' last table, as they stand there, once a run has written them."""
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    results = (ROOT / "benchmarks" / "results" / "llama_h200_202611.md").read_text(encoding="utf-8")
    section = page.split("\n## One decoder, compiled\n", 1)[1].split("\n## ", 1)[0]
    head = "| contender | ms | activations GiB | build s |\n"
    assert (head in section) == (head in results)
    shown = re.findall(r"^\| .* \|$", section, re.MULTILINE)
    assert set(shown) <= set(results.splitlines())


def test_rows_of_transformers_models_are_those_of_the_results() -> None:
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    results = (ROOT / "benchmarks" / "results" / "transformers_models_h200_202611.md").read_text(
        encoding="utf-8"
    )
    eager, compiled = (results.split(f"\n## {kind}, 2026", 1)[1] for kind in ("Eager", "Compiled"))
    latest = eager.split("\nBefore the mend", 1)[0] + compiled.split("\n## ", 1)[0]
    measured = [line for line in latest.splitlines() if line.startswith("| ")]
    section = page.split("\n## Models of transformers\n", 1)[1].split("\n## ", 1)[0]
    assert [line for line in section.splitlines() if line.startswith("| ")] == measured
    assert len(measured) > 20


@pytest.mark.parametrize(
    ("page", "names"),
    [("comparison.md", ["compiled", "compiled_images"]), ("howto/compile_and_fit.md", ["compiled"])],
)
def test_rows_of_compiled_and_captured_units_are_those_of_the_results(page: str, names: list[str]) -> None:
    """Each row is the beginning of one of the results', and none of compiled units is left out."""
    shown = re.findall(
        r"^\| [\d.]+ \| [^|]+ \| [\d.]+ \([\d.]+\) .*\|$",
        (ROOT / "docs" / page).read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    paths = [ROOT / "benchmarks" / "results" / f"{name}_h200_202611.md" for name in names]
    results = "".join(path.read_text(encoding="utf-8") for path in paths)
    for row in shown:
        assert f"\n{row} " in results, row
    measured = re.findall(r"^\| [\d.]+ \| blocks compiled.*$", results, re.MULTILINE)
    compiled = [row for row in shown if "blocks compiled" in row]
    assert len(compiled) == len(measured) > 0


@pytest.mark.parametrize("page", ["comparison.md", "howto/varying_batches.md"])
def test_figures_of_varying_batches_are_those_of_the_results(page: str) -> None:
    text = " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())
    results = (ROOT / "benchmarks" / "results" / "varying_h200_202611.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [\w ]+ \| [\d,]+ \| .* %.*\|$", results, re.MULTILINE)
    assert len(rows) == 3
    for row in rows:
        assert row in text, row
    for shown, measured in (
        (r"([\d.]+) s for three sizes, and [\d.]+ s for the longest", r"([\d.]+) s for three sizes"),
        (r"three sizes, and ([\d.]+) s for the longest", r"Fits: ([\d.]+) s for the longest"),
        (r"[Pp]icking a plan takes ([\d.]+) µs a step", r"Picking a plan: ([\d.]+) µs a step"),
        (r"budget, ([\d.]+) GiB", r"budget ([\d.]+) GiB"),
        (r"median ([\d,]+)", r"median ([\d,]+)"),
    ):
        found = [re.search(pattern, where) for pattern, where in ((shown, text), (measured, results))]
        assert all(found), shown
        assert len({match[1].replace(",", "") for match in found if match}) == 1, shown
