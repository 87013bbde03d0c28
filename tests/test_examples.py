"""Every example runs, and what it asserts holds."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
SAYS = {
    "demo": [
        "fitted to half its activation memory",
        "bit-equal",
        "The same losses and the same parameters, bit for bit.",
    ],
    "adjoint": [
        "everything kept: 800 KiB",
        "every 16th kept: 50.0 KiB (25 states)",
        "recomputed in the backward: 375 of 400",
    ],
    "budget_cut": [
        "18 steps, none out of memory.",
        "step 5: out of memory (aten.",
        "step 12: room (in each of 3 steps)",
        "18 steps, 1 of them repeated after 1 out-of-memory error; plan changed 2 times;",
        "The same losses and the same parameters, bit for bit.",
    ],
    "varying_lengths": [
        "Lengths with a plan each: up to ",
        "20 steps, none out of memory.",
        "step 5: out of memory (aten.",
        ") at tokens.shape[1] = 80; ",
        "step 15: room (in each of 3 steps) at tokens.shape[1] = 128; ",
        "20 steps, 1 of them repeated after 1 out-of-memory error; plan changed 2 times;",
        "The same losses and the same parameters, bit for bit.",
    ],
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = runpy.run_path(str(path))["main"]()
    out, err = capsys.readouterr()
    assert out.strip()
    for line in SAYS.get(path.stem, []):
        assert line in out
    if path.stem == "demo":
        assert (ended, err) == (0, "")
        check_demo(out, tmp_path)


def check_demo(out: str, folder: Path) -> None:
    """The example is ``recoup demo``."""
    assert out.startswith("A GPT of 8 blocks on the CPU, fitted to half its activation memory: a budget of")
    steps = [line.split() for line in out.splitlines() if re.fullmatch(r" +\d +\d\.\d+ +\d\.\d+", line)]
    assert [step for step, _, _ in steps] == ["1", "2", "3", "4", "5", "6"]
    assert all(plain == ours for _, plain, ours in steps)
    assert out.endswith("bit for bit.\nReport: recoup-demo.html\n")
    assert "<title>GPT: Fits: " in (folder / "recoup-demo.html").read_text(encoding="utf-8")


def test_the_examples_that_are_checked_exist() -> None:
    assert set(SAYS) <= {path.stem for path in EXAMPLES}
