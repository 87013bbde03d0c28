"""What torch tensors and NumPy arrays have in common: copies, sizes and memory order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from recoup.errors import RecoupError

__all__ = ["Array", "copy_array", "dense", "expect_array"]

# A NumPy scalar counts as an array without dimensions: reductions such as ``x.sum()`` give one.
Array: TypeAlias = "Tensor | np.ndarray[Any, Any] | np.generic"


def expect_array(what: str, value: object, error: type[RecoupError]) -> None:
    """Raises ``error`` unless a value is an array that can be copied, measured and stored; says what to change.

    >>> from recoup.errors import StoreError
    >>> expect_array("Unit 3 cannot be stored", [1.0], StoreError)
    Traceback (most recent call last):
    recoup.errors.StoreError: Unit 3 cannot be stored: got list; pass a torch tensor or a NumPy array.
    """
    problem = _why_not_array(value)
    if problem:
        raise error(f"{what}: {problem}.")


def _why_not_array(value: object) -> str:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            return f"got a tensor with layout {value.layout}, type {value.dtype}; pass a dense one"
        return ""
    if not isinstance(value, (np.ndarray, np.generic)):
        return f"got {type(value).__name__}; pass a torch tensor or a NumPy array"
    # A masked array would lose its mask on the way, and a matrix its meaning of "*".
    if isinstance(value, np.ndarray) and type(value) not in (np.ndarray, np.memmap):
        return f"got {type(value).__name__}, which a copy would not preserve; pass np.asarray(…) of it"
    # Only the references would be copied, and the bytes behind them not counted.
    if value.dtype.hasobject:
        return f"got an array of Python objects (dtype {value.dtype}); pass one of numbers"
    return ""


def copy_array(array: Array) -> Any:
    """Copies an array: same kind, type, device and order of dimensions in memory, without gaps or history.

    >>> copy_array(np.zeros((4, 6)).T[::2]).strides
    (8, 24)
    """
    if isinstance(array, Tensor):
        return array.detach().clone(memory_format=torch.preserve_format)
    # The index turns what was a scalar into one again, and is a no-op on a copy of an array.
    return np.array(array, order="K")[()] if isinstance(array, np.generic) else np.array(array, order="K")


def dense(array: Array) -> Any:
    """Gives an array without gaps in memory: itself, or a copy if it has some.

    >>> x = np.zeros((4, 6))
    >>> dense(x.T) is x.T, dense(x.T).strides, dense(x[::2]).strides
    (False, (8, 48), (48, 8))
    """
    if isinstance(array, Tensor):
        return array if _is_dense(array.shape, array.stride(), 1) else copy_array(array)
    return array if _is_dense(array.shape, array.strides, array.dtype.itemsize) else copy_array(array)


def _is_dense(shape: Sequence[int], strides: Sequence[int], step: int) -> bool:
    if 0 in shape:
        return True
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if stride != step:
            return False
        step *= size
    return True
