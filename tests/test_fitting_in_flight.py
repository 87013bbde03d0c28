"""Stages of a pipeline: several micro-batches wait for their backwards."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup.errors import BudgetError, SampleError
from recoup.measuring import MemoryTracker
from recoup.plans.profile import Profile


def make_stage() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.GELU()) for _ in range(6))
    return nn.Sequential(*blocks)


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def run(stage: nn.Module, batches: list[Tensor]) -> None:
    """All forwards, then all backwards, the first first, as a pipeline's stage runs them at its fullest."""
    waiting = [loss_of(stage(batch)) for batch in batches]
    while waiting:
        waiting.pop(0).backward()


def test_what_all_micro_batches_hold_is_part_of_the_peak() -> None:
    stage, batch = make_stage(), torch.randn(256, 64)
    one = recoup.fit(make_stage(), batch, budget="1GiB", loss=loss_of, accumulates=True)
    four = recoup.fit(make_stage(), batch, budget="1GiB", loss=loss_of, accumulates=True, in_flight=4)
    held_bytes = (four.plan.predicted_bytes - one.plan.predicted_bytes) // 3
    # Of every block its input, and what lies around its tanh; and the loss.
    assert 0 < held_bytes - 6 * 3 * batch.nbytes <= 8
    # Forwards that wait have no gradient of the loss yet.
    assert four.plan.predicted_bytes - four.verification.peak_bytes == 3 * 4
    budget = (one.plan.predicted_bytes + four.plan.predicted_bytes) // 2
    fitted = recoup.fit(
        stage, batch, budget=budget, loss=loss_of, accumulates=True, in_flight=4, holds_output=False
    )
    assert not fitted.plan.keeps_everything
    assert fitted.plan.predicted_bytes - fitted.verification.peak_bytes == 3 * 4
    assert fitted.plan.predicted_bytes <= budget
    assert any("4 forwards are in flight" in note for note in fitted.plan.notes)
    assert Profile.from_json(fitted.profile.to_json()) == fitted.profile

    batches = [torch.randn(256, 64) for _ in range(4)]
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with MemoryTracker() as memory, warnings.catch_warnings():
        warnings.simplefilter("error")
        run(stage, batches)
    # Beside the tracked bytes: parameters, gradients and the batch, as in the plan.
    residents = fitted.profile.residents
    resident_bytes = residents.total_bytes + residents.gradient_bytes
    assert memory.peak_bytes + resident_bytes <= fitted.plan.predicted_bytes
    plain = make_stage()
    run(plain, batches)
    for one_of, other in zip(stage.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one_of.grad, other.grad)  # type: ignore[arg-type]


def test_a_budget_for_one_is_none_for_many() -> None:
    batch = torch.randn(256, 64)
    one = recoup.fit(make_stage(), batch, budget="1GiB", loss=loss_of, accumulates=True)
    with pytest.raises(BudgetError, match="The smallest feasible budget is"):
        recoup.fit(
            make_stage(), batch, budget=one.plan.predicted_bytes, loss=loss_of, accumulates=True, in_flight=64
        )


@pytest.mark.parametrize("in_flight", [0, True, 1.5])
def test_numbers_that_are_none(in_flight: Any) -> None:
    with pytest.raises(SampleError, match="in_flight must be a whole number of at least 1"):
        recoup.fit(make_stage(), torch.randn(8, 64), budget="1GiB", loss=loss_of, in_flight=in_flight)


def test_a_step_of_the_users_makes_its_own_forwards() -> None:
    stage, batch = make_stage(), torch.randn(8, 64)
    with pytest.raises(SampleError, match="in_flight= goes with a sample"):
        recoup.fit(stage, step=lambda: loss_of(stage(batch)).backward(), budget="1GiB", in_flight=2)
