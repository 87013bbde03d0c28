"""What becomes of each operation under a cut, and which line made it."""

from __future__ import annotations

from inspect import getsourcelines
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from capture import blocks
from capture.blocks import Constant, FeedForward, TwoDropouts, Unit
from capture.cuts import captured
from torch import Tensor

from recoup.capture.cut import Cut
from recoup.capture.explain import OperationFate, fates_of
from recoup.capture.options import cuts_of

ROWS, WIDTH = 4, 8


def fates(saves: tuple[str, ...] | None) -> dict[str, OperationFate]:
    module = FeedForward()
    graph = captured(module, module.given())
    cuts_of(graph, "captured", lambda node: len(node.name) * 1e-6)
    return {one.name: one for one in fates_of(graph, Cut("captured", graph.digest, saves))}


def test_every_operation_in_order() -> None:
    found = fates(("addmm",))
    assert [(one.name, one.operation, one.fate) for one in found.values()] == [
        ("native_layer_norm", "aten.native_layer_norm", "recomputed"),
        ("addmm", "aten.addmm", "kept"),
        ("gelu", "aten.gelu", "recomputed"),
        ("addmm_1", "aten.addmm", "not needed"),
        ("add", "aten.add.Tensor", "not needed"),
    ]


def test_the_engine_s_own_cut_keeps_what_is_read() -> None:
    found = fates(None)
    assert [one.fate for one in found.values()] == ["kept", "kept", "kept", "not needed", "not needed"]


def test_a_result_that_nothing_reads_is_not_kept() -> None:
    assert fates(("addmm_1",))["addmm_1"].fate == "not needed"


def test_bytes_and_seconds() -> None:
    found = fates(())
    assert {one.name: one.num_bytes for one in found.values()} == {
        "native_layer_norm": ROWS * WIDTH * 4 + 2 * ROWS * 4,
        "addmm": 4 * ROWS * WIDTH * 4,
        "gelu": 4 * ROWS * WIDTH * 4,
        "addmm_1": ROWS * WIDTH * 4,
        "add": ROWS * WIDTH * 4,
    }
    assert found["gelu"].seconds == len("gelu") * 1e-6


def test_the_user_s_line() -> None:
    lines, first = getsourcelines(FeedForward.forward)
    code = lines[1].strip()
    place = f"{Path(blocks.__file__).name}:{first + 1}: {code}"
    assert {one.line for one in fates(()).values()} == {place}


def test_a_dropout_s_mask_is_kept_and_its_result_made_again() -> None:
    module = TwoDropouts()
    graph = captured(module, module.given())
    found = {one.name: one for one in fates_of(graph, Cut("captured", graph.digest, ()))}
    assert found["native_dropout"].fate == "kept"
    assert found["native_dropout"].num_bytes == ROWS * WIDTH // 8  # a bit for each number
    assert (found["getitem"].operation, found["getitem"].fate) == ("aten.native_dropout", "recomputed")
    own = {one.name: one for one in fates_of(graph, Cut("captured", graph.digest))}
    assert own["native_dropout"].num_bytes == ROWS * WIDTH  # as the operation made it


def test_a_constant_is_no_operation() -> None:
    module = Constant()
    graph = captured(module, module.given())
    found = {one.name: one.operation for one in fates_of(graph, Cut("captured", graph.digest, ()))}
    assert found == {
        "addmm": "aten.addmm",
        "lift_fresh_copy": "aten.lift_fresh_copy",
        "sqrt": "aten.sqrt",
        "div": "aten.div.Tensor",
        "tanh": "aten.tanh",
        "addmm_1": "aten.addmm",
    }


class Rectified(Unit):
    """Generated code compares its result with 0 for the backward, which fills in zeros, and adds ones on both ways."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.a(x)) * (self.b(x) + torch.ones(4, 8))


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # its code generator imports what torch calls deprecated
def test_what_only_the_backward_runs() -> None:
    """Whatever is said to be saved: torch never keeps constants."""
    module = Rectified()
    graph = captured(module, module.given(), "compiled")
    names = tuple(node.name for node in graph.nodes)
    fates = {
        saves: {one.name: one.fate for one in fates_of(graph, Cut("compiled", graph.digest, saves))}
        for saves in ((), names)
    }
    (zeros,) = (node.name for node in graph.nodes if "full" in node.name and node.args[0] == [])
    assert fates[()][zeros] == fates[names][zeros] == "backward"
    assert (fates[()]["le"], fates[names]["le"]) == ("backward", "kept")
    assert (fates[()]["relu"], fates[names]["relu"]) == ("recomputed", "kept")
