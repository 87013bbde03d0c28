"""Forward and backward at cuts: gradients, exact counts of what is run again, exact bytes held, numbers drawn once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F
from capture.blocks import PLAIN, RANDOM, DictOutput, FeedForward, Normalized, Parts, TwoDropouts
from capture.cuts import assert_equal, at, captured, cuts, held_bytes, recomputed, step
from torch import Tensor

from recoup.capture.cut import Cut

# The compiler looks at the gradients of what it is given.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf.*:UserWarning"
)


@pytest.mark.parametrize("kind", [*PLAIN, *RANDOM], ids=lambda kind: kind.__name__)
def test_every_cut_is_bit_equal_to_eager(kind: Any) -> None:
    module = kind()
    given = module.given()

    def reads(output: Any) -> Any:
        return output["y"] if kind is DictOutput else output

    expected = step(module, module.forward, given, reads=reads)
    graph = captured(module, given)
    for cut in cuts(graph, each=kind in RANDOM):
        assert_equal(step(module, at(module, cut), given, reads=reads), expected, cut)


def test_the_peer_draws_again() -> None:
    """torch's own memory budget: gradients of two dropouts are wrong, so the test above can fail (pytorch#190758)."""

    def two_dropouts(x: Tensor) -> Tensor:
        return F.dropout(torch.sin(F.dropout(torch.sin(x), 0.5)), 0.5)

    def gradient(run: Any) -> Tensor:
        x = torch.linspace(-2, 2, 4096).requires_grad_()
        torch.manual_seed(0)
        run(x).sum().backward()
        assert x.grad is not None
        return x.grad

    expected = gradient(two_dropouts)
    wrong = {}
    for budget in (1.0, 0.5):
        torch._dynamo.reset()
        with torch._functorch.config.patch(activation_memory_budget=budget):
            found = gradient(torch.compile(two_dropouts, backend="aot_eager"))
        wrong[budget] = (found != expected).float().mean().item()
    assert wrong[1.0] == 0.0
    assert wrong[0.5] > 0.3


class TestFeedForward:
    norm = ("getitem", "getitem_1", "getitem_2")
    norm_bytes, wide_bytes = 4 * 8 * 4 + 2 * 4 * 4, 4 * 32 * 4

    @pytest.mark.parametrize(
        ("saves", "again", "num_bytes"),
        [
            ((), {"native_layer_norm": 1, "addmm": 1, "gelu": 1}, 0),
            (("addmm",), {"native_layer_norm": 1, "gelu": 1}, wide_bytes),
            (("gelu",), {"native_layer_norm": 1, "addmm": 1}, wide_bytes),
            (norm, {"addmm": 1, "gelu": 1}, norm_bytes),
            ((*norm, "addmm"), {"gelu": 1}, norm_bytes + wide_bytes),
            ((*norm, "addmm", "gelu"), {}, norm_bytes + 2 * wide_bytes),
        ],
    )
    def test_what_is_run_again_and_held(
        self, saves: tuple[str, ...], again: dict[str, int], num_bytes: int
    ) -> None:
        module = FeedForward()
        given = module.given()
        graph = captured(module, given)
        kept = at(module, Cut("captured", graph.digest))
        run = at(module, Cut("captured", graph.digest, saves))
        assert recomputed(run, given, kept) == again
        assert held_bytes(run, given) == num_bytes

    def test_the_engine_s_own_cut_holds_what_eager_code_does(self) -> None:
        module = FeedForward()
        given = module.given()
        run = at(module, Cut("captured", captured(module, given).digest))
        assert held_bytes(run, given) == held_bytes(module.forward, given)


def test_views_of_what_is_kept_hold_it_once() -> None:
    module = Parts()
    given = module.given()
    graph = captured(module, given)
    run = at(module, Cut("captured", graph.digest, ("getitem", "getitem_1", "getitem_2", "addmm", "addmm_1")))
    # The two linear maps and the normalized values, each with two or more views; mean and deviation of four rows.
    assert held_bytes(run, given) == 3 * 4 * 8 * 4 + 2 * 4 * 4
    kept = at(module, Cut("captured", graph.digest))
    assert recomputed(run, given, kept) == {"silu": 1, "mul": 1, "tanh": 2, "cat": 1}


def test_statistics_are_updated_once_and_kept_as_they_were_for_a_second_run() -> None:
    module = Normalized()
    given = module.given()
    graph = captured(module, given)
    kept = at(module, Cut("captured", graph.digest))
    run = at(module, Cut("captured", graph.digest, ()))
    assert recomputed(run, given, kept)["_native_batch_norm_legit_functional"] == 2
    for _ in range(2):
        before = int(module.bn1.num_batches_tracked)
        (args, _) = given
        run(*args).sum().backward()
        assert int(module.bn1.num_batches_tracked) == before + 1


def test_a_dropout_s_result_is_made_from_its_mask() -> None:
    module = TwoDropouts()
    given = module.given()
    graph = captured(module, given)
    run = at(module, Cut("captured", graph.digest, ()))
    kept = at(module, Cut("captured", graph.digest))
    # Two masks of a bit for each number. The second dropout's result is the output: only the first one's is read.
    assert held_bytes(run, given) == 2 * 4 * 8 // 8
    found = recomputed(run, given, kept)
    assert "native_dropout" not in found
    assert found["native_dropout_backward"] == 1
    assert found["addmm"] == 1
