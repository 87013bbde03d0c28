"""The pace of a step: a call takes the host longer by itself than in the middle of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from recoup.devices.meter import Meter, Timing
from recoup.devices.processes import num_processes
from recoup.measuring.unit.one_unit import CallSeconds, CallTiming
from recoup.model.step import TrainingStep
from recoup.tensors import needing_gradient

__all__ = ["ESTIMATED_PACE", "USUAL_PACE", "Pace", "find_pace", "time_plain_step"]

_COULD_MATTER = 1.5
"""Factor of the host's time with which it might set the pace: a call that synchronizes takes the host about as long as
the device."""
_MATTERS = 0.02
"""Seconds that differ by a smaller share count as equal."""
_NUM_HALVINGS = 20
_NUM_STEPS = 2
_ENOUGH_S = 0.15
"""After a step that takes this long no second one is run. Being the first it may be too slow, but not too fast."""


class Pace(NamedTuple):
    """How a call's time in a step differs from its time by itself.

    Attributes:
        host_share: share of the host's time for a kept call that it takes in a step.
        device_share: share of the device's time for a call that it takes in a step. Below 1 where the device waits for
            the host, because the call synchronizes.
    """

    host_share: float
    device_share: float = 1.0

    def seconds(self, call: CallTiming, keep: CallTiming | None) -> CallSeconds:
        """Seconds of a call in a step.

        Args:
            call: under some recipe, by itself.
            keep: the same call, kept, if known. The host's seconds beyond it count in full: a recipe runs code a second
                time, and code of ours for each saved tensor.
        """
        keep = keep or call
        return CallSeconds(
            self._seconds(call.forward, keep.forward), self._seconds(call.backward, keep.backward)
        )

    def _seconds(self, timing: Timing, keep: Timing) -> float:
        kept_s = min(keep.host_s, timing.host_s) if keep.host_s else timing.host_s
        return max(self.device_share * timing.device_s, timing.host_s - (1 - self.host_share) * kept_s)


USUAL_PACE = Pace(host_share=0.6)
"""Measured on decoder blocks: 0.5 to 0.8. For a call by itself autograd starts anew, on a cold processor."""
ESTIMATED_PACE = Pace(host_share=1.0)
"""The host's seconds of an estimate are those of a step."""


def find_pace(calls: Sequence[CallTiming], code_s: float, time_step: Callable[[], Timing | None]) -> Pace:
    """The pace at which a step runs calls that were timed by themselves.

    No step is run where the device sets the pace even with all of the host's time, and more. A step that the device
    slows down gives only an upper bound of the host's time: the largest share that agrees with it is returned. A step
    that is faster than the device's time for its calls shows that these calls synchronize, and waited for the host.

    Args:
        calls: all calls of a plain step.
        code_s: seconds of the code between them.
        time_step: times a plain step; None where it does not fit.

    >>> call = CallTiming(Timing(device_s=1.0, host_s=4.0), Timing(device_s=1.0, host_s=6.0))
    >>> find_pace([call, call], 2.0, lambda: Timing(device_s=12.0, host_s=10.0))
    Pace(host_share=0.5, device_share=1.0)
    """

    def calls_s(pace: Pace) -> float:
        seconds = [pace.seconds(call, call) for call in calls]
        return sum(call.forward_s + call.backward_s for call in seconds)

    device_s = calls_s(Pace(0.0))
    if code_s + calls_s(Pace(_COULD_MATTER)) <= (1 + _MATTERS) * (code_s + device_s):
        return USUAL_PACE
    real = time_step()
    if real is None:
        return USUAL_PACE
    wanted_s = max(0.0, real.device_s - code_s)
    device_share = min(1.0, wanted_s / device_s) if device_s else 1.0
    low, high = 0.0, min(1.0, real.host_s / sum(call.forward.host_s + call.backward.host_s for call in calls))
    if code_s + calls_s(Pace(high, device_share)) <= (1 + _MATTERS) * real.device_s:
        return Pace(high, device_share)
    # Scaled to the step, the device's time leaves nothing for the host: allow a little more.
    most_s = wanted_s if device_share == 1.0 else (1 + _MATTERS) * wanted_s
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if calls_s(Pace(middle, device_share)) <= most_s else (low, middle)
    return Pace(low, device_share)


def time_plain_step(step: TrainingStep, meter: Meter, plain_bytes: int) -> Timing | None:
    """Times the plain step; None where it does not fit, where other processes would have to take part, or for step=.

    Args:
        step: to run as it is. A callable of the user's is not run: it may train the model.
        meter: of the device.
        plain_bytes: that the step allocates beside what is allocated already.
    """
    if step.step is not None or step.shards or num_processes() > 1 or plain_bytes > meter.free_bytes():
        return None
    trained = needing_gradient(list(step.model.parameters()))

    def run() -> None:
        output, loss = step.forward()
        # Not loss.backward(): hooks on gradients could step an optimizer.
        torch.autograd.grad(loss, trained, allow_unused=True)
        del output

    timings: list[Timing] = []
    try:
        while len(timings) < _NUM_STEPS and sum(timing.device_s for timing in timings) < _ENOUGH_S:
            torch.clear_autocast_cache()
            timings.append(meter.time_step(run))
    except torch.OutOfMemoryError:
        timings.clear()
    torch.clear_autocast_cache()
    if not timings:
        meter.make_room()
        return None
    return Timing(min(timing.device_s for timing in timings), min(timing.host_s for timing in timings))
