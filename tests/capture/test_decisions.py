"""What decides is not computed anew by a captured unit's backward, nor is what the user keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup.capture.cut import Cut
from recoup.capture.run import capture, run_cut

ENGINES = ["captured", pytest.param("compiled", marks=pytest.mark.slow)]


def assert_same(found: Sequence[Tensor], plain: Sequence[Tensor], engine: str) -> None:
    """Bit-equal; where code is generated, up to rounding."""
    for one, other in zip(found, plain, strict=True):
        distance = float((one - other).abs().max() / other.abs().max().clamp(min=1e-3))
        assert distance == 0 if engine == "captured" else distance < 1e-5, distance


class Routed(nn.Module):
    """Every expert sees every row; a row takes the results of the two that it chose."""

    def __init__(self, choose: Callable[[Tensor], tuple[Tensor, Tensor]], width: int = 8) -> None:
        super().__init__()
        self.choose = choose
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.choose(self.router(x).softmax(-1))
        made = torch.stack([torch.tanh(expert(x)) for expert in self.experts], 1)
        picked = made.gather(1, chosen[..., None].expand(-1, -1, made.shape[-1]))
        return x + (picked * weights[..., None]).sum(1)


def by_comparison(probabilities: Tensor) -> tuple[Tensor, Tensor]:
    mask = probabilities > 0.25
    return probabilities * mask, mask.long().cumsum(-1) % 4


CHOICES: dict[str, tuple[Callable[[Tensor], tuple[Tensor, Tensor]], str]] = {
    "topk": (lambda p: p.topk(2), "topk"),
    "sort": (lambda p: p.sort(-1, descending=True), "sort"),
    "argmax": (lambda p: (p.amax(-1, keepdim=True), p.argmax(-1, keepdim=True)), "argmax"),
    "comparison": (by_comparison, "gt"),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("choice", CHOICES)
def test_decisions_are_kept(choice: str, engine: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    choose, name = CHOICES[choice]
    module, x = Routed(choose), torch.randn(30, 8, requires_grad=True)
    leaves = [x, *module.parameters()]
    plain = torch.autograd.grad(module(x).square().sum(), leaves)
    graph = capture(engine, module.forward, (x,), {})
    assert [
        op.is_replayable for node, op in zip(graph.nodes, graph.operations, strict=True) if name in node.name
    ]
    assert not any(
        op.is_replayable for node, op in zip(graph.nodes, graph.operations, strict=True) if name in node.name
    )
    kept, again = graph.recomputed(())
    assert any(name in node.name or "getitem" in node.name for node in kept)
    assert not any(name in node.name for node in again)
    # Nothing is kept but what must be: gradients are those of the choice.
    found = torch.autograd.grad(
        run_cut(Cut(engine, graph.digest, (), 1), module.forward, (x,), {}).square().sum(), leaves
    )
    assert_same(found, plain, engine)


def test_large_masks_may_be_computed_anew() -> None:
    torch._dynamo.reset()

    class Masked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x).sin()
            return (y * (y > 0)).exp().sum(-1)

    module, x = Masked(32, 512), torch.randn(129, 32, requires_grad=True)  # more than 64 KiB of booleans
    graph = capture("captured", module.forward, (x,), {})
    (compared,) = (
        op for node, op in zip(graph.nodes, graph.operations, strict=True) if node.name.startswith("gt")
    )
    assert compared.is_replayable


@pytest.mark.parametrize("engine", ENGINES)
def test_what_the_user_keeps_is_kept(engine: str) -> None:
    torch._dynamo.reset()

    class Keeping(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return recoup.keep(super().forward(x).sin()).exp().sin()

    module, x = Keeping(64, 512), torch.randn(257, 64, requires_grad=True)
    leaves = [x, *module.parameters()]
    plain = torch.autograd.grad(module(x).sum(), leaves)
    graph = capture(engine, module.forward, (x,), {})
    kept, again = graph.recomputed(())
    assert [node.name for node in kept] == ["keep"]
    assert any(node.name.startswith("exp") for node in again)
    found = torch.autograd.grad(
        run_cut(Cut(engine, graph.digest, (), 1), module.forward, (x,), {}).sum(), leaves
    )
    assert_same(found, plain, engine)


def test_a_captured_unit_that_is_recomputed_as_a_whole() -> None:
    """Its operations run one by one, and its replay is given what they decided, and what the user keeps."""
    torch._dynamo.reset()
    torch.manual_seed(0)

    class Both(Routed):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * recoup.keep(x.sum(-1, keepdim=True))

    module, x = Both(lambda p: p.topk(2)), torch.randn(30, 8, requires_grad=True)
    leaves = [x, *module.parameters()]
    plain = torch.autograd.grad(module(x).square().sum(), leaves)
    graph = capture("captured", module.forward, (x,), {})

    def run(x: Tensor) -> Tensor:
        result: Tensor = run_cut(Cut("captured", graph.digest), module.forward, (x,), {})
        return result

    for _ in range(3):
        y = recoup.checkpoint(run, x)
        assert "keeps [topk int64[30, 2], keep float32[30, 1]]" in recoup.describe(y)
        found = torch.autograd.grad(y.square().sum(), leaves)
        assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


def test_other_sizes() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Routed(lambda p: p.topk(2))
    graph = capture("captured", module.forward, (torch.randn(30, 8, requires_grad=True),), {})
    cut = Cut("captured", graph.digest, graph.names(graph.needed[:1]), 1)
    for rows in (30, 31, 47):
        x = torch.randn(rows, 8, requires_grad=True)
        leaves = [x, *module.parameters()]
        plain = torch.autograd.grad(module(x).square().sum(), leaves)
        found = torch.autograd.grad(run_cut(cut, module.forward, (x,), {}).square().sum(), leaves)
        assert_same(found, plain, "captured")
