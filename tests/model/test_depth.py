"""Layers that are skipped at random: the measured step skips none, and what comes after it is as if nothing had run."""

from __future__ import annotations

import random

import numpy as np
import torch
from tally import Tally
from torch import Tensor, nn

import recoup
from recoup.devices.tracker import MemoryTracker

FORWARDS = Tally()


class Layers(nn.Module):
    """Skips layers at random, or always the same."""

    def __init__(self, *, at_random: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6))
        self.at_random = at_random

    def forward(self, x: Tensor) -> Tensor:
        FORWARDS.add()
        for index, layer in enumerate(self.layers):
            if (torch.rand(()).item() if self.at_random else index % 2) >= 0.4:
                x = layer(x)
        return x.square().mean()


def test_a_fitted_model_holds_its_budget_whatever_it_skips() -> None:
    torch.manual_seed(1)
    model, x = Layers(), torch.randn(256, 16)
    profile = recoup.measure(model, x)
    assert len({unit.module for unit in profile.units if unit.module}) == 6
    budget = (recoup.minimum_budget(profile) + profile.plain_bytes) // 2
    torch_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    fitted = recoup.fit(model, x, budget=budget)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert np.array_equal(np.random.get_state()[1], numpy_state[1])
    assert fitted.verification is not None
    assert fitted.verification.gradients == "bit-equal"
    resident_bytes = fitted.profile.residents.total_bytes
    for seed in range(20):
        torch.manual_seed(seed)
        with MemoryTracker() as memory:
            model(x).backward()
        model.zero_grad()
        assert memory.peak_bytes + resident_bytes <= budget


def test_recorded_steps_of_the_users_skip_none() -> None:
    """Also after the step that lets an optimizer make its state."""
    torch.manual_seed(1)
    model, x = Layers(), torch.randn(256, 16)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()

    fitted = recoup.fit(model, step=step, budget="1GiB", optimizer=optimizer)
    assert fitted.verification is not None
    assert fitted.plan.predicted_bytes == fitted.verification.peak_bytes


def test_layers_that_are_never_called_are_soon_given_up() -> None:
    numbers = []
    for skips in (False, True):
        model = Layers(at_random=False)
        if not skips:
            model.layers = nn.ModuleList([*model.layers][1::2] * 2)  # the even ones are not called
        FORWARDS.take()
        recoup.measure(model, torch.randn(64, 16))
        numbers.append(len(FORWARDS.take()))
    assert numbers[1] == numbers[0] + 5
