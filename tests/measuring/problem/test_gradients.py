"""Gradients that a unit's backward gives its arguments as views of one storage, against the truth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from real_steps import predicted_peak_bytes, real_peak_bytes
from torch import Tensor, nn

import recoup
from recoup.plans.by_hand import plan_by_hand, recomputing

ROWS = 32


def loss(output: Tensor) -> Tensor:
    return output.square().mean()


class Body(nn.Module):
    def __init__(self, forward: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.body = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *args: Any) -> Any:
        return self.body(self, *args)


class Wide(nn.Module):
    """Its backward peaks when it has used the gradient of its output up."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(24, 24 * 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sin().reshape(ROWS, 8, 24).sum(1)


def added(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return self.layer(x + y)


def joined(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of what is joined is larger than that of the output."""
    return torch.cat([x, y])[:, :3].tanh()


def adding() -> nn.Module:
    return Body(added, layer=nn.Linear(24, 3))


def joining() -> nn.Module:
    return Body(joined)


def pair(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return self.first(x), self.second(x)


def of_one_unit(layer: Callable[[], nn.Module], join: nn.Module) -> nn.Module:
    two = Body(pair, first=layer(), second=layer())
    return Body(lambda self, x: self.join(*self.two(x)), two=two, join=join)


def of_two_units(layer: Callable[[], nn.Module], join: nn.Module) -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        first = self.first(x)
        return self.join(first, self.third(self.second(x)))

    return Body(forward, first=layer(), second=layer(), third=layer(), join=join)


@pytest.mark.parametrize("of", [of_one_unit, of_two_units])
@pytest.mark.parametrize("join", [adding, joining])
@pytest.mark.parametrize("layer", [lambda: nn.Linear(24, 24), Wide], ids=["linear", "wide"])
def test_two_arguments_whose_gradients_are_views_of_one_storage(of: Any, join: Any, layer: Any) -> None:
    model, sample = of(layer, join()), torch.randn(ROWS, 24)
    profile = recoup.measure(model, sample, loss=loss, units=[name for name, _ in model.named_children()])
    assert predicted_peak_bytes(profile) == real_peak_bytes(model, sample, loss)


class Block(nn.Module):
    """Where nothing uses its edges, the gradient of those that it is given is a third of what it joins."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 24))

    def forward(self, x: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        made = self.layers(torch.cat([x.sin(), x.cos(), edges]))[:ROWS]
        return torch.relu(x + made), edges + torch.cat([x.sin(), edges]).exp().sum()


class Graph(nn.Module):
    """Nothing uses the edges of the last block."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes, self.edges = nn.Linear(24, 24), nn.Linear(24, 24)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x, edges = self.nodes(x), self.edges(x)
        for block in self.blocks:
            x, edges = block(x, edges)
        return self.head(x)


def test_a_gradient_that_is_a_slice_keeps_its_whole_storage_alive() -> None:
    model, sample = Graph(), torch.randn(ROWS, 24)
    profile = recoup.measure(model, sample, loss=loss, units=["nodes", "edges", "blocks.*", "head"])
    assert predicted_peak_bytes(profile) == real_peak_bytes(model, sample, loss)
    for blocks in ([2, 3], [3], [3, 4]):
        plan = plan_by_hand(profile, recomputing(profile, blocks))
        recoup.apply(model, plan)
        seen = recoup.verify(model, plan, sample, loss=loss)
        recoup.remove(model)
        assert seen.peak_bytes == plan.predicted_bytes, blocks
