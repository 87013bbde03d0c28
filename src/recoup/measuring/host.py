"""How much of the host's time counts: by itself a unit's call takes the host longer than in the middle of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from recoup.measuring.isolate import CallTiming
from recoup.measuring.meter import Meter, Timing
from recoup.measuring.steps import TrainingStep

__all__ = ["USUAL_HOST_SHARE", "find_host_share", "time_plain_step"]

USUAL_HOST_SHARE = 0.6
"""Blocks of decoders took between 0.5 and 0.7: for each call by itself autograd starts anew, on a cold processor."""
_MATTERS = 0.02
"""Seconds that differ by less are the same."""
_NUM_HALVINGS = 20
_NUM_STEPS = 2


def find_host_share(
    calls: Sequence[CallTiming], code_s: float, time_step: Callable[[], Timing | None]
) -> float:
    """The share of the host's time for calls by themselves that it takes for them in a step.

    Where the device sets the pace even if all of it counted, no step is run to find out. A step that the device slows
    down tells no more than that the host takes no longer: the share is the largest that agrees with it.

    Args:
        calls: all calls of a plain step.
        code_s: seconds of the code between them.
        time_step: runs a plain step; returns how long it takes, and how much of that the host is busy with it. None
            where it does not fit.

    >>> call = CallTiming(Timing(device_s=1.0, host_s=4.0), Timing(device_s=1.0, host_s=6.0))
    >>> find_host_share([call, call], 2.0, lambda: Timing(device_s=12.0, host_s=10.0))
    0.5
    """

    def step_s(share: float) -> float:
        seconds = [call.seconds(share) for call in calls]
        return code_s + sum(call.forward_s + call.backward_s for call in seconds)

    if step_s(1.0) <= (1 + _MATTERS) * step_s(0.0):
        return USUAL_HOST_SHARE
    real = time_step()
    if real is None:
        return USUAL_HOST_SHARE
    low, high = 0.0, min(1.0, real.host_s / sum(call.forward.host_s + call.backward.host_s for call in calls))
    if step_s(high) <= (1 + _MATTERS) * real.device_s:
        return high
    wanted_s = max(real.device_s, step_s(0.0))
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if step_s(middle) <= wanted_s else (low, middle)
    return low


def time_plain_step(step: TrainingStep, meter: Meter, plain_bytes: int) -> Timing | None:
    """Times the plain step; None where it does not fit, or where other processes would have to take part.

    Args:
        step: to run as it is. A callable of the user's is not: it may train the model.
        meter: of the device.
        plain_bytes: what the step takes beside what lives already.
    """
    if step.step is not None or _num_processes() > 1 or plain_bytes > meter.free_bytes():
        return None
    trained = [parameter for parameter in step.model.parameters() if parameter.requires_grad]

    def run() -> None:
        output, loss = step.forward()
        # Not loss.backward(): hooks that wait for gradients could step an optimizer.
        torch.autograd.grad(loss, trained, allow_unused=True)
        del output

    timings = []
    try:
        for _ in range(_NUM_STEPS):
            torch.clear_autocast_cache()
            timings.append(meter.time_step(run))
    except torch.OutOfMemoryError:
        timings.clear()
    torch.clear_autocast_cache()
    if not timings:
        meter.make_room()
        return None
    return Timing(min(timing.device_s for timing in timings), min(timing.host_s for timing in timings))


def _num_processes() -> int:
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if is_distributed else 1
