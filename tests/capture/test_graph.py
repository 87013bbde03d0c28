"""Joint graphs as graphs of operations: what is a value, what an operation, what the backward needs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from capture.blocks import Attention, Counting, FeedForward, InputOutput, Parts, Rand, TwoDropouts, Unit
from capture.cuts import captured
from torch import Tensor, nn

from recoup.capture.graph import UnitGraph
from recoup.errors import CaptureError


def graph_of(module: nn.Module) -> UnitGraph:
    return captured(module, module.given())  # type: ignore[operator]


def operations(graph: UnitGraph) -> list[str]:
    return [node.name for node in graph.nodes]


def sizes(graph: UnitGraph) -> dict[str, int]:
    return {
        node.name: size
        for node, size in zip(graph.makers, graph.value_bytes, strict=True)
        if node.op != "placeholder"
    }


class TestFeedForward:
    def test_operations_that_allocate(self) -> None:
        assert operations(graph_of(FeedForward())) == ["native_layer_norm", "addmm", "gelu", "addmm_1", "add"]

    def test_each_result_of_a_tuple_is_a_value(self) -> None:
        found = sizes(graph_of(FeedForward()))
        rows, width = 4, 8
        assert found == {
            "getitem": rows * width * 4,
            "getitem_1": rows * 4,  # mean
            "getitem_2": rows * 4,  # reciprocal of the standard deviation
            "addmm": rows * 4 * width * 4,
            "gelu": rows * 4 * width * 4,
            "addmm_1": rows * width * 4,
            "add": rows * width * 4,
        }

    def test_what_the_backward_reads(self) -> None:
        graph = graph_of(FeedForward())
        assert graph.names(graph.needed) == ("getitem", "getitem_1", "getitem_2", "addmm", "gelu")

    def test_arguments_parameters_and_outputs_live_anyway(self) -> None:
        graph = graph_of(FeedForward())
        resident = {graph.makers[value].name for value in graph.resident}
        assert {name for name in resident if not name.startswith("primals")} == {"add"}
        assert len(resident) == 1 + 6 + 1  # argument, parameters, output

    def test_the_engine_s_own_cut_keeps_what_the_backward_reads(self) -> None:
        graph = graph_of(FeedForward())
        assert graph.own_saves == graph.names(graph.needed)

    @pytest.mark.parametrize(
        ("saves", "again"),
        [
            ((), {"native_layer_norm", "addmm", "gelu"}),
            (("addmm",), {"native_layer_norm", "gelu"}),
            (("gelu",), {"native_layer_norm", "addmm"}),
            (("getitem", "getitem_1", "getitem_2"), {"addmm", "gelu"}),
            (("getitem", "getitem_1", "getitem_2", "addmm"), {"gelu"}),
            (("getitem", "getitem_1", "getitem_2", "addmm", "gelu"), set()),
            (("no such name",), {"native_layer_norm", "addmm", "gelu"}),
        ],
    )
    def test_what_is_run_again(self, saves: tuple[str, ...], again: set[str]) -> None:
        graph = graph_of(FeedForward())
        _, nodes = graph.recomputed(saves)
        assert {node.name for node in nodes if node in graph.nodes} == again


class TestViews:
    def test_views_are_the_value_that_they_are_views_of(self) -> None:
        graph = graph_of(Parts())
        allocating = operations(graph)
        assert not {"view", "split", "unbind", "chunk"} & set(allocating)
        assert allocating.count("addmm") == 1
        views = {node.name: graph.makers[value].name for node, value in graph.views.items()}
        assert views["unbind"] == views["view"] == "addmm_1"
        # Both halves are views of what the normalization made, and so is the node that makes two of it.
        assert views["split"] == views["getitem_3"] == views["getitem_4"] == "getitem"

    def test_an_input_that_is_also_an_output_is_no_result(self) -> None:
        graph = graph_of(InputOutput())
        assert operations(graph) == ["addmm", "tanh"]


class TestRandom:
    def test_a_dropout_draws_once_and_its_result_can_be_made_again(self) -> None:
        graph = graph_of(TwoDropouts())
        replayable = {
            node.name: op.is_replayable for node, op in zip(graph.nodes, graph.operations, strict=True)
        }
        assert not replayable["native_dropout"]
        assert not replayable["native_dropout_1"]
        assert replayable["getitem"]
        assert replayable["addmm"]
        kept, again = graph.recomputed(())
        assert {node.name for node in kept} == {"getitem_1", "getitem_3"}  # the masks
        assert {"getitem", "addmm"} <= {node.name for node in again}

    def test_what_is_drawn_is_kept(self) -> None:
        graph = graph_of(Rand())
        drawing = [
            node.name for node, op in zip(graph.nodes, graph.operations, strict=True) if not op.is_replayable
        ]
        assert len(drawing) == 2
        kept, _ = graph.recomputed(())
        assert sorted(node.name for node in kept) == sorted(drawing)

    def test_attention_draws_with_dropout_only(self) -> None:
        class Without(Attention):
            def forward(self, x: Tensor) -> Tensor:
                q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
                return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

        assert all(op.is_replayable for op in graph_of(Without()).operations)
        assert not all(op.is_replayable for op in graph_of(Attention()).operations)


class TestDigest:
    def test_equal_units_have_equal_graphs(self) -> None:
        assert graph_of(FeedForward()).digest == graph_of(FeedForward()).digest

    def test_other_sizes_have_other_graphs(self) -> None:
        module = FeedForward()
        graph = captured(module, ((torch.randn(5, 8, requires_grad=True),), {}))
        assert graph.digest != graph_of(module).digest

    def test_other_numbers_have_other_graphs(self) -> None:
        class Scaled(Unit):
            scale = 2.0

            def forward(self, x: Tensor) -> Tensor:
                return torch.tanh(self.a(x)) * self.scale

        one, other = Scaled(), Scaled()
        other.scale = 3.0
        assert graph_of(one).digest != graph_of(other).digest


class TestWhatIsNoGraph:
    def test_sizes_that_depend_on_values(self) -> None:
        class Chosen(Unit):
            def forward(self, x: Tensor) -> Tensor:
                return torch.tanh(self.a(x[(x[:, 0] > 0).nonzero().flatten()]))

        with pytest.raises(CaptureError, match=r"the size of a result depends on values \(nonzero\)"):
            graph_of(Chosen())

    def test_sizes_are_known_after_a_capture_that_failed(self) -> None:
        # The compiler takes what it knows by the same name, in another size, for a function whose sizes vary.
        class Stopped(Unit):
            def forward(self, x: Tensor) -> Tensor:
                return self.a(x) if x.sum() > 0 else self.b(x)

        module = Stopped()
        for rows in (2, 3, 4):
            with pytest.raises(CaptureError):
                captured(module, ((torch.randn(rows, 8, requires_grad=True),), {}))
        assert sizes(graph_of(FeedForward()))["addmm"] == 4 * 32 * 4

    def test_a_buffer_that_changes_is_read_as_it_was(self) -> None:
        assert operations(graph_of(Counting()))[0] == "addmm"
