"""Every example runs, and what it asserts holds."""

from __future__ import annotations

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
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path))["main"]()
    out = capsys.readouterr().out
    assert out.strip()
    for line in SAYS.get(path.stem, []):
        assert line in out


def test_the_examples_that_are_checked_exist() -> None:
    assert set(SAYS) <= {path.stem for path in EXAMPLES}
