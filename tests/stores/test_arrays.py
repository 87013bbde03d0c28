"""What goes into a store comes out: kind, type, shape, memory order, device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from recoup.errors import StoreError
from recoup.stores import ActivationStore, error_bound
from recoup.stores.arrays import copy_array, dense

NUMPY = {
    "empty": np.zeros((0, 3), np.float32),
    "0-d": np.array(2.5),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "reversed": np.arange(5.0)[::-1],
    "gaps": np.arange(12, dtype=np.int16).reshape(3, 4)[:, ::2],
    "broadcast": np.broadcast_to(np.arange(3.0), (2, 3)),
    "bool": np.array([True, False]),
    "complex": np.array([1 + 2j], np.complex64),
    "long double": np.array([1, 3], np.longdouble),
    "big-endian": np.array([1.5, 2.5], ">f4"),
    "text": np.array(["ab", "c"]),
    "time": np.array(["2024-05-01"], "datetime64[D]"),
    "structured": np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
}
TORCH = {
    "empty": torch.zeros(3, 0),
    "0-d": torch.tensor(2.5),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "channels last": torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "gaps": torch.arange(12).view(3, 4)[:, ::2],
    "expanded": torch.arange(3.0).expand(2, 3),
    "bool": torch.tensor([True, False]),
    "bfloat16": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
    "float8": torch.tensor([1.5, 2.0]).to(torch.float8_e4m3fn),
    "conjugate": torch.tensor([1 + 2j, 3j]).conj(),
}


@pytest.mark.parametrize("name", NUMPY)
@pytest.mark.parametrize("precision", [None, "int8"])
def test_numpy_arrays_come_back_as_they_went(name: str, precision: Any) -> None:
    array = NUMPY[name]
    store = ActivationStore(precision=precision)
    info = store.put(0, array)
    for found in (store.get(0), store.take(0)):
        assert type(found) is np.ndarray
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        if precision is None or array.dtype.kind != "f" or array.dtype in (np.longdouble, ">f4"):
            assert np.array_equal(found, array)
            assert info.num_bytes == array.nbytes == found.nbytes
        if name == "fortran":
            assert found.flags.f_contiguous
            assert not found.flags.c_contiguous


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("place", ["same", "host"])
def test_tensors_come_back_as_they_went(name: str, place: Any) -> None:
    tensor = TORCH[name]
    store = ActivationStore(place=place)
    info = store.put(0, tensor)
    assert info.num_bytes == tensor.numel() * tensor.element_size()
    for found in (store.get(0), store.take(0)):
        assert (found.dtype, found.shape, found.device) == (tensor.dtype, tensor.shape, tensor.device)
        assert found.untyped_storage().nbytes() == info.num_bytes, "no gaps are held"
        assert torch.equal(
            found.float() if name == "float8" else found, tensor.float() if name == "float8" else tensor
        )
    if name in ("transposed", "channels last"):
        assert found.stride() == tensor.stride()


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "int8"])
def test_packed_data_keeps_its_memory_order(precision: Any) -> None:
    store = ActivationStore(precision=precision)
    grid = np.asfortranarray(np.arange(30, dtype=np.float32).reshape(5, 6))
    image = TORCH["channels last"]
    store.put(0, grid)
    store.put(1, image)
    assert store.get(0).flags.f_contiguous
    assert store.get(1).stride() == image.stride()
    assert np.allclose(store.get(0), grid, atol=0.25)
    assert torch.allclose(store.get(1), image, atol=0.25)


@pytest.mark.parametrize("precision", [None, "bfloat16", "float16", "int8"])
def test_gaps_and_expansions_are_packed_right(precision: Any) -> None:
    rows = torch.arange(1.0, 201.0).view(10, 20)
    for tensor in (rows[:, ::3], rows[::2].t(), rows[0].expand(4, 20), rows[:, :1].expand(10, 7)):
        store = ActivationStore(precision=precision)
        for unit, array in enumerate((tensor, tensor.numpy())):
            store.put(unit, array)
            error = np.abs(np.asarray(store.get(unit)) - np.asarray(tensor))
            assert (error <= np.asarray(error_bound(precision, array))).all()


def test_tensors_are_stored_without_history() -> None:
    leaf = torch.nn.Parameter(torch.ones(3))
    store = ActivationStore()
    for unit, tensor in enumerate((leaf, leaf * 2)):
        store.put(unit, tensor)
        found = store.get(unit)
        assert type(found) is torch.Tensor
        assert not found.requires_grad
        assert found.grad_fn is None
    assert torch.equal(store.get(1), torch.full((3,), 2.0))


def test_read_only_arrays_are_stored_and_come_back_writable() -> None:
    array = np.frombuffer(np.arange(100.0).tobytes())
    for precision in (None, "bfloat16"):
        store = ActivationStore(precision=precision)  # type: ignore[arg-type]
        store.put(0, array)
        found = store.get(0)
        found += 1
        assert np.allclose(store.get(0), array, atol=0.25)


@pytest.mark.parametrize("precision", [None, "bfloat16"])
def test_numpy_scalars_stay_scalars(precision: Any) -> None:
    store = ActivationStore(precision=precision)
    info = store.put(0, np.float32(1.5))
    assert info.num_bytes == (4 if precision is None else 2)
    for found in (store.get(0), store.take(0)):
        assert type(found) is np.float32
        assert found == 1.5


def test_copies_are_dense_and_dense_copies_nothing_needlessly() -> None:
    x = np.arange(24.0).reshape(4, 6)
    assert dense(x) is x
    assert np.shares_memory(dense(x.T), x)
    assert not np.shares_memory(dense(x[:, ::2]), x)
    assert np.array_equal(dense(x[:, ::2]), x[:, ::2])
    y = torch.arange(24.0).view(4, 6)
    assert dense(y.t()).data_ptr() == y.data_ptr()
    assert dense(y[:, 1:]).untyped_storage().nbytes() == 4 * 5 * 4
    assert copy_array(y.t()).stride() == (1, 6)
    assert ActivationStore().put(0, y[:, 1:]).num_bytes == 80
    with pytest.raises(StoreError, match="Unit 0 cannot be stored: got NoneType; pass a torch tensor"):
        ActivationStore().put(0, None)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [None, "bfloat16", "int8"])
def test_on_a_gpu(precision: Any) -> None:
    tensor = torch.randn(37, 5, device="cuda")
    same, host = (ActivationStore(place=place, precision=precision) for place in ("same", "host"))
    on_device = torch.cuda.memory_allocated()
    host.put(0, tensor)
    assert torch.cuda.memory_allocated() == on_device, "the host's memory holds it"
    same.put(0, tensor)
    assert same.num_bytes == host.num_bytes
    assert torch.equal(same.get(0), host.get(0))
    for store in (same, host):
        assert store.get(0).device == tensor.device
        if precision is None:
            assert torch.equal(store.take(0), tensor)
