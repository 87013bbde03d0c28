from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup.measuring import MemoryTracker


class Replacing(torch.optim.Optimizer):
    """Makes new tensors for its state in every step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["mean"] = state.get("mean", torch.zeros_like(parameter)) * 0.9
            parameter.sub_(state["mean"].add_(parameter.grad))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))


class TestOptimizerState:
    X = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))

    def real_peak_bytes(self, model: nn.Module, step: Any) -> int:
        """When state has grown to its full size, in which no step adds to it."""
        held = sum(parameter.nbytes for parameter in model.parameters()) + self.X.nbytes
        with MemoryTracker() as memory:
            for _ in range(6):
                memory.reset_peak()
                step()
        return memory.peak_bytes + held

    def test_a_history_that_grows(self) -> None:
        """Of LBFGS, whether it is fitted by a step or by a sample, and whether or not its history has grown."""
        model = make_model()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3, history_size=4)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(self.X).square().mean()
            loss.backward()
            return loss

        def step() -> None:
            optimizer.step(closure)

        def verified_bytes(**subject: Any) -> int:
            fitted = recoup.fit(model, budget="1GiB", optimizer=optimizer, race=False, **subject)
            recoup.remove(model)
            assert fitted.verification is not None
            return fitted.verification.peak_bytes

        sample = {"sample": self.X, "loss": lambda output: output.square().mean()}
        found = [verified_bytes(step=step), verified_bytes(**sample)]
        peak_bytes = self.real_peak_bytes(model, step)
        assert len(optimizer.state[model[0][0].weight]["old_dirs"]) == 4
        found += [verified_bytes(step=step), verified_bytes(**sample)]
        assert found == pytest.approx([peak_bytes] * 4, rel=0.01)

    def test_tensors_that_are_replaced(self) -> None:
        model = make_model()
        optimizer = Replacing(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            model(self.X).square().mean().backward()
            optimizer.step()

        fitted = recoup.fit(model, step=step, budget="1GiB", optimizer=optimizer, race=False)
        recoup.remove(model)
        assert fitted.verification is not None
        assert fitted.verification.peak_bytes == pytest.approx(self.real_peak_bytes(model, step), rel=0.01)
