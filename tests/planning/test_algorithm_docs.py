"""The python blocks of the algorithm pages run as written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "algorithms"


@pytest.mark.parametrize("name", ["dag", "graph"])
def test_python_blocks_run(name, capsys):
    blocks = re.findall(r"```python\n(.*?)```", (PAGES / f"{name}.md").read_text(), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, f"{name}.md", "exec"), {})
    assert capsys.readouterr().out
    assert (PAGES / f"{name}.svg").exists()
