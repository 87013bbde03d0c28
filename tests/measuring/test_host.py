from __future__ import annotations

import pytest

from recoup.measuring.host import USUAL_HOST_SHARE, find_host_share
from recoup.measuring.isolate import CallTiming
from recoup.measuring.meter import Timing


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
