from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recoup.plans.by_size.growth import Growth

coefficient = st.integers(0, 10**9)


@settings(deadline=None)
@given(constant=coefficient, linear=coefficient, quadratic=coefficient)
def test_polynomials_of_one_size_are_found(constant: int, linear: int, quadratic: int) -> None:
    def number(size: int) -> int:
        return constant + linear * size + quadratic * size**2

    sizes = (64, 256, 512)
    growth, numbers = Growth([(size,) for size in sizes]), tuple(float(number(size)) for size in sizes)
    for size in (1, 64, 300, 512, 700):
        assert growth.at((size,), numbers) == pytest.approx(
            number(size), rel=1e-6, abs=1e-3 * number(64) + 1e-9
        )


def test_a_line_through_two_sizes_is_never_below_a_parabola_between_them() -> None:
    growth = Growth([(4,), (8,)])
    assert all(growth.at((size,), (16.0, 64.0)) >= size**2 for size in range(4, 9))


def test_tokens_times_rows() -> None:
    def number(rows: int, length: int) -> int:
        return 7 + 3 * rows * length + 2 * rows * length**2 + 5 * length**2

    sizes = [(2, 64), (4, 64), (2, 128), (4, 128), (2, 256), (4, 256), (1, 512), (3, 32)]
    growth, numbers = Growth(sizes), tuple(float(number(*size)) for size in sizes)
    for size in ((3, 100), (4, 200), (1, 300), (8, 256)):
        assert growth.at(size, numbers) == pytest.approx(number(*size), rel=1e-3)


@settings(deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=3, max_size=3))
def test_never_less_than_what_was_measured_and_never_falling(numbers: list[int]) -> None:
    sizes, measured = [(10,), (20,), (40,)], tuple(map(float, numbers))
    growth = Growth(sizes)
    found = [growth.at(size, measured) for size in sizes]
    assert all(one >= number - 1e-6 for one, number in zip(found, numbers, strict=True))
    values = [growth.at((size,), measured) for size in range(1, 80)]
    assert all(after >= before - 1e-6 for before, after in pairwise(values))
    assert max(found) <= 2 * max(numbers), "a number that falls is at most its largest, all along"
