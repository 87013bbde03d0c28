from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recoup.devices.meter import CpuMeter, Parts, Timing
from recoup.measuring import measure
from recoup.measuring.unit.one_unit import CallSeconds, CallTiming
from recoup.measuring.unit.pace import USUAL_PACE, Pace, find_pace, time_plain_step
from recoup.model.step import TrainingStep


def call(device_s: float, host_s: float) -> CallTiming:
    return CallTiming(Timing(device_s, host_s), Timing(2 * device_s, 2 * host_s))


CALLS = [call(1.0, 10.0), call(4.0, 6.0)]
"""48 seconds of the host. At half of them 15 for the first call, and 12 for the second, which the device sets."""


def plain_s(calls: list[CallTiming], code_s: float, pace: Pace) -> float:
    """What a plain step takes at a pace."""
    seconds = [pace.seconds(call, call) for call in calls]
    return code_s + sum(call.forward_s + call.backward_s for call in seconds)


def test_a_step_that_the_host_slows_down() -> None:
    assert find_pace(CALLS, 1.0, lambda: Timing(device_s=28.0, host_s=24.0)) == Pace(0.5)


def test_a_step_that_the_device_slows_down() -> None:
    """The host waits for it, which looks like work; but then the step would take longer than it does."""
    pace = find_pace(CALLS, 1.0, lambda: Timing(device_s=28.0, host_s=36.0))
    assert pace == pytest.approx((0.5, 1.0), abs=1e-5)


def test_a_host_that_is_just_ahead_of_the_device() -> None:
    """The step says only that it takes no longer, the host says how long."""
    calls = [call(4.0, 8.0)] * 3
    pace = find_pace(calls, 0.0, lambda: Timing(device_s=36.0, host_s=32.4))
    assert pace == pytest.approx((0.45, 1.0))


@pytest.mark.parametrize(
    ("calls", "code_s", "real"),
    [
        ([call(4.0, 10.0)], 1.0, Timing(11.7, 24.0)),
        ([call(4.0, 3.9)], 1.0, Timing(10.4, 10.3)),
        ([call(4.0, 4.0)], 6.0, Timing(9.0, 9.0)),
        ([call(4.0, 3.9), call(1.0, 4.0)], 0.0, Timing(12.0, 11.9)),
    ],
)
def test_a_step_faster_than_its_calls_on_the_device(
    calls: list[CallTiming], code_s: float, real: Timing
) -> None:
    """By themselves the calls wait for the device, which then waits for the host, longer than in a step."""
    pace = find_pace(calls, code_s, lambda: real)
    assert pace.device_share < 1
    assert real.device_s <= plain_s(calls, code_s, pace) + 1e-9
    assert plain_s(calls, code_s, pace) <= 1.02 * real.device_s


def test_a_call_that_waits_for_the_device() -> None:
    """The host is never busy for longer than the device, yet a step is run to see how long they wait in it."""
    pace = find_pace([call(4.0, 3.8)], 1.0, lambda: Timing(device_s=10.6, host_s=9.0))
    assert pace == pytest.approx((9.0 / 11.4, 0.8))


def test_calls_that_take_the_device_no_time() -> None:
    assert find_pace([call(0.0, 1.0)], 0.0, lambda: Timing(device_s=1.0, host_s=1.5)) == pytest.approx(
        (1 / 3, 1.0), abs=1e-5
    )


def test_the_slower_of_host_and_device_counts() -> None:
    timing = CallTiming(Timing(device_s=3.0, host_s=4.0), Timing(device_s=1.0, host_s=6.0))
    assert Pace(0.5).seconds(timing, timing) == CallSeconds(3.0, 3.0)
    assert Pace(1.0).seconds(timing, timing) == CallSeconds(4.0, 6.0)
    assert Pace(0.0).seconds(timing, timing) == CallSeconds(3.0, 1.0)
    assert Pace(0.0, device_share=0.5).seconds(timing, timing) == CallSeconds(1.5, 0.5)


def test_what_a_recipe_takes_the_host_beyond_keeping_counts_in_full() -> None:
    keep = CallTiming(Timing(1.0, 4.0), Timing(2.0, 6.0))
    replayed = CallTiming(Timing(1.0, 5.0), Timing(3.0, 14.0))
    assert Pace(0.5).seconds(replayed, keep) == CallSeconds(3.0, 11.0)
    # Noise does not let a call take the host less time than its share.
    faster = CallTiming(Timing(1.0, 3.0), Timing(2.0, 2.0))
    assert Pace(0.5).seconds(faster, keep) == CallSeconds(1.5, 2.0)


def test_a_kept_call_that_is_not_known() -> None:
    replayed = CallTiming(Timing(1.0, 5.0), Timing(3.0, 14.0))
    unknown = CallTiming(Timing(1.0, 0.0), Timing(2.0, 0.0))
    for keep in (None, unknown):
        assert Pace(0.5).seconds(replayed, keep) == CallSeconds(2.5, 7.0)


def test_a_step_slower_than_its_calls_by_themselves() -> None:
    assert find_pace(CALLS, 1.0, lambda: Timing(device_s=99.0, host_s=98.0)) == Pace(1.0)


def test_a_step_that_does_not_fit() -> None:
    assert find_pace(CALLS, 0.0, lambda: None) == USUAL_PACE


def test_no_step_is_run_where_the_device_sets_the_pace() -> None:
    def time_step() -> Timing:
        raise AssertionError

    assert find_pace([call(4.0, 2.6), call(1.0, 0.7)], 5.0, time_step) == USUAL_PACE


# In a measurement


class SlowHost(CpuMeter):
    """Each part keeps the device busy for one second, and the host, by itself, for four; a step takes the host 30."""

    def time(self, make_run: Callable[[], Parts], *, repeats: int = 1, warm_up: int = 0) -> list[Timing]:
        return [Timing(1.0, 4.0) for _ in super().time(make_run)]

    def time_step(self, run: Callable[[], Any]) -> Timing:
        super().time_step(run)
        return Timing(32.0, 30.0)


class QuickHost(SlowHost):
    """A step takes milliseconds, and the first one a little longer."""

    num_steps = 0

    def time_step(self, run: Callable[[], Any]) -> Timing:
        super().time_step(run)
        self.num_steps += 1
        return Timing(0.032, 0.030) if self.num_steps > 1 else Timing(0.035, 0.034)


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


def test_what_a_replay_takes_beyond_its_forward_is_in_the_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slowing(CpuMeter):
        """Each thing that is timed takes four times as long as the one before."""

        next_s = 1.0

        def time(self, make_run: Callable[[], Parts], *, repeats: int = 1, warm_up: int = 0) -> list[Timing]:
            timings = []
            for _ in super().time(make_run):
                timings.append(Timing(self.next_s, 0.0))
                self.next_s *= 4
            return timings

    monkeypatch.setattr(
        importlib.import_module("recoup.measuring.measure"), "make_meter", lambda _: Slowing()
    )
    profile = measure(Counted(), torch.randn(4, 6), units="blocks.*")
    keep, *_, recompute = profile.problem.units[0].options
    assert (keep.name, recompute.name, recompute.again_s) == ("keep", "recompute", 0.0)
    assert recompute.backward_s == 4 * recompute.forward_s == 16 * keep.backward_s == 64 * keep.forward_s
    assert keep.again_s == pytest.approx((64 - 4 - 0.999) * keep.forward_s)


def test_a_plain_step_does_not_train_the_model() -> None:
    model, x = Counted(), torch.randn(4, 6)
    before = [parameter.clone() for parameter in model.parameters()]

    def train(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter -= parameter.grad

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(train)
    assert time_plain_step(TrainingStep(model, x), QuickHost(), 0) == Timing(0.032, 0.030)
    assert model.num_steps == 2
    assert all(map(torch.equal, before, model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_long_plain_step_runs_once() -> None:
    model = Counted()
    assert time_plain_step(TrainingStep(model, torch.randn(4, 6)), SlowHost(), 0) == Timing(32.0, 30.0)
    assert model.num_steps == 1


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

    assert time_plain_step(TrainingStep(Failing(), torch.randn(4, 6)), QuickHost(), 0) is None
