"""Fewer bits: the bytes they take, the errors they make, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np

from recoup.errors import PrecisionError
from recoup.stores import ActivationStore, error_bound

PRECISIONS = ["bfloat16", "float16", "int8"]


def through(precision: Any, array: Any) -> tuple[Any, int]:
    store = ActivationStore(precision=precision)
    return store, store.put(0, array).num_bytes


@pytest.mark.parametrize(
    ("precision", "dtype", "num", "num_bytes"),
    [
        (None, np.float32, 100, 400),
        ("bfloat16", np.float32, 100, 200),
        ("float16", np.float64, 100, 200),
        ("float16", np.float16, 100, 200),
        # One byte a value and four a block of 64.
        ("int8", np.float32, 64, 68),
        ("int8", np.float32, 65, 73),
        ("int8", np.float64, 1000, 1064),
        ("int8", np.float16, 64, 68),
        # Held exactly where packing saves nothing.
        ("int8", np.float32, 1, 4),
        ("int8", np.float32, 2, 6),
        ("int8", np.float16, 4, 8),
        ("int8", np.float16, 5, 9),
        ("int8", np.int32, 100, 400),
        ("bfloat16", np.complex64, 10, 80),
        ("bfloat16", np.float32, 0, 0),
    ],
)
def test_bytes_are_those_of_the_packed_data(precision: Any, dtype: Any, num: int, num_bytes: int) -> None:
    for array in (np.ones(num, dtype), torch.from_numpy(np.ones(num, dtype))):
        store, counted = through(precision, array)
        assert counted == store.num_bytes == num_bytes
        parts = store._entries[0].held.parts
        real = (p.untyped_storage().nbytes() if isinstance(p, torch.Tensor) else p.nbytes for p in parts)
        assert sum(real) == num_bytes, "the accounts count what memory holds"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@given(data=st.data())
def test_values_come_back_within_the_stated_bound(precision: Any, dtype: Any, data: st.DataObject) -> None:
    limit = 65504.0 if dtype is np.float16 or precision == "float16" else 2.0**127
    width = np.dtype(dtype).itemsize * 8
    elements = st.floats(-limit, limit, width=width)
    array = data.draw(st_np.arrays(dtype, st_np.array_shapes(max_dims=3, max_side=9), elements=elements))
    store, _ = through(precision, array)
    found = store.get(0)
    assert found.dtype == array.dtype
    error = np.abs(found.astype(np.longdouble) - array.astype(np.longdouble))
    assert (error <= error_bound(precision, array)).all()
    assert np.array_equal(store.take(0), found)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_bound_is_not_a_wide_guess(precision: Any) -> None:
    array = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    store, _ = through(precision, array)
    error = np.abs(store.get(0).astype(np.float64) - array)
    share = (error / error_bound(precision, array)).max()
    assert 0.98 < share <= 1.0


@pytest.mark.parametrize(
    ("precision", "value", "bound"),
    [("bfloat16", 256.0, 1.0), ("float16", 2048.0, 1.0), ("int8", 127.0, 0.5)],
)
def test_bounds_in_round_numbers(precision: Any, value: float, bound: float) -> None:
    found = error_bound(precision, np.full(64, value, np.float32))
    assert found.shape == (64,)
    assert found == pytest.approx(bound, rel=1e-2)
    assert torch.equal(error_bound(precision, torch.full((64,), value)), torch.from_numpy(found))


def test_exact_data_has_bound_zero() -> None:
    for array in (np.arange(9), np.ones(3, np.complex64), np.ones((2, 2), np.longdouble), np.float32(1.5)):
        assert not error_bound(None, array).any()
    assert not error_bound("int8", np.arange(99)).any()
    assert not error_bound("bfloat16", torch.ones(3, dtype=torch.float16)).any()
    assert error_bound("int8", np.ones(1, np.float32)) == 0, "too small to pack"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_floats_as_small_are_held_exactly(precision: Any) -> None:
    for tensor in (torch.randn(4).half(), torch.randn(4).bfloat16(), torch.randn(99).to(torch.float8_e5m2)):
        store, num_bytes = through(precision, tensor)
        assert num_bytes == tensor.numel() * tensor.element_size()
        assert torch.equal(store.get(0).float(), tensor.float())


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_sixteen_bits_keep_infinity_and_nan(precision: Any) -> None:
    array = np.array([math.inf, -math.inf, math.nan, 1.0], np.float32)
    store, _ = through(precision, array)
    assert np.array_equal(store.get(0), array, equal_nan=True)


@pytest.mark.parametrize(
    ("precision", "array", "message"),
    [
        (
            "float16",
            np.array([1.0, 7e4, -1e6, math.inf], np.float32),
            r"Unit 5: 2 of 4 values are beyond 6.55e\+04.*float16 holds \(largest: 1e\+06\).*'bfloat16'",
        ),
        (
            "bfloat16",
            np.array([3.4e38], np.float32),
            r"Unit 5: 1 of 1 values .* bfloat16 holds .*precision=None",
        ),
        ("bfloat16", np.array([1e300, 1.0]), "Unit 5: 1 of 2 values are beyond"),
        (
            "int8",
            np.array([1.0, math.nan], np.float32),
            "1 of 2 values are NaN or infinite, which int8 cannot",
        ),
        ("int8", np.array([math.inf, -math.inf, 0.0], np.float32), "Unit 5: 2 of 3 .*precision='bfloat16'"),
        ("int8", np.array([1e300, 1.0]), r"Unit 5: values up to 1e\+300 are beyond.*precision=None"),
    ],
)
def test_what_a_precision_cannot_hold_is_refused(precision: Any, array: Any, message: str) -> None:
    for value in (array, torch.from_numpy(array)):
        store = ActivationStore(precision=precision)
        with pytest.raises(PrecisionError, match=message):
            store.put(5, value)
        assert len(store) == store.num_bytes == 0


def test_int8_comes_back_inside_the_type() -> None:
    for dtype in (np.float32, np.float16):
        array = np.full(70, np.finfo(dtype).max, dtype)
        store, _ = through("int8", array)
        assert np.isfinite(store.get(0)).all()


@pytest.mark.parametrize("scale", [0.0, 1e-44, 1e-300])
def test_int8_survives_zeros_and_the_smallest_numbers(scale: float) -> None:
    array = np.linspace(-1, 1, 100) * scale
    store, _ = through("int8", array)
    assert (np.abs(store.get(0) - array) <= error_bound("int8", array)).all()
    assert not np.isnan(store.get(0)).any()


def test_int8_blocks_do_not_disturb_each_other() -> None:
    array = np.concatenate([np.full(64, 1e6), np.full(64, 1e-3)]).astype(np.float32)
    store, _ = through("int8", array)
    assert np.allclose(store.get(0), array, rtol=1e-6)


def test_error_bound_refuses_what_it_does_not_know() -> None:
    with pytest.raises(PrecisionError, match="There is no precision 'int2'"):
        error_bound("int2", np.ones(3))  # type: ignore[arg-type]
    with pytest.raises(PrecisionError, match="no error bound for this: got list"):
        error_bound("int8", [1.0])  # type: ignore[arg-type]
