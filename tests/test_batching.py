"""The batch size with the best throughput, against every batch size tried by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from machines import HOST
from torch import Tensor, nn

import recoup
from recoup.batching import BatchChoice, _option_between, largest_batch
from recoup.errors import BudgetError, HardwareError, SampleError
from recoup.measuring import measure
from recoup.planning import Option

# Small operations are bound by their start, larger ones by their bytes: larger batches pay, until memory is short.
TOY = replace(
    HOST, name="toy", memory_bytes=2**24, float32_flops_per_s=5e11, half_flops_per_s=1e12, latency_s=2e-5
)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def make(batch_size: int, device: str = "meta") -> tuple[nn.Module, Tensor, Any]:
    with torch.device(device):
        model = nn.Sequential(*(Block(32) for _ in range(4)))
        return model, torch.ones(batch_size, 40, 32), mean_square


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


@pytest.fixture(scope="module")
def profiles() -> dict[int, Any]:
    return {
        size: measure(model, sample, loss=loss, hardware=TOY)
        for size in range(1, 33)
        for model, sample, loss in [make(size)]
    }


def throughputs(profiles: dict[int, Any], budget: int) -> dict[int, float]:
    found = {}
    for size, profile in profiles.items():
        try:
            found[size] = size / recoup.plan(profile, budget).predicted_s
        except BudgetError:
            break
    return found


@pytest.mark.parametrize("budget", [700_000, 1_500_000, 3_000_000, 6_000_000, 50_000_000])
def test_as_good_as_trying_every_batch_size(profiles: dict[int, Any], budget: int) -> None:
    best = throughputs(profiles, budget)
    chosen = largest_batch(make, budget=budget, hardware=TOY, most=32)
    assert chosen.samples_per_second == pytest.approx(best[chosen.batch_size])
    assert chosen.samples_per_second >= max(best.values()) * 0.999
    assert chosen.plan.predicted_bytes <= budget
    largest = max(batch.batch_size for batch in chosen.tried if batch.seconds)
    assert largest == max(best)
    assert len(chosen.tried) < 20


def test_what_it_says() -> None:
    chosen = largest_batch(make, budget=1_500_000, hardware=TOY, most=4)
    assert isinstance(chosen, BatchChoice)
    assert [batch.batch_size for batch in chosen.tried] == sorted(batch.batch_size for batch in chosen.tried)
    lines = str(chosen).splitlines()
    assert lines[0].startswith(f"Batch size {chosen.batch_size} within 1.43 MiB: ")
    assert lines[0].endswith(" samples per second, estimated")
    assert sum(line.endswith(" <") for line in lines) == 1
    assert len(lines) == 1 + len(chosen.tried)


def test_between_two_batch_sizes_every_cost_lies_on_a_line() -> None:
    def option(factor: float) -> Option:
        return Option(
            "keep",
            forward_s=1 * factor,
            backward_s=2 * factor,
            again_s=0.5 * factor,
            held_bytes=int(10 * factor),
            freed_input_bytes=int(3 * factor),
            forward_transient_bytes=int(7 * factor),
            backward_transient_bytes=int(5 * factor),
        )

    between = _option_between(option(2), option(4), lambda low, high: (low + high) / 2)
    assert between == option(3)


def test_it_ends_where_larger_batches_gain_nothing() -> None:
    slow = replace(TOY, float32_flops_per_s=1e8)
    chosen = largest_batch(make, budget="100%", hardware=slow)
    assert chosen.batch_size <= 16
    assert max(batch.batch_size for batch in chosen.tried) <= 16
    assert chosen.plan.budget_bytes == 2**24


def test_measured_on_the_device_itself() -> None:
    chosen = largest_batch(lambda size: make(size, "cpu"), budget="900kB", most=6)
    assert not chosen.plan.profile.seconds_are_estimates
    assert chosen.plan.predicted_bytes <= 900_000
    model, sample, loss = make(chosen.batch_size, "cpu")
    recoup.apply(model, chosen.plan)
    assert recoup.verify(model, chosen.plan, sample, loss=loss).peak_bytes <= 900_000


def test_optimizer_and_ranks_count() -> None:
    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters())

    budgets = [
        largest_batch(make, budget="100%", hardware=TOY, most=1, **given).plan.profile.residents.total_bytes
        for given in ({}, {"optimizer": adam}, {"optimizer": adam, "ranks": 8})  # type: ignore[arg-type]
    ]
    assert budgets[2] < budgets[0] < budgets[1]


class TestErrors:
    def test_not_even_one_sample(self) -> None:
        with pytest.raises(BudgetError, match=r"the budget is 97.7 KiB"):
            largest_batch(make, budget=100_000, hardware=TOY)

    def test_make_must_return_model_and_sample(self) -> None:
        with pytest.raises(SampleError, match=r"must return \(model, sample\).*got Linear"):
            largest_batch(lambda size: nn.Linear(1, 1), budget="1GiB", hardware=TOY)  # type: ignore[arg-type, return-value]
        with pytest.raises(SampleError, match="got a tuple of 1"):
            largest_batch(lambda size: (nn.Linear(1, 1),), budget="1GiB", hardware=TOY)  # type: ignore[arg-type, return-value]

    def test_unknown_hardware_and_ranks(self) -> None:
        with pytest.raises(HardwareError, match="Known are"):
            largest_batch(make, budget="1GiB", hardware="H900")
        with pytest.raises(SampleError, match="ranks=2 goes with hardware="):
            largest_batch(make, budget="1GiB", ranks=2)
        with pytest.raises(SampleError, match="most must be a whole number"):
            largest_batch(make, budget="1GiB", hardware=TOY, most=0)
