from __future__ import annotations

import pytest

from recoup.errors import SampleError
from recoup.plans.by_size.axes import Axis, Member, find_axes, size_of


def test_dimensions_that_vary_together_are_one_axis() -> None:
    samples = [{"ids": (4, n), "mask": (4, 1, n, n), "flat": (4 * n,)} for n in (8, 16, 24)]
    (axis,) = find_axes(samples)
    assert axis == Axis((Member("ids", 1), Member("mask", 2), Member("mask", 3), Member("flat", 0, (4, 1))))
    assert [size_of((axis,), sample) for sample in samples] == [(8,), (16,), (24,)]


def test_a_size_is_the_largest_that_any_input_gives() -> None:
    axes = find_axes([{"ids": (2, n), "flat": (3 * n,)} for n in (8, 16)])
    assert size_of(axes, {"ids": (2, 8), "flat": (25,)}) == (9,)
    assert size_of(axes, {"flat": (24,)}) == (8,)
    assert size_of(axes, {"ids": (9,)}) is None, "the input has no such dimension"
    assert size_of(axes, {}) is None


def test_two_axes() -> None:
    axes = find_axes([{"source": (2, s), "target": (2, t)} for s, t in ((8, 4), (8, 6), (16, 6))])
    assert [axis.name for axis in axes] == ["source.shape[1]", "target.shape[1]"]
    assert size_of(axes, {"source": (2, 9), "target": (2, 5)}) == (9, 5)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([{"x": (2, 3)}, {"x": (2, 3)}], "same size"),
        ([{"x": (2, 3)}, {"y": (2, 4)}], "Samples 0 and 1 differ in more than size"),
        ([{"x": (2, 3)}, {"x": (2, 3, 1)}], "Samples 0 and 1 differ in more than size"),
        ([{"x": (2, 3, 4)}, {"x": (3, 3, 5)}, {"x": (3, 4, 6)}], "vary in 3 ways"),
        ([{}, {}], "same size"),
    ],
)
def test_samples_that_make_no_axes(samples: list[dict[str, tuple[int, ...]]], message: str) -> None:
    with pytest.raises(SampleError, match=message):
        find_axes(samples)
