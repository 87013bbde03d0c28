"""Models whose blocks are not closed: they have checkpoints of their own, or give tensors away."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import recoup
from recoup.errors import BudgetError, UnitError


class Block(nn.Module):
    """Two parts, the second of them checkpointed by the block itself if asked to."""

    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32))
        self.mlp = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x)
        return x + (checkpoint(self.mlp, x, use_reentrant=False) if self.checkpoints else self.mlp(x))


class Stack(nn.Module):
    """Blocks that the model itself checkpoints in its own way, unless that is None."""

    def __init__(self, *blocks: nn.Module, **options: Any) -> None:
        super().__init__()
        self.first, self.blocks, self.options = nn.Linear(32, 32), nn.ModuleList(blocks), options

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, **self.options) if self.options else block(x)
        return x.square().mean()


X = torch.randn(64, 32)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_model_that_checkpoints_its_blocks(use_reentrant: bool) -> None:
    model = Stack(Block(), Block(), Block(), use_reentrant=use_reentrant)
    what = "has reentrant checkpoints of its own" if use_reentrant else "'blocks.0' runs inside a checkpoint"
    with pytest.raises(UnitError, match=rf"{what}.*switch the model's checkpoints off"):
        recoup.fit(model, X, budget="1MiB")
    model.options.clear()
    profile = recoup.measure(model, X)
    fitted = recoup.fit(model, X, budget=recoup.minimum_budget(profile))
    assert fitted.verification is not None
    assert fitted.verification.gradients == "bit-equal"


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_blocks_with_checkpoints_inside(share: float) -> None:
    model = Stack(*(Block(checkpoints=True) for _ in range(4)))
    profile = recoup.measure(model, X)
    assert [unit.name for unit in profile.units][1:5] == [f"blocks.{index}" for index in range(4)]
    low, high = recoup.minimum_budget(profile), profile.plain_bytes
    fitted = recoup.fit(model, X, budget=low + int(share * (high - low)))
    assert fitted.verification is not None
    assert fitted.verification.gradients == "bit-equal"
    assert fitted.verification.peak_bytes == pytest.approx(fitted.plan.predicted_bytes, rel=0.01)


def test_blocks_that_cannot_be_split_because_of_checkpoints_inside() -> None:
    """What the block checkpoints itself can be no unit: the smallest budget is that of whole blocks."""
    model = Stack(*(Block(checkpoints=True) for _ in range(4)))
    low = recoup.minimum_budget(recoup.measure(model, X))
    with pytest.raises(BudgetError) as refused:
        recoup.fit(model, X, budget=low // 2)
    assert refused.value.smallest_bytes <= low


class Router(nn.Module):
    """Leaves a loss of its own where the model finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.balance = nn.Linear(32, 32), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        share = self.gate(x).softmax(-1)
        self.balance = share.mean(0).square().sum()
        return x * share


class RoutedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.router = Block(), Router()

    def forward(self, x: Tensor) -> Tensor:
        return self.router(self.block(x))


class Routed(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(block.router.balance for block in self.blocks)


def test_blocks_that_leave_a_loss_in_an_attribute() -> None:
    """Neither they nor their routers can be units. The gates inside the routers can, and all else."""
    model = Routed(RoutedBlock(), RoutedBlock(), RoutedBlock())
    profile = recoup.measure(model, X)
    names = [unit.name for unit in profile.units if unit.module is not None]
    assert names == [
        "first",
        *(f"blocks.{index}.{part}" for index in range(3) for part in ("block", "router.gate")),
    ]
    low, high = recoup.minimum_budget(profile), profile.plain_bytes
    assert low < 0.8 * high
    # The losses in the attributes are scalars: a few bytes that belong to no unit.
    for budget in (low + 64, (low + high) // 2):
        fitted = recoup.fit(model, X, budget=budget)
        assert fitted.verification is not None
        assert fitted.verification.gradients == "bit-equal"
    with pytest.raises(UnitError, match=r"Unit 'blocks\.\d' gives a tensor to code outside"):
        recoup.measure(model, X, units="blocks.*")


class Push(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor, skips: Any) -> Tensor:
        skips.append(self.layer(x).tanh())
        return skips[-1]


class Pop(Push):
    def forward(self, x: Tensor, skips: Any) -> Tensor:
        return self.layer(x).tanh() + skips.pop()


class Net(nn.Module):
    """Its list of skips lives as long as the model."""

    def __init__(self, skips: Any) -> None:
        super().__init__()
        self.holder = SimpleNamespace(skips=skips)
        self.blocks = nn.ModuleList([Push(), Push(), Push(), Pop(), Pop(), Pop()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.holder.skips)
        return x.square().mean()


@pytest.mark.parametrize("skips", [[], deque()])
def test_blocks_that_push_to_a_list_which_outlives_the_step(skips: Any) -> None:
    """A look that fails because a unit gives a tensor away leaves the list as it found it."""
    model = Net(skips)
    profile = recoup.measure(model, X)
    called = [unit.module for unit in profile.units if unit.module]
    assert called == [*(f"blocks.{index}.layer" for index in range(3)), "blocks.3", "blocks.4", "blocks.5"]
    with pytest.raises(BudgetError) as refused:
        recoup.fit(model, X, budget=1)
    fitted = recoup.fit(model, X, budget=refused.value.smallest_bytes)
    assert fitted.verification is not None
    assert fitted.verification.gradients == "bit-equal"
    assert len(skips) == 0
