"""How much of the host's time counts: by itself a unit's call takes the host longer than in the middle of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from recoup.measuring.isolate import CallTiming

__all__ = ["USUAL_HOST_SHARE", "find_host_share"]

USUAL_HOST_SHARE = 0.6
"""Blocks of decoders took between 0.5 and 0.7: for each call by itself autograd starts anew, on a cold processor."""
_MATTERS = 0.02
_NUM_HALVINGS = 20


def find_host_share(calls: Sequence[CallTiming], code_s: float, real_s: Callable[[], float | None]) -> float:
    """The share of the host's time at which the calls of a plain step take as long as a real one.

    Where the device sets the pace whatever the share, no step is run to find out.

    Args:
        calls: all calls of a plain step.
        code_s: seconds of the code between them.
        real_s: runs a plain step and returns its seconds; None where it does not fit.

    >>> from recoup.measuring.meter import Timing
    >>> call = CallTiming(Timing(device_s=1.0, host_s=4.0), Timing(device_s=1.0, host_s=6.0))
    >>> round(find_host_share([call, call], 2.0, lambda: 12.0), 3)
    0.5
    """

    def step_s(share: float) -> float:
        seconds = [call.seconds(share) for call in calls]
        return code_s + sum(call.forward_s + call.backward_s for call in seconds)

    if step_s(1.0) <= (1 + _MATTERS) * step_s(0.0):
        return USUAL_HOST_SHARE
    wanted_s = real_s()
    if wanted_s is None:
        return USUAL_HOST_SHARE
    low, high = 0.0, 1.0
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if step_s(middle) < wanted_s else (low, middle)
    return (low + high) / 2
