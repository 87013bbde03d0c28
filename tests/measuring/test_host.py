from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recoup.measuring import measure
from recoup.measuring.host import USUAL_HOST_SHARE, find_host_share, time_plain_step
from recoup.measuring.isolate import CallTiming
from recoup.measuring.meter import CpuMeter, Parts, Timing
from recoup.measuring.steps import TrainingStep


def call(device_s: float, host_s: float) -> CallTiming:
    return CallTiming(Timing(device_s, host_s), Timing(2 * device_s, 2 * host_s))


CALLS = [call(1.0, 10.0), call(4.0, 6.0)]
"""48 seconds of the host. At half of them 15 for the first call, and 12 for the second, which the device sets."""


def test_a_step_that_the_host_slows_down() -> None:
    assert find_host_share(CALLS, 1.0, lambda: Timing(device_s=28.0, host_s=24.0)) == 0.5


def test_a_step_that_the_device_slows_down() -> None:
    """The host waits for it, which looks like work; but then the step would take longer than it does."""
    assert find_host_share(CALLS, 1.0, lambda: Timing(device_s=28.0, host_s=36.0)) == pytest.approx(
        0.5, abs=1e-5
    )


def test_a_host_that_is_just_ahead_of_the_device() -> None:
    """The step says only that it takes no longer, the host says how long."""
    calls = [call(4.0, 8.0)] * 3
    assert find_host_share(calls, 0.0, lambda: Timing(device_s=36.0, host_s=32.4)) == pytest.approx(0.45)


def test_a_step_faster_than_its_operations_on_the_device() -> None:
    """That is noise: the host takes no longer than the device, as far as is known."""
    share = find_host_share([call(4.0, 10.0)], 1.0, lambda: Timing(device_s=11.0, host_s=24.0))
    assert share == pytest.approx(0.4, abs=1e-5)


def test_a_step_slower_than_its_calls_by_themselves() -> None:
    assert find_host_share(CALLS, 1.0, lambda: Timing(device_s=99.0, host_s=98.0)) == 1


def test_a_step_that_does_not_fit() -> None:
    assert find_host_share(CALLS, 0.0, lambda: None) == USUAL_HOST_SHARE


def test_no_step_is_run_where_the_device_sets_the_pace() -> None:
    def time_step() -> Timing:
        raise AssertionError

    assert find_host_share([call(4.0, 1.0), call(1.0, 1.01)], 5.0, time_step) == USUAL_HOST_SHARE


# In a measurement


class SlowHost(CpuMeter):
    """Each part keeps the device busy for one second, and the host, by itself, for four; a step takes the host 30."""

    def time(self, make_run: Callable[[], Parts], *, repeats: int = 1, warm_up: int = 0) -> list[Timing]:
        return [Timing(1.0, 4.0) for _ in super().time(make_run)]

    def time_step(self, run: Callable[[], Any]) -> Timing:
        super().time_step(run)
        return Timing(32.0, 30.0)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(5))
        self.num_steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_steps += 1
        for block in self.blocks:
            x = block(x)
        return x.mean()


def test_a_measurement_counts_the_hosts_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.import_module("recoup.measuring.measure"), "make_meter", lambda _: SlowHost()
    )
    # Five calls, forward and backward: the host takes 40 seconds for them by themselves, and 30 in a step.
    profile = measure(Counted(), torch.randn(4, 6), units="blocks.*")
    keeps = [unit.options[0] for unit in profile.problem.units[:5]]
    assert [(keep.forward_s, keep.backward_s) for keep in keeps] == [(3.0, 3.0)] * 5


def test_a_plain_step_does_not_train_the_model() -> None:
    model, x = Counted(), torch.randn(4, 6)
    before = [parameter.clone() for parameter in model.parameters()]

    def train(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter -= parameter.grad

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(train)
    assert time_plain_step(TrainingStep(model, x), SlowHost(), 0) == Timing(32.0, 30.0)
    assert model.num_steps == 2
    assert all(map(torch.equal, before, model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_plain_step_leaves_no_casts_behind() -> None:
    model, x = Counted(), torch.randn(4, 6)
    with torch.autocast("cpu", torch.float16):
        time_plain_step(TrainingStep(model, x), SlowHost(), 0)
        with torch.no_grad():
            model.blocks[0][0].weight.add_(1.0)
        first, second = (
            model.blocks[0](x),
            torch.nn.functional.linear(x, model.blocks[0][0].weight.clone(), model.blocks[0][0].bias).tanh(),
        )
    assert torch.equal(first, second)


def test_a_plain_step_that_may_not_run() -> None:
    model, x = Counted(), torch.randn(4, 6)
    meter = SlowHost()
    assert time_plain_step(TrainingStep(model, x), meter, meter.free_bytes() * 2) is None
    assert time_plain_step(TrainingStep(model, step=lambda: model(x).backward()), meter, 0) is None
    assert model.num_steps == 0


def test_a_plain_step_that_does_not_fit_after_all() -> None:
    class Failing(Counted):
        def forward(self, x: Tensor) -> Tensor:
            loss = super().forward(x)
            if self.num_steps == 2:
                raise torch.OutOfMemoryError("no room")
            return loss

    assert time_plain_step(TrainingStep(Failing(), torch.randn(4, 6)), SlowHost(), 0) is None
