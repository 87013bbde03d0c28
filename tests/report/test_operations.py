"""What `recoup.explain` and the report say about the operations of captured units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from capture.blocks import Block
from report_subjects import Made
from torch import Tensor, nn

import recoup
from recoup.capture import run
from recoup.capture.cut import Cut
from recoup.capture.explain import fates_of
from recoup.errors import UnitError
from recoup.plans.profile import Profile
from recoup.plans.tree import leaves_of
from recoup.report.operations import explanations
from recoup.report.page import write_html

# The compiler looks at the gradients of what it is given.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf.*:UserWarning"
)


class Breaking(Block):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(16), Block(16), Breaking(16), Block(16)])
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean()


def profile_of(engine: str) -> Profile:
    torch.manual_seed(0)
    return recoup.measure(Model(), torch.randn(32, 16), engine=engine)


@pytest.fixture(scope="module")
def captured() -> Profile:
    return profile_of("captured")


def fitted(profile: Profile) -> Any:
    return Made(recoup.plan(profile, recoup.minimum_budget(profile)))


def test_the_operations_of_a_captured_unit(captured: Profile) -> None:
    found = recoup.explain(fitted(captured), "blocks.0")
    assert found.unit == "blocks.0"
    assert found.recipe.startswith("captured, cut ")
    operations = [one.operation for one in found.operations]
    assert operations[:4] == ["aten.native_layer_norm", "aten.addmm", "aten.gelu", "aten.addmm"]
    assert operations.count("aten.native_dropout") == 2  # its mask, and its result
    up = found.operations[1]
    assert up.num_bytes == 32 * 64 * 4
    assert up.seconds > 0
    assert up.line.startswith("blocks.py:")
    assert "self.up(self.norm(x))" in up.line
    assert {one.fate for one in found.operations} <= {"kept", "recomputed", "not needed"}
    assert any(one.fate == "recomputed" for one in found.operations)


def test_as_text(captured: Profile) -> None:
    found = recoup.explain(fitted(captured), "blocks.0")
    first, *lines = str(found).splitlines()
    assert first == f"blocks.0: {found.recipe}"
    assert len(lines) == len(found.operations)
    assert lines[1].split()[:4] == ["addmm", "(aten.addmm)", "8.00", "KiB"]
    assert " us  " in lines[1]
    assert lines[1].endswith(found.operations[1].line)


def test_fates_are_those_of_the_plan(captured: Profile) -> None:
    unit = next(unit for unit in captured.units if unit.name == "blocks.0")
    cuts = [recipe.cut for recipe in unit.recipes if recipe.cut is not None and not recipe.whole]
    own, least = cuts[0], min(cuts[1:], key=lambda cut: len(cut.saves or ()))
    graph = run.graph_of(own)
    assert graph is not None

    def num_bytes(cut: Cut, fate: str) -> int:
        return sum(one.num_bytes for one in fates_of(graph, cut) if one.fate == fate)

    assert num_bytes(own, "recomputed") == 0
    assert num_bytes(least, "kept") < num_bytes(own, "kept")
    assert num_bytes(least, "recomputed") > 0


def test_a_unit_that_could_not_be_captured(captured: Profile) -> None:
    found = recoup.explain(fitted(captured), "blocks.2")
    assert found.operations == ()
    assert found.note.startswith("It runs eagerly: ")
    assert "graph_break" in found.note
    assert str(found) == f"blocks.2: {found.recipe}. {found.note}"


def test_a_unit_that_holds_too_little(captured: Profile) -> None:
    found = recoup.explain(fitted(captured), "head")
    assert found.note == "It runs eagerly: it holds too little to be worth capturing."
    said = "3 of 5 unit calls run as graphs of operations (engine='captured'); 1 holds too little to be worth it."
    assert fitted(captured).plan.notes[0] == said


def test_an_eager_plan() -> None:
    found = recoup.explain(fitted(profile_of("eager")), "blocks.0")
    assert found.note.startswith("It runs eagerly: only captured units (engine='captured' or 'compiled')")


def test_a_graph_of_another_process(captured: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_graphs", {})
    found = recoup.explain(fitted(captured), "blocks.0")
    assert found.note == "Its graph was captured in another process: fit here."
    assert explanations(fitted(captured).plan) == []


def test_no_such_unit(captured: Profile) -> None:
    with pytest.raises(UnitError, match=r"no unit 'blocks.9'; it has blocks.0, blocks.1, blocks.2, blocks.3"):
        recoup.explain(fitted(captured), "blocks.9")


def test_each_way_to_run_units_once(captured: Profile) -> None:
    plan = fitted(captured).plan
    found = explanations(plan)
    cuts = {plan.recipe(leaf).cut for leaf in leaves_of(plan.items)} - {None}
    assert len(found) == len(cuts)
    assert found[0][0] == "blocks.0"
    assert all(one.operations for _, one in found)
    assert "blocks.2" not in [name for name, _ in found]


def test_the_page_shows_them(captured: Profile, tmp_path: Path) -> None:
    page = write_html(fitted(captured), tmp_path / "report.html").read_text()
    assert "aten.gelu" in page
    assert "self.up(self.norm(x))" in page
    eager = write_html(fitted(profile_of("eager")), tmp_path / "eager.html").read_text()
    assert "aten.gelu" not in eager
