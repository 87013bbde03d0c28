"""How long kernels of one class really take, by how long they would take at the device's peak."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from recoup.errors import HardwareError

__all__ = ["KernelCurve", "KernelSample", "bin_of", "fit_curves"]

_BIN = 4.0
"""Kernels whose ideal seconds differ by less than this factor are one point of a curve."""


@dataclass(frozen=True)
class KernelCurve:
    """Seconds of a class of kernels, measured at several sizes.

    Attributes:
        name: of the class, as `kernel_class` has it.
        points: pairs of ideal and measured seconds, in rising order. Ideal seconds are those at the peak of the device:
            the longer one of computing and moving bytes.

    Between points, seconds are interpolated on logarithmic scales. Smaller kernels take as long as the first point, and
    larger ones reach the same share of the peak as the last.

    >>> curve = KernelCurve("elementwise", ((1e-6, 4e-6), (1e-4, 2e-4)))
    >>> curve.seconds(1e-7), curve.seconds(1e-4), curve.seconds(1.0)
    (4e-06, 0.0002, 2.0)
    """

    name: str
    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "points", tuple((float(ideal), float(real)) for ideal, real in self.points))
        flat = [number for point in self.points for number in point]
        ideals = [ideal for ideal, _ in self.points]
        if not flat or not all(math.isfinite(number) and number > 0 for number in flat):
            raise HardwareError(f"Kernels of class {self.name!r}: seconds must be finite and above 0.")
        if ideals != sorted(set(ideals)):
            raise HardwareError(
                f"Kernels of class {self.name!r}: ideal seconds must rise from point to point."
            )

    def seconds(self, ideal_s: float) -> float:
        """Seconds of a kernel that would take ``ideal_s`` at the peak of the device."""
        index = bisect_right(self.points, (ideal_s, math.inf))
        if index == 0:
            return self.points[0][1]
        low, low_s = self.points[index - 1]
        if index == len(self.points):
            return low_s * (ideal_s / low)
        high, high_s = self.points[index]
        part = math.log(ideal_s / low) / math.log(high / low)
        return low_s * math.exp(part * math.log(high_s / low_s))


@dataclass(frozen=True)
class KernelSample:
    """One operation that was timed.

    Attributes:
        kind: its class, as `kernel_class` has it.
        ideal_s: seconds at the peak of the device.
        measured_s: seconds that it took.
        what: the operation and its shapes.
    """

    kind: str
    ideal_s: float
    measured_s: float
    what: str = ""


def bin_of(ideal_s: float) -> int:
    """The same number for kernels of about the same size."""
    return math.floor(math.log(max(ideal_s, 1e-12), _BIN))


def fit_curves(samples: Iterable[KernelSample]) -> tuple[KernelCurve, ...]:
    """A curve for each class: samples of about the same size are one point, by geometric means.

    A kernel takes at most as long as a larger one.

    >>> fit_curves([KernelSample("copy", 1e-6, 2e-6), KernelSample("copy", 1e-6, 8e-6)])
    (KernelCurve(name='copy', points=((1e-06, 4e-06),)),)
    """
    bins: dict[str, dict[int, list[KernelSample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        if sample.ideal_s > 0:
            bins[sample.kind][bin_of(sample.ideal_s)].append(sample)
    return tuple(KernelCurve(kind, _points(bins[kind])) for kind in sorted(bins))


def _points(bins: Mapping[int, Sequence[KernelSample]]) -> tuple[tuple[float, float], ...]:
    points: list[tuple[float, float]] = []
    # From the largest down: what disturbs a measurement only makes it longer.
    for number in sorted(bins, reverse=True):
        ideal_s = _mean(sample.ideal_s for sample in bins[number])
        measured_s = _mean(sample.measured_s for sample in bins[number])
        points.append((ideal_s, min([measured_s, *(real for _, real in points)])))
    return tuple(reversed(points))


def _mean(values: Iterable[float]) -> float:
    """The geometric mean, to four digits: more would be noise in a file that is shipped."""
    logarithms = [math.log(value) for value in values]
    return float(f"{math.exp(sum(logarithms) / len(logarithms)):.4g}")
