"""Which replays a recorded step compares, and that those which it does not compare are found if they differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup.checkpointing import frame
from recoup.devices.meter import CpuMeter
from recoup.engines import apply
from recoup.engines.compared_replays import replays_left_out
from recoup.errors import VerificationError
from recoup.plans.by_hand import plan_by_hand, recomputing
from recoup.plans.model_plan import ModelPlan

NUM_BLOCKS = 6
COUNTED = [0]
ODD: set[int] = set()
"""Blocks, by id, that depend on how often they ran in a step: nothing tells them from the others."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        COUNTED[0] += id(self) in ODD
        return torch.tanh(self.linear(x * (1.0 + COUNTED[0] * (id(self) in ODD))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        COUNTED[0] = 0
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.fixture(autouse=True)
def none_odd() -> None:
    ODD.clear()


def planned() -> tuple[Blocks, Tensor, ModelPlan]:
    """A model under a plan that recomputes all of its blocks."""
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(64, 16)
    profile = recoup.measure(model, x, units="blocks.*")
    blocks = [index for index, unit in enumerate(profile.units) if unit.module is not None]
    plan = plan_by_hand(profile, recomputing(profile, blocks), 2**30)
    apply(model, plan)
    return model, x, plan


def test_one_of_each_kind_and_those_at_the_peak_are_compared() -> None:
    """The first block's input needs no gradient. On a device, where comparing takes memory, all are near the peak."""
    model, _, plan = planned()
    at_peak = plan.profile.units[plan.schedule.predicted.peak.unit].module
    compared = {"blocks.0", "blocks.1", at_peak}
    left_out = replays_left_out(model, plan, torch.device("cpu"))
    names = {f"blocks.{index}" for index in range(NUM_BLOCKS)}
    assert {name for name, module in model.named_modules() if module in left_out and name in names} == (
        names - compared
    )
    assert model.blocks[3].linear in left_out
    assert not replays_left_out(model, plan, torch.device("cuda"))


def count_compared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found, is_due = [], frame.is_due

    def counting(site: Any) -> bool:
        if due := is_due(site):
            found.append(site)
        return due

    monkeypatch.setattr(frame, "is_due", counting)
    return found


def test_where_there_is_no_plain_step_all_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, plan = planned()
    compared = count_compared(monkeypatch)
    assert recoup.verify(model, plan, x).gradients == "bit-equal"
    assert 2 <= len(compared) < NUM_BLOCKS
    compared.clear()
    monkeypatch.setattr(CpuMeter, "free_bytes", lambda self: 0)
    assert recoup.verify(model, plan, x).gradients == "bit-equal, unit by unit"
    assert set(compared) == set(model.blocks)


def without_gradients(model: Blocks, x: Tensor) -> Callable[[], None]:
    def step() -> None:
        model(x).backward()
        model.zero_grad()

    return step


def with_an_optimizer_at_rest(model: Blocks, x: Tensor) -> Callable[[], None]:
    """As in a warm-up, or where a scaler skips a step: parameters tell nothing."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize("make_step", [None, without_gradients, with_an_optimizer_at_rest])
def test_a_replay_that_was_left_out_and_differs_is_named(make_step: Any) -> None:
    model, x, plan = planned()
    assert model.blocks[3] in replays_left_out(model, plan, torch.device("cpu"))
    ODD.add(id(model.blocks[3]))
    given: dict[str, Any] = {"step": make_step(model, x)} if make_step else {"sample": x}
    error = r"(?s)module Block .*does not repeat the forward.*has other values.*recoup\.audit"
    with pytest.raises(VerificationError, match=error):
        recoup.verify(model, plan, **given)


def test_all_replays_are_compared_where_the_step_leaves_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, plan = planned()
    compared = count_compared(monkeypatch)
    seen = recoup.verify(model, plan, step=without_gradients(model, x))
    assert seen.gradients == "not compared: the step leaves no gradients"
    assert set(compared) == set(model.blocks)
