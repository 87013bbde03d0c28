"""`fit_prepared` behind Accelerate's `prepare`, and batches that shrink only where no plan fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import find_executable_batch_size
from everyday.subjects import assert_same, state_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from recoup.engines import is_applied
from recoup.errors import BudgetError
from recoup.integrations.accelerate import BatchTooLargeError, fit_prepared


def block() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))


def prepared(batch_size: int, **options: Any) -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), *(block() for _ in range(4)), nn.Linear(32, 10))
    data = TensorDataset(torch.randn(512, 16), torch.randint(10, (512,)))
    AcceleratorState._reset_state(reset_partial_state=True)  # one precision for each process, says Accelerate
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    return accelerator, *accelerator.prepare(model, optimizer, DataLoader(data, batch_size=batch_size))


def train(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> list[Any]:
    for inputs, targets in loader:
        accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model)


@pytest.mark.parametrize("options", [{}, {"mixed_precision": "bf16", "gradient_accumulation_steps": 2}])
def test_weights_are_those_without_a_plan(options: dict[str, Any]) -> None:
    plain = train(*prepared(256, **options))
    accelerator, model, optimizer, loader = prepared(256, **options)
    batch = next(iter(DataLoader(loader.dataset, batch_size=256)))
    fitted = fit_prepared(
        accelerator,
        model,
        batch,
        budget="1.3MiB",
        loss=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        race=False,
    )
    assert fitted.verification is not None
    assert fitted.verification.peak_bytes <= fitted.plan.budget_bytes
    assert_same(plain, train(accelerator, model, optimizer, loader))
    assert is_applied(model)


def test_the_batch_shrinks_only_where_no_plan_fits() -> None:
    tried: list[tuple[int, bool]] = []

    @find_executable_batch_size(starting_batch_size=512)
    def run(batch_size: int) -> int:
        accelerator, model, optimizer, _ = prepared(batch_size)
        sample = (torch.randn(batch_size, 16), torch.randint(10, (batch_size,)))
        tried.append((batch_size, False))
        fitted = fit_prepared(
            accelerator,
            model,
            sample,
            budget="1.4MiB",
            loss=nn.CrossEntropyLoss(),
            optimizer=optimizer,
            race=False,
        )
        tried[-1] = (batch_size, any(label != "keep" for _, label in fitted.plan.describe_units()))
        return batch_size

    found = run()
    assert found < 512
    assert tried[-1] == (found, True)  # it fits because something is recomputed
    assert len(tried) > 1


def test_a_refusal_is_a_budget_error_too() -> None:
    accelerator, model, _, _ = prepared(64)
    with pytest.raises(BatchTooLargeError, match=r"smallest feasible budget.*out of memory\.$") as caught:
        fit_prepared(accelerator, model, torch.randn(64, 16), budget=1000, loss=torch.Tensor.mean)
    assert isinstance(caught.value, BudgetError)
    assert caught.value.smallest_bytes > 1000
