from __future__ import annotations

import pytest

from recoup.measuring.host import USUAL_HOST_SHARE, find_host_share
from recoup.measuring.isolate import CallTiming
from recoup.measuring.meter import Timing


def call(device_s: float, host_s: float) -> CallTiming:
    return CallTiming(Timing(device_s, host_s), Timing(2 * device_s, 2 * host_s))


def test_a_step_that_the_host_slows_down() -> None:
    # At half the host's time: 3 * 5 for the first call, 3 * 4 for the second, which the device sets, and 1 for code.
    calls = [call(1.0, 10.0), call(4.0, 6.0)]
    assert find_host_share(calls, 1.0, lambda: 28.0) == pytest.approx(0.5, abs=1e-5)


def test_a_step_faster_than_its_operations_on_the_device() -> None:
    assert find_host_share([call(4.0, 10.0)], 1.0, lambda: 12.0) == pytest.approx(0, abs=1e-5)


def test_a_step_slower_than_its_calls_by_themselves() -> None:
    assert find_host_share([call(4.0, 10.0)], 1.0, lambda: 99.0) == pytest.approx(1, abs=1e-5)


def test_a_step_that_does_not_fit() -> None:
    assert find_host_share([call(1.0, 10.0)], 0.0, lambda: None) == USUAL_HOST_SHARE


def test_no_step_is_run_where_the_device_sets_the_pace() -> None:
    def real_s() -> float:
        raise AssertionError

    assert find_host_share([call(4.0, 1.0), call(1.0, 1.01)], 5.0, real_s) == USUAL_HOST_SHARE
