"""Tensors in fewer bits: how they are packed, what that costs in bytes, and how far off they come back.

NOTE [ Precisions ]

1. ``"bfloat16"`` and ``"float16"`` round to the nearest 16-bit value. bfloat16 keeps the range of float32.
2. ``"int8"`` divides a tensor, in the order of its memory, into blocks of 64 values. A block has one float32
   scale, its largest magnitude over 127, and every value is held as a whole multiple of it: 68 bytes a block.
3. Data is packed only where that is smaller. Integers, booleans, complex numbers, floats of as few bits and
   very small arrays are held exactly.
4. What a precision cannot hold is an error and never an infinity that was not there before.

A codec packs tensors of floats. ``pack`` gives new tensors that share nothing with the argument, or raises a
`PrecisionError` that begins with ``name``; ``packed_bytes`` counts their bytes without packing. ``unpack`` gives a new
tensor on the device of the parts, with the shape, type and memory order of ``like``, which may be a meta tensor.
``error_bound`` is that of a tensor on the CPU.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from recoup.errors import PrecisionError
from recoup.stores.arrays import Array, dense, expect_array

__all__ = ["BLOCK_SIZE", "Codec", "Precision", "codec_for", "error_bound", "float_tensor"]

Precision: TypeAlias = Literal["bfloat16", "float16", "int8"]
BLOCK_SIZE = 64
_LEVELS = 127
# Rounding inside float32 arithmetic, several operations deep: small beside any bound that it is added to.
_SLACK = 2.0**-21


def error_bound(precision: Precision | None, array: Array) -> Any:
    """Bounds, value by value, how far an array that was stored in a precision is off when it comes back.

    Args:
        precision: as for `recoup.stores.ActivationStore`; with None everything comes back exactly.
        array: the data as it would be put. Values that the precision refuses have no bound worth reading.

    Returns:
        A float64 array of the same kind and shape, on the CPU: largest absolute differences.

    Raises:
        PrecisionError: if there is no such precision, or the data is no array.

    >>> error_bound("bfloat16", np.array([1.0, 100.0], np.float32)).round(3)
    array([0.004, 0.391])
    >>> error_bound("bfloat16", np.array([1, 100]))
    array([0., 0.])
    """
    check_precision(precision)
    expect_array("There is no error bound for this", array, PrecisionError)
    tensor = float_tensor(array)
    codec = codec_for(precision, tensor)
    if tensor is None or codec is None:
        bound = torch.zeros(tuple(array.shape), dtype=torch.float64)
    else:
        bound = codec.error_bound(tensor.cpu())
    return bound if isinstance(array, Tensor) else bound.numpy()


def check_precision(precision: object) -> None:
    """Raises PrecisionError unless a setting is None or the name of a precision."""
    if precision is not None and precision not in get_args(Precision):
        names = ", ".join(repr(name) for name in get_args(Precision))
        raise PrecisionError(f"There is no precision {precision!r}. Use {names}, or None to store exactly.")


def float_tensor(array: Array) -> Tensor | None:
    """Sees an array of floats as a dense tensor (a copy if need be), or gives None for any other data."""
    if isinstance(array, Tensor):
        return dense(array.detach()) if array.is_floating_point() else None
    # Types that torch does not know (long double, foreign byte order) are not its to pack.
    if array.dtype not in (np.float64, np.float32, np.float16):
        return None
    # Read-only arrays and negative strides cannot be seen as tensors; a copy in memory order can.
    return torch.from_numpy(np.array(array, order="K"))


def codec_for(precision: Precision | None, tensor: Tensor | None) -> Codec | None:
    """Finds how to pack a tensor; None where it is to be held exactly (see NOTE [ Precisions ], rule 3)."""
    if precision is None or tensor is None:
        return None
    codec = _Blocks() if precision == "int8" else _Rounded(getattr(torch, precision))
    return codec if codec.packed_bytes(tensor) < tensor.numel() * tensor.element_size() else None


class _Rounded:
    """Every value rounded to a 16-bit type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def packed_bytes(self, tensor: Tensor) -> int:
        return tensor.numel() * self._dtype.itemsize

    def pack(self, tensor: Tensor, *, name: str) -> tuple[Tensor, ...]:
        rounded = tensor.to(self._dtype, memory_format=torch.preserve_format)
        num_lost = int((rounded.isinf() & tensor.isfinite()).sum())
        if num_lost:
            limit = torch.finfo(self._dtype).max
            wider = "'bfloat16' (as far as float32), or None" if self._dtype is torch.float16 else "None"
            raise PrecisionError(
                f"{name}: {num_lost} of {tensor.numel()} values are beyond {limit:.4g}, the largest that "
                f"{str(self._dtype).removeprefix('torch.')} holds (largest: {_largest(tensor):.4g}). "
                f"Use precision={wider}."
            )
        return (rounded,)

    def unpack(self, parts: tuple[Tensor, ...], like: Tensor) -> Tensor:
        return parts[0].to(like.dtype, memory_format=torch.preserve_format)

    def error_bound(self, tensor: Tensor) -> Tensor:
        info = torch.finfo(self._dtype)
        # Half a unit in the last place; below the normal range the spacing no longer shrinks with the value.
        return tensor.double().abs() * (info.eps / 2 + _SLACK) + info.smallest_normal * info.eps


class _Blocks:
    """Whole multiples of one scale per block, in eight bits."""

    def packed_bytes(self, tensor: Tensor) -> int:
        return tensor.numel() + 4 * math.ceil(tensor.numel() / BLOCK_SIZE)

    def pack(self, tensor: Tensor, *, name: str) -> tuple[Tensor, ...]:
        blocks = _blocks(tensor)
        num_lost = tensor.numel() - int(tensor.isfinite().sum())
        if num_lost:
            raise PrecisionError(
                f"{name}: {num_lost} of {tensor.numel()} values are NaN or infinite, which int8 cannot hold. "
                "Use precision='bfloat16' (keeps them), or None."
            )
        scales = _scales(blocks)
        if not bool(scales.isfinite().all()):
            raise PrecisionError(
                f"{name}: values up to {_largest(tensor):.4g} are beyond what an int8 block's float32 scale "
                "can express. Use precision=None."
            )
        # A block of zeros, or of values too small for its scale, has scale zero and comes back as zeros.
        divisors = torch.where(scales > 0, scales, 1.0).to(blocks.dtype)
        levels = (blocks / divisors[:, None]).round_().clamp_(-_LEVELS, _LEVELS).to(torch.int8)
        # Not a view: the padding of the last block would stay in memory, uncounted.
        return levels.view(-1)[: tensor.numel()].clone(), scales

    def unpack(self, parts: tuple[Tensor, ...], like: Tensor) -> Tensor:
        levels, scales = parts
        work = torch.promote_types(like.dtype, torch.float32)
        each = scales.to(work).repeat_interleave(BLOCK_SIZE)[: levels.numel()]
        largest = torch.finfo(like.dtype).max
        # The scale is rounded, so the largest value of a block may come back past the end of the type.
        values = (levels.to(work) * each).clamp_(-largest, largest).to(like.dtype)
        return _from_memory_order(values, like)

    def error_bound(self, tensor: Tensor) -> Tensor:
        scales = _scales(_blocks(tensor)).double().repeat_interleave(BLOCK_SIZE)[: tensor.numel()]
        info = torch.finfo(tensor.dtype)
        step = _from_memory_order(scales, tensor)
        # Half a step, what rounding the result to the tensor's own type adds, and the spacing of float32 near
        # zero, which a scale cannot go below (127 halves of it).
        own = (tensor.double().abs() + step) * (info.eps / 2 + _SLACK) + info.smallest_normal * info.eps
        return step * (0.5 + 2.0**-16) + own + 2.0**-143


Codec: TypeAlias = _Rounded | _Blocks


def _largest(tensor: Tensor) -> float:
    return float(torch.where(tensor.isfinite(), tensor, 0).abs().max())


def _memory_order(tensor: Tensor) -> list[int]:
    """Lists the dimensions from the slowest to the fastest in memory."""
    return sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)


def _blocks(tensor: Tensor) -> Tensor:
    """Lays a tensor out in memory order, one block a row, the last filled up with zeros."""
    flat = tensor.permute(_memory_order(tensor)).reshape(-1)
    flat = flat.to(torch.promote_types(tensor.dtype, torch.float32))
    return torch.nn.functional.pad(flat, (0, (-tensor.numel()) % BLOCK_SIZE)).view(-1, BLOCK_SIZE)


def _scales(blocks: Tensor) -> Tensor:
    return (blocks.abs().amax(dim=1) / _LEVELS).to(torch.float32)


def _from_memory_order(flat: Tensor, like: Tensor) -> Tensor:
    order = _memory_order(like)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return flat.view([like.shape[dim] for dim in order]).permute(inverse)
