"""How a number of a step grows with the size of its batch.

A tensor's bytes are the product of its dimensions, so the bytes of a step are sums of products of sizes: with
coefficients that are not negative, affine in tokens, quadratic where attention makes scores. Seconds are taken to be
alike: launches, elements, pairs of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from recoup.plans.by_size.axes import Size

__all__ = ["ENOUGH_FOR_TWO", "Growth"]

_POWERS = {
    1: ((0,), (1,), (2,)),
    2: ((0, 0), (1, 1), (1, 0), (0, 1), (1, 2), (2, 1), (0, 2), (2, 0)),
}
"""By number of axes: the exponents of each term, the most likely first."""
ENOUGH_FOR_TWO = 6
"""Measured sizes that tell how numbers grow along two axes: tokens and, along each, what grows as a square."""


class Growth:
    """Numbers that were measured at some sizes, as functions of the size.

    There are no more terms than sizes. At each of these sizes a function is at least the number measured there.

    Args:
        sizes: at which numbers are measured.

    >>> growth = Growth([(1,), (2,), (4,)])
    >>> [round(growth.at((size,), (3.0, 6.0, 18.0))) for size in (3, 8)]
    [11, 66]
    """

    def __init__(self, sizes: Sequence[Size]) -> None:
        self._largest = tuple(map(max, zip(*sizes, strict=True)))
        self._powers = _POWERS[len(self._largest)][: len(sizes)]
        self._rows = [self._terms(size) for size in sizes]
        self._known: dict[tuple[float, ...], list[float]] = {}

    def at(self, size: Size, numbers: tuple[float, ...]) -> float:
        """What was measured as these numbers, in the order of the sizes, at another size."""
        if numbers not in self._known:
            self._known[numbers] = self._coefficients(numbers)
        return _dot(self._known[numbers], self._terms(size))

    def _terms(self, size: Size) -> list[float]:
        shares = [value / most for value, most in zip(size, self._largest, strict=True)]
        return [
            prod(share**exponent for share, exponent in zip(shares, exponents, strict=True))
            for exponents in self._powers
        ]

    def _coefficients(self, numbers: tuple[float, ...]) -> list[float]:
        from scipy.optimize import lsq_linear

        largest = max(map(abs, numbers))
        if min(numbers) == largest:
            return [largest, *(0.0 for _ in self._powers[1:])]
        shares = [number / largest for number in numbers]
        found = lsq_linear(self._rows, shares, bounds=(0.0, float("inf")), method="bvls", tol=1e-14)
        coefficients = [float(one) * largest for one in found.x]
        # Rounding of the allocator, and noise: never less than what was measured.
        missing = max(n - _dot(coefficients, row) for n, row in zip(numbers, self._rows, strict=True))
        coefficients[0] += max(0.0, missing)
        return coefficients


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(first, second, strict=True))
