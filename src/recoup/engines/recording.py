"""Memory over one real step: every change on the CPU, samples on CUDA."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from recoup.devices.meter import CpuMeter, Meter

__all__ = ["MOST_POINTS", "Points", "Recording", "record", "thinned"]

MOST_POINTS = 500
"""How many points of a recording are kept."""
_INTERVAL_S = 0.0005
_SHARE_BETWEEN = 0.01
"""At least this share of the time so far passes between two samples: long steps are hardly disturbed."""

Points = tuple[tuple[float, int], ...]
"""Seconds, and the bytes from then until the next point."""

_Point = TypeVar("_Point", bound=tuple[Any, ...])


class Recording(NamedTuple):
    """One step: its peak, and its memory over time, beyond what lived before."""

    peak_bytes: int
    points: Points


def thinned(points: Sequence[_Point], most: int = MOST_POINTS) -> list[_Point]:
    """At most ``most`` points, the peak and the end among them: of each stretch of time its highest and its last.

    Args:
        points: tuples that begin with seconds and bytes, in the order of time.
        most: at least 2.

    >>> thinned([(0.0, 1), (0.1, 9), (0.2, 3), (1.0, 4), (1.1, 2), (2.0, 0)], 4)
    [(0.1, 9), (0.2, 3), (1.0, 4), (2.0, 0)]
    """
    if len(points) <= most:
        return list(points)
    start_s, num_stretches = points[0][0], most // 2
    width_s = (points[-1][0] - start_s) / num_stretches or 1.0

    def stretch(index: int) -> int:
        return min(int((points[index][0] - start_s) / width_s), num_stretches - 1)

    kept: list[int] = []
    for _, group in groupby(range(len(points)), key=stretch):
        members = list(group)
        highest = max(members, key=lambda index: points[index][1])
        kept += [highest] if highest == members[-1] else [highest, members[-1]]
    return [points[index] for index in kept]


def record(meter: Meter, run: Callable[[], Any]) -> Recording:
    """Runs a step inside ``meter.watching()``.

    Args:
        meter: of the device.
        run: the step.
    """
    if isinstance(meter, CpuMeter):
        return _at_changes(meter, run)
    return _by_sampling(meter, run)


def _at_changes(meter: CpuMeter, run: Callable[[], Any]) -> Recording:
    tracker, start_s = meter.tracker, time.perf_counter()
    points = [(0.0, 0)]

    def note(num_bytes: int) -> None:
        points.append((time.perf_counter() - start_s, num_bytes - live_bytes))
        if len(points) > 8 * MOST_POINTS:
            points[:] = thinned(points, 4 * MOST_POINTS)

    live_bytes = meter.begin()
    tracker.observer = note
    try:
        run()
    finally:
        tracker.observer = None
    note(meter.live_bytes())
    return Recording(meter.peak_bytes() - live_bytes, tuple(thinned(points)))


def _by_sampling(meter: Meter, run: Callable[[], Any]) -> Recording:
    """Samples from another thread: the step itself runs unchanged."""
    live_bytes, start_s = meter.begin(), time.perf_counter()
    points = [(0.0, 0)]
    has_ended = threading.Event()

    def sample() -> None:
        time_s = 0.0
        while not has_ended.wait(max(_INTERVAL_S, _SHARE_BETWEEN * time_s)):
            time_s = time.perf_counter() - start_s
            points.append((time_s, meter.live_bytes() - live_bytes))

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        run()
    finally:
        has_ended.set()
        sampler.join()
    points.append((time.perf_counter() - start_s, meter.live_bytes() - live_bytes))
    peak_bytes = meter.peak_bytes() - live_bytes
    return Recording(peak_bytes, tuple(_with_peak(thinned(points), peak_bytes)))


def _with_peak(points: list[tuple[float, int]], peak_bytes: int) -> list[tuple[float, int]]:
    """Sets the highest sample to the peak, which the allocator knows exactly."""
    highest = max(range(len(points)), key=lambda index: points[index][1])
    points[highest] = (points[highest][0], peak_bytes)
    return points
