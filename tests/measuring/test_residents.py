from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recoup.measuring import measure

BATCH, TARGETS = torch.randn(64, 32), torch.randn(64, 8)
UNUSED = torch.randn(1000, 32)


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 8))


def other_bytes(model: nn.Module, step: Any, **more: Any) -> int:
    return measure(model, step=step, **more).residents.other_bytes


def compare(output: Tensor) -> Tensor:
    return F.mse_loss(output, TARGETS)


class TestWhatAStepReads:
    def test_globals_of_functions_that_it_calls(self) -> None:
        model = make_model()
        assert other_bytes(model, lambda: compare(model(BATCH)).backward()) == BATCH.nbytes + TARGETS.nbytes

    def test_a_batch_in_containers_each_storage_once(self) -> None:
        model, batch = make_model(), {"x": BATCH.clone()}
        batch["rows"] = batch["x"][:16]

        def step() -> None:
            (model(batch["x"]).sum() + model(batch["rows"]).sum()).backward()

        assert other_bytes(model, step) == BATCH.nbytes

    def test_not_what_it_only_can_reach(self) -> None:
        """Such as a data set, or the batch on another device."""
        model, elsewhere = make_model(), torch.empty(64, 32, device="meta")

        def step() -> None:
            assert len(UNUSED) == 1000
            (model(BATCH).sum() + len(elsewhere + 1)).backward()

        assert other_bytes(model, step) == BATCH.nbytes

    def test_not_parameters_gradients_and_state(self) -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parameters = list(model.parameters())
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        gradients = [parameter.grad for parameter in parameters]
        optimizer.averages = [torch.zeros_like(parameter) for parameter in parameters]  # type: ignore[attr-defined]

        def step() -> None:
            compare(model(BATCH)).backward()
            for average, parameter, gradient in zip(
                optimizer.averages,  # type: ignore[attr-defined]
                parameters,
                gradients,
                strict=True,
            ):
                average.add_(parameter.grad).add_(gradient).add_(parameter.detach())
            optimizer.step()

        residents = measure(model, step=step, optimizer=optimizer).residents
        assert residents.other_bytes == BATCH.nbytes + TARGETS.nbytes
        assert residents.optimizer_bytes == residents.parameter_bytes

    def test_of_a_loss(self) -> None:
        profile = measure(make_model(), BATCH, loss=compare)
        assert profile.residents.other_bytes == BATCH.nbytes + TARGETS.nbytes
