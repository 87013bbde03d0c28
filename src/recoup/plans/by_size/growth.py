"""How a number of a step grows with the size of its batch.

A tensor's bytes are the product of its dimensions, so the bytes of a step are sums of products of sizes: with
coefficients that are not negative, affine in tokens, quadratic where attention makes scores. Seconds are taken to be
alike: launches, elements, pairs of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from recoup.plans.by_size.axes import Size

__all__ = ["Growth", "growth_along"]

Growth = Callable[[Size], float]

_POWERS = {
    1: ((0,), (1,), (2,)),
    2: ((0, 0), (1, 1), (1, 0), (0, 1), (1, 2), (2, 1), (0, 2), (2, 0)),
}
"""By number of axes: the exponents of each term, the most likely first."""


def growth_along(sizes: Sequence[Size]) -> Callable[[tuple[float, ...]], Growth]:
    """For sizes at which numbers are measured: from these numbers to a function of the size.

    There are no more terms than sizes. At each of these sizes the function is at least the number measured there.

    >>> quadratic = growth_along([(1,), (2,), (4,)])((3.0, 6.0, 18.0))
    >>> round(quadratic((3,))), round(quadratic((8,)))
    (11, 66)
    """
    largest = tuple(map(max, zip(*sizes, strict=True)))
    powers = _POWERS[len(largest)][: len(sizes)]

    def terms(size: Size) -> list[float]:
        shares = [value / most for value, most in zip(size, largest, strict=True)]
        return [_product(shares, exponents) for exponents in powers]

    known = [terms(size) for size in sizes]

    @cache
    def find(numbers: tuple[float, ...]) -> Growth:
        if len(set(numbers)) == 1:
            return lambda size: numbers[0]
        coefficients = _fit(known, numbers)
        found = [_dot(coefficients, row) for row in known]
        # Rounding of the allocator and noise: never less than what was measured.
        scale = max([1.0, *(n / f for n, f in zip(numbers, found, strict=True) if f > 0)])
        return lambda size: scale * _dot(coefficients, terms(size))

    return find


def _fit(rows: Sequence[Sequence[float]], numbers: Sequence[float]) -> list[float]:
    from scipy.optimize import nnls

    largest = max(map(abs, numbers))
    coefficients, _ = nnls(rows, [number / largest for number in numbers])
    return [float(one) * largest for one in coefficients]


def _product(values: Sequence[float], exponents: Sequence[int]) -> float:
    product = 1.0
    for value, exponent in zip(values, exponents, strict=True):
        product *= value**exponent
    return product


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(first, second, strict=True))
