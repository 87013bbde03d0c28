"""What every drawing consists of: axes, round values beside them, lines, and curves of steps.

The HTML report, the matplotlib plots and the pictures of the documentation draw the same values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

__all__ = ["BOX", "Axis", "Curve", "Line", "padded", "round_values"]

BOX = 1000.0
"""The sides of a drawing that a page stretches to any size."""
_STEPS = (1, 2, 5, 10, 20)


def round_values(low: float, high: float, *, most: int) -> list[float]:
    """Round values between two numbers, in steps of 1, 2 or 5 times a power of ten.

    >>> round_values(0, 13.4, most=5)
    [0.0, 5.0, 10.0]
    """
    rough = (high - low) / most
    if rough <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in _STEPS if factor * power >= rough * (1 - 1e-9))
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


class Axis(NamedTuple):
    """From values to coordinates: ``low`` is drawn at ``start``, ``high`` at ``end``; ticks are values and texts."""

    start: float
    end: float
    low: float
    high: float
    ticks: Sequence[tuple[float, str]] = ()

    def at(self, value: float) -> float:
        """Where a value is drawn."""
        return self.start + (self.end - self.start) * (value - self.low) / (self.high - self.low)

    def percent(self, value: float) -> float:
        """How far along the axis a value is, in per cent."""
        return round((value - self.low) / (self.high - self.low) * 100, 2)


def padded(values: Sequence[float]) -> tuple[float, float]:
    """The least and the most of some values, with a margin around them; never below 0."""
    low, high = min(values), max(values)
    margin = (high - low) * 0.07 or abs(high) * 0.07 or 1.0
    return max(low - margin, 0.0), high + margin


@dataclass(frozen=True)
class Line:
    """Points that straight lines join.

    Attributes:
        points: places and levels.

    >>> Line([(0, 1), (2, 4)]).path(Axis(0, 10, 0, 2), Axis(10, 0, 0, 4))
    'M0.0 7.5L10.0 0.0'
    """

    points: Sequence[tuple[float, float]]

    def path(self, x: Axis, y: Axis) -> str:
        """The line as an SVG path."""
        return "M" + "L".join(f"{x.at(place):.1f} {y.at(level):.1f}" for place, level in self.points)


@dataclass(frozen=True)
class Curve:
    """A curve of steps: each point's level lasts until the next point, and the last one's until ``end``.

    Attributes:
        points: tuples that begin with a place and a level.
        end: the place where the curve ends.
    """

    points: Sequence[Any]
    end: float

    def stretches(self) -> Iterator[tuple[float, float, float]]:
        """Beginning, end and level of each step."""
        ends = [*(point[0] for point in self.points[1:]), self.end]
        for point, end in zip(self.points, ends, strict=True):
            yield point[0], end, point[1]

    def parts(self, key: Callable[[Any], Any]) -> Iterator[tuple[Any, Curve]]:
        """The parts in which all points have the same key."""
        start = 0
        for value, group in groupby(self.points, key=key):
            stop = start + len(list(group))
            end = self.points[stop][0] if stop < len(self.points) else self.end
            yield value, Curve(self.points[start:stop], end)
            start = stop

    def path(self, x: Axis, y: Axis, *, begin: float | None = None) -> str:
        """The curve as an SVG path, which begins at the first level unless another is given."""
        first = self.points[0]
        steps = "".join(f"V{y.at(level):.1f}H{x.at(end):.1f}" for _, end, level in self.stretches())
        return f"M{x.at(first[0]):.1f} {y.at(first[1] if begin is None else begin):.1f}{steps}"

    def area(self, x: Axis, y: Axis) -> str:
        """The area below the curve as an SVG path."""
        return f"{self.path(x, y, begin=y.low)}V{y.at(y.low):.1f}Z"
