"""One array as a store holds it: a copy, perhaps in fewer bits, perhaps elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from recoup.stores.arrays import Array, copy_array
from recoup.stores.precision import Codec, Precision, codec_for, float_tensor

__all__ = ["Held", "Place", "held_bytes", "hold"]

Place: TypeAlias = Literal["same", "host"]


@dataclass(frozen=True, eq=False)
class Held:
    """A held array: its data, and what it takes to give it back as it came.

    Attributes:
        parts: what occupies memory; one exact copy, or the packed tensors.
        codec: how to unpack them, or None for an exact copy.
        like: a tensor without data that has the shape, type and memory order to restore; None for a copy.
        device: where a tensor goes when it comes back; None for NumPy.
        is_scalar: whether a NumPy scalar was put.
    """

    parts: tuple[Any, ...]
    codec: Codec | None
    like: Tensor | None
    device: torch.device | None
    is_scalar: bool

    @property
    def num_bytes(self) -> int:
        """The bytes of the parts."""
        return sum(part.nbytes for part in self.parts)

    def give_back(self, *, must_copy: bool) -> Any:
        """The array as it came; without a copy where possible for a holder that forgets it."""
        if self.codec is not None and self.like is not None:
            # Moved before unpacking: the packed parts are the smaller thing to move.
            moved = tuple(part.to(self.device or part.device) for part in self.parts)
            value: Any = self.codec.unpack(moved, self.like)
            value = value if self.device is not None else value.numpy()
        else:
            (value,) = self.parts
            if self.device is not None and value.device != self.device:
                value = value.to(self.device)
            elif must_copy:
                value = copy_array(value)
        return value[()] if self.is_scalar else value


def held_bytes(array: Array, precision: Precision | None) -> int:
    """Counts the bytes that `hold` would take, without copying the data of a tensor.

    >>> held_bytes(torch.zeros(100), "int8"), held_bytes(torch.zeros(100), None)
    (108, 400)
    """
    like = _describe(array)
    codec = codec_for(precision, like)
    return array.nbytes if codec is None or like is None else codec.packed_bytes(like)


def hold(array: Array, *, precision: Precision | None, place: Place, name: str) -> Held:
    """Copies an array into what a store holds.

    Raises:
        PrecisionError: if the precision cannot hold a value; the message begins with ``name``.
    """
    device = array.device if isinstance(array, Tensor) else None
    is_scalar = isinstance(array, np.generic)
    target = torch.device("cpu") if place == "host" else device
    codec = codec_for(precision, _describe(array))
    tensor = float_tensor(array) if codec is not None else None
    if codec is not None and tensor is not None:
        parts = tuple(part.to(target or "cpu") for part in codec.pack(tensor, name=name))
        return Held(parts, codec, torch.empty_like(tensor, device="meta"), device, is_scalar)
    if isinstance(array, Tensor) and array.device != target:
        return Held((array.detach().to(target),), None, None, device, is_scalar)
    return Held((copy_array(array),), None, None, device, is_scalar)


def _describe(array: Array) -> Tensor | None:
    """Gives a tensor of the array's shape and type without data; None if it is not packed in any case."""
    if isinstance(array, Tensor):
        return array.detach() if array.is_floating_point() else None
    probe = float_tensor(np.empty(0, array.dtype))
    return None if probe is None else torch.empty(array.shape, dtype=probe.dtype, device="meta")
