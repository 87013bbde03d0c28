from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ["planning.md", "algorithms/simulate.md", "algorithms/revolve.md", "algorithms/chain.md"]


@pytest.mark.parametrize("page", PAGES)
def test_code_on_the_page_runs_and_prints_what_it_says(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    namespace: dict[str, object] = {}
    blocks = re.findall(r"```(python|text)\n(.*?)```", text, flags=re.S)
    assert any(kind == "python" for kind, _ in blocks)
    for kind, block in blocks:
        if kind == "text":
            assert capsys.readouterr().out == block
        else:
            capsys.readouterr()
            exec(compile(block, page, "exec"), namespace)


@pytest.mark.parametrize("page", PAGES)
def test_pictures_and_links_exist(page: str) -> None:
    path = DOCS / page
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target
