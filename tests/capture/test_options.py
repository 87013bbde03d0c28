"""Which cuts are worth measuring, for operations whose seconds are known."""

from __future__ import annotations

import pytest
from capture.blocks import FeedForward, TwoDropouts
from capture.cuts import captured
from torch.fx import Node

from recoup.capture.cut import Cut
from recoup.capture.graph import UnitGraph
from recoup.capture.options import cuts_of

NORM = ("getitem", "getitem_1", "getitem_2")
SECONDS = {"native_layer_norm": 2.0, "addmm": 10.0, "gelu": 1.0, "addmm_1": 10.0, "add": 1.0}


def seconds_of(node: Node) -> float:
    return SECONDS[node.name]


@pytest.fixture
def graph() -> UnitGraph:
    module = FeedForward()
    return captured(module, module.given())


def test_from_the_engine_s_own_to_the_fewest_bytes(graph: UnitGraph) -> None:
    # gelu frees 512 bytes for a second, the norm 160 for two, the linear map 512 for ten.
    assert [cut.saves for cut in cuts_of(graph, "captured", seconds_of)] == [
        None,
        (*NORM, "addmm"),
        ("addmm",),
        (),
    ]


def test_seconds_are_kept_with_the_graph(graph: UnitGraph) -> None:
    cuts_of(graph, "captured", seconds_of)
    assert graph.seconds == SECONDS


def test_generated_code_runs_pointwise_operations_beside_others(graph: UnitGraph) -> None:
    # At a tenth of their seconds, the pointwise operations come first; the linear map stays last.
    cuts = cuts_of(graph, "compiled", lambda node: {"gelu": 100.0, "addmm": 11.0}.get(node.name, 1.0))
    assert [cut.saves for cut in cuts][-2:] == [("addmm",), ()]
    cuts = cuts_of(graph, "captured", lambda node: {"gelu": 100.0, "addmm": 11.0}.get(node.name, 1.0))
    assert [cut.saves for cut in cuts][-2:] == [("gelu",), ()]


def test_all_are_of_this_graph_and_engine(graph: UnitGraph) -> None:
    for engine in ("captured", "compiled"):
        cuts = cuts_of(graph, engine, seconds_of)
        assert {(cut.engine, cut.graph) for cut in cuts} == {(engine, graph.digest)}
        assert len(set(cuts)) == len(cuts)
        assert cuts[0] == Cut(engine, graph.digest)


def test_at_most_four_and_no_names_of_what_is_kept_anyway() -> None:
    module = TwoDropouts()
    graph = captured(module, module.given())
    cuts = cuts_of(graph, "captured", lambda node: float(1 + len(node.name)))
    assert 2 <= len(cuts) <= 4
    known = {node.name for node in graph.makers}
    assert all(set(cut.saves or ()) <= known for cut in cuts)
    # The fewest bytes: the masks, which cannot be drawn again.
    assert cuts[-1].saves == ("getitem_1", "getitem_3")
