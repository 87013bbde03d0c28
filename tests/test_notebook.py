"""The notebook is one, and its cells print what is stored in it. They run with plain ``exec``: no Jupyter is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parent.parent / "docs" / "notebook.ipynb"
CONTENT: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))


def test_it_has_the_form_of_a_notebook() -> None:
    assert (CONTENT["nbformat"], CONTENT["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in CONTENT["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in CONTENT["cells"]:
        extra = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert set(cell) == {"cell_type", "id", "metadata", "source"} | extra
        assert all(line.endswith("\n") for line in cell["source"][:-1])


@pytest.mark.slow
def test_every_cell_runs_and_prints_what_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("Agg")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "notebook"}
    for cell in CONTENT["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {cell['id']}", "exec"), namespace)
            stored = "".join(line for output in cell["outputs"] for line in output["text"])
            assert capsys.readouterr().out == stored, cell["id"]
    plt.close("all")
    assert (tmp_path / "report.html").exists()
    assert "<svg" in namespace["fitted"]._repr_html_()
