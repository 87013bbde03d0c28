"""Fitted models in training: what drifts later than the audit and the verification look is found out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup.checkpointing import sampling
from recoup.checkpointing.by_identity import ByIdentity
from recoup.engines import Segment
from recoup.errors import ReplayMismatchError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + x


COUNTER = SimpleNamespace(calls=0)


class Late(Block):
    """A counter in a plain object, whose effect comes only after a hundred calls."""

    def forward(self, x: Tensor) -> Tensor:
        COUNTER.calls += 1
        return super().forward(x * max(1, COUNTER.calls - 100))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Late(), Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def fitted_model(calls: int) -> tuple[Model, Tensor]:
    """At its smallest, where every block is replayed."""
    torch.manual_seed(0)
    COUNTER.calls = calls
    model, x = Model(), torch.randn(256, 16)
    units = [f"blocks.{index}" for index in range(4)]
    fitted = recoup.fit(
        model, x, budget=recoup.minimum_budget(recoup.measure(model, x, units=units)), units=units
    )
    assert any(isinstance(item, Segment) and item.first <= 1 <= item.last for item in fitted.plan.items)
    assert fitted.audit.unsafe == {}
    assert fitted.verification.gradients == "bit-equal"
    assert calls == COUNTER.calls
    return model, x


def first_error(model: Model, x: Tensor) -> str:
    for _ in range(300):
        model.zero_grad()
        try:
            model(x).backward()
        except ReplayMismatchError as error:
            return str(error)
    return ""


def test_a_counter_that_takes_effect_after_a_hundred_calls() -> None:
    message = first_error(*fitted_model(0))
    assert "has other values than in the forward" in message
    # Drift begins once the counter passes 100; the next call that is compared comes before twice as many.
    assert 100 < COUNTER.calls <= 300


def test_training_counts_from_its_own_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring and verifying are not counted."""
    monkeypatch.setattr(sampling, "_sites", ByIdentity(sampling._Site))
    model, x = fitted_model(-(10**9))
    assert not sampling._sites
    model(x).backward()
    assert sampling._sites
