"""The smallest batch size with nearly the best throughput, against every batch size tried by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from machines import HOST
from slowly import slow_but
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


@pytest.mark.parametrize(
    "budget", slow_but([700_000, 6_000_000], [700_000, 1_500_000, 3_000_000, 6_000_000, 50_000_000])
)
def test_as_good_as_trying_every_batch_size(profiles: dict[int, Any], budget: int) -> None:
    best = throughputs(profiles, budget)
    chosen = largest_batch(make, budget=budget, hardware=TOY, most=32)
    assert chosen.samples_per_second == pytest.approx(best[chosen.batch_size])
    fastest = max(batch.samples_per_second for batch in chosen.tried)
    assert fastest >= max(best.values()) * 0.999
    near = [batch.batch_size for batch in chosen.tried if batch.samples_per_second >= fastest / 1.01]
    assert chosen.batch_size == min(near)
    assert chosen.plan.predicted_bytes <= budget
    largest = max(batch.batch_size for batch in chosen.tried if batch.seconds)
    assert largest == max(best)
    assert len(chosen.tried) < 20


def test_what_it_says() -> None:
    chosen = largest_batch(make, budget=1_500_000, hardware=TOY, most=4)
    assert isinstance(chosen, BatchChoice)
    assert [batch.batch_size for batch in chosen.tried] == sorted(batch.batch_size for batch in chosen.tried)
    lines = str(chosen).splitlines()
    assert chosen.batch_size == 4
    assert lines[0].startswith("Batch size 4 within 1.43 MiB: 3,509 ")
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
            forward_transient_bytes=int(7 * factor),
            backward_transient_bytes=int(5 * factor),
        )

    between = _option_between(option(2), option(4), lambda low, high: (low + high) / 2)
    assert between == option(3)


def test_a_larger_batch_must_gain_one_per_cent() -> None:
    busy = replace(TOY, float32_flops_per_s=1e9, memory_bytes=2**30)
    chosen = largest_batch(make, budget="100%", hardware=busy)
    by_size = {batch.batch_size: batch for batch in chosen.tried}
    taken, largest = by_size[chosen.batch_size], chosen.tried[-1]
    # Four times the memory, for less than a hundredth more.
    assert largest.samples_per_second == max(batch.samples_per_second for batch in chosen.tried)
    assert 1 < largest.samples_per_second / taken.samples_per_second <= 1.01
    assert largest.predicted_bytes > 3.5 * taken.predicted_bytes
    below = max(size for size in by_size if size < chosen.batch_size)
    assert largest.samples_per_second / by_size[below].samples_per_second > 1.01
    assert (
        str(chosen)
        .splitlines()[0]
        .endswith("samples per second, estimated; larger batches gain less than 1 %")
    )


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
    budgets = [
        largest_batch(make, budget="100%", hardware=TOY, most=1, **given).plan.profile.residents.total_bytes
        for given in ({}, {"optimizer": adam}, {"optimizer": adam, "ranks": 8})  # type: ignore[arg-type]
    ]
    assert budgets[2] < budgets[0] < budgets[1]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def as_tuple_of_four(batch_size: int) -> tuple[Any, ...]:
    model, sample, loss = make(batch_size)
    return model, sample, loss, adam(model)


def as_dict(batch_size: int) -> dict[str, Any]:
    return dict(zip(("model", "sample", "loss", "optimizer"), as_tuple_of_four(batch_size), strict=True))


@pytest.mark.parametrize("given", slow_but([as_dict], [as_tuple_of_four, as_dict]))
def test_make_may_return_an_optimizer(given: Any) -> None:
    wanted = largest_batch(make, budget="3MB", hardware=TOY, most=4, optimizer=adam)
    assert wanted.plan.profile.residents.optimizer_bytes > 0
    assert largest_batch(given, budget="3MB", hardware=TOY, most=4) == wanted
    sgd = largest_batch(
        given,
        budget="3MB",
        hardware=TOY,
        most=4,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    assert sgd.plan.profile.residents.optimizer_bytes == 0


class Repeating(nn.Module):
    """Takes the number of samples beside one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(32) for _ in range(2)))

    def forward(self, x: Tensor, times: int) -> Tensor:
        return self.blocks(x.expand(times, -1, -1)).square().mean()


def repeating(batch_size: int) -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        return Repeating(), (torch.ones(1, 40, 32), batch_size)


def constant_tokens(batch_size: int) -> tuple[nn.Module, Any, Any]:
    model, _, loss = make(1)
    return model, torch.ones(batch_size, 64 // batch_size, 32, device="meta"), loss


@pytest.mark.parametrize("used", [repeating, constant_tokens])
def test_a_batch_size_that_shows_elsewhere_than_in_bytes(used: Any) -> None:
    chosen = largest_batch(used, budget="16MB", hardware=TOY, most=4)
    assert {1, 2, 4} <= {batch.batch_size for batch in chosen.tried}


class TestMakeIgnoresItsArgument:
    def test_the_same_sample_each_time(self) -> None:
        with pytest.raises(
            SampleError,
            match=r"make\(1\) and make\(2\) return samples of the same size \(\[8, 40, 32\]\): let make use its"
            r" argument, which is the batch size\.$",
        ):
            largest_batch(lambda size: make(8), budget="16MB", hardware=TOY)

    def test_on_the_device_itself(self) -> None:
        made = make(8, "cpu")
        with pytest.raises(SampleError, match=r"make\(1\) and make\(2\).* \(\[8, 40, 32\]\)"):
            largest_batch(lambda size: made, budget="16MB")

    def test_also_where_nothing_fits(self) -> None:
        with pytest.raises(SampleError, match=r"make\(1\) and make\(2\).* \(\[512, 40, 32\]\)"):
            largest_batch(lambda size: make(512), budget="1MB", hardware=TOY)

    def test_several_tensors_in_a_dict(self) -> None:
        def fixed(size: int) -> dict[str, Any]:
            model, sample, _ = make(8)
            return {"model": model, "sample": {"input": sample}, "loss": mean_square}

        with pytest.raises(SampleError, match=r"make\(1\) and make\(2\)"):
            largest_batch(fixed, budget="16MB", hardware=TOY)

    def test_no_batch_is_larger_than_the_data(self) -> None:
        with pytest.raises(SampleError, match=r"make\(4\) and make\(8\).*no larger batches, give most=4\.$"):
            largest_batch(lambda size: make(min(size, 4)), budget="16MB", hardware=TOY)
        chosen = largest_batch(lambda size: make(min(size, 4)), budget="16MB", hardware=TOY, most=4)
        assert chosen.batch_size == 4


class TestErrors:
    def test_not_even_one_sample(self) -> None:
        with pytest.raises(BudgetError, match=r"the budget is 97.7 KiB"):
            largest_batch(make, budget=100_000, hardware=TOY)

    def test_make_must_return_model_and_sample(self) -> None:
        with pytest.raises(
            SampleError, match=r"make\(1\) returned a Linear. It should return \(model, sample\)"
        ):
            largest_batch(lambda size: nn.Linear(1, 1), budget="1GiB", hardware=TOY)
        with pytest.raises(SampleError, match=r"make\(1\) returned 1 things"):
            largest_batch(lambda size: (nn.Linear(1, 1),), budget="1GiB", hardware=TOY)
        with pytest.raises(
            SampleError, match="needs a sample and perhaps a loss; make returned step= instead"
        ):
            largest_batch(lambda size: {"model": nn.Linear(1, 1), "step": print}, budget="1GiB")

    def test_unknown_hardware_and_ranks(self) -> None:
        with pytest.raises(HardwareError, match="Known are"):
            largest_batch(make, budget="1GiB", hardware="H900")
        with pytest.raises(SampleError, match="ranks=2 goes with hardware="):
            largest_batch(make, budget="1GiB", ranks=2)
        with pytest.raises(SampleError, match="most must be a whole number"):
            largest_batch(make, budget="1GiB", hardware=TOY, most=0)
