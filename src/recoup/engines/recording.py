"""Memory over one real step: every change on the CPU, the peak between units' boundaries on CUDA."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, TypeVar

from torch import nn

from recoup.measuring.meter import CpuMeter, Meter
from recoup.measuring.trees import tensors_in

__all__ = ["MOST_POINTS", "Points", "record", "thinned"]

MOST_POINTS = 500
"""How many points of a recording are kept."""

Points = tuple[tuple[float, int], ...]
"""Seconds, and the bytes from then until the next point."""

_Point = TypeVar("_Point", bound=tuple[Any, ...])


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


def record(meter: Meter, modules: Iterable[nn.Module], run: Callable[[], Any]) -> tuple[int, Points]:
    """Runs a step inside ``meter.watching()``: its peak, and its memory over time, beyond what lived before.

    Args:
        meter: of the device.
        modules: whose calls and their backwards are the boundaries, where memory cannot be watched all the time.
        run: the step.
    """
    if isinstance(meter, CpuMeter):
        return _at_changes(meter, run)
    return _at_boundaries(meter, modules, run)


def _at_changes(meter: CpuMeter, run: Callable[[], Any]) -> tuple[int, Points]:
    tracker, start_s = meter.tracker, time.perf_counter()
    points = [(0.0, 0)]

    def note(num_bytes: int) -> None:
        points.append((time.perf_counter() - start_s, num_bytes - live_bytes))
        if len(points) > 8 * MOST_POINTS:
            points[:] = thinned(points, 4 * MOST_POINTS)

    live_bytes = meter.live_bytes()
    meter.reset_peak()
    tracker.observer = note
    try:
        run()
    finally:
        tracker.observer = None
    note(meter.live_bytes())
    return meter.peak_bytes() - live_bytes, tuple(thinned(points))


def _at_boundaries(meter: Meter, modules: Iterable[nn.Module], run: Callable[[], Any]) -> tuple[int, Points]:
    live_bytes = meter.live_bytes()
    meter.reset_peak()
    stamps, peaks = [meter.stamp()], []
    hooks: list[Any] = []

    def mark(*_: Any) -> None:
        stamps.append(meter.stamp())
        peaks.append(meter.peak_bytes() - live_bytes)
        meter.reset_peak()

    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        mark()
        hooks.extend(tensor.register_hook(mark) for tensor in tensors_in(output) if tensor.requires_grad)

    for module in dict.fromkeys(modules):
        hooks += [module.register_forward_pre_hook(mark), module.register_forward_hook(after)]
    try:
        run()
        mark()
    finally:
        for hook in hooks:
            hook.remove()
    times_s = [meter.elapsed_s(stamps[0], stamp) for stamp in stamps]
    # A peak belongs to the time since the mark before it.
    points = [*zip(times_s, [*peaks, meter.live_bytes() - live_bytes], strict=True)]
    return max(peaks), tuple(thinned(points))
