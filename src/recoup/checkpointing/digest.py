"""A digest of a tensor's content: a hash of its bits, made where the tensor lives."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from recoup.tensors import plain_tensors
from recoup.torch_private import FakeTensor, WithoutDispatch, is_traceable_wrapper_subclass, transform_level

__all__ = ["Digest", "are_same", "digest", "digest_of_saved", "has_bits", "is_same", "packed"]

Digest: TypeAlias = "bytes | Tensor | tuple[Digest, ...] | None"
"""Of host memory bytes, of a device's memory a tensor there, of a wrapper those of what it wraps; None without plain
storage."""

_SEEDS = (torch.int64, torch.uint64)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20
"""Words that are hashed at once on a device: they take 8 MiB."""
_PIECE_BYTES = 4 << 20
"""Of a tensor that is not contiguous so much is copied at once on a device, and hashed: both take 8 MiB."""
_CHUNK_BYTES = 1 << 20
# Odd, with about as many ones as zeros; as a signed integer, which is what torch multiplies.
_FACTOR = -7046029254386353131


def digest(tensor: Tensor) -> Digest:
    """Hashes a tensor's bits in the order of its elements, so that moved values show as well as changed ones.

    On the host it is BLAKE2. Elsewhere every word is mixed with its place and all are summed up, without
    synchronisation and with little memory. Sparse, quantised, nested and fake tensors have none,
    nor do wrappers that do not tell what they wrap.

    >>> is_same(digest(torch.tensor([1.0, 2.0])), digest(torch.tensor([2.0, 1.0])))
    False
    """
    is_subclass = type(tensor) not in (Tensor, Parameter)
    wrapper: Any = tensor
    if is_subclass and is_traceable_wrapper_subclass(wrapper):  # such as DTensor
        return tuple(map(digest, plain_tensors(tensor)))
    if not has_bits(tensor):
        return None
    if is_subclass:
        tensor = tensor.detach().as_subclass(Tensor)
    with torch.no_grad(), WithoutDispatch():
        # A mask that was expanded has every row once in memory.
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dim] > 1:
                tensor = tensor.narrow(dim, 0, 1)
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        tensor = tensor.detach().resolve_neg()
        return _of_host(tensor) if tensor.device.type == "cpu" else _of_words(tensor)


def has_bits(tensor: Tensor) -> bool:
    """Whether a tensor has memory that can be read element by element; fake tensors and wrappers have none."""
    if (
        isinstance(tensor, FakeTensor)
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.device.type == "meta"
        or transform_level(tensor) > 0
    ):
        return False
    try:
        return tensor.numel() == 0 or tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:  # a wrapper's storage is invalid
        return False


def is_same(left: Digest, right: Digest) -> bool:
    """Whether two digests say that the contents are the same; without digests there is nothing to say against it."""
    if left is None or right is None:
        return True
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(is_same, left, right))
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right.to(left.device))
    return left == right


def are_same(pairs: list[tuple[Digest, Digest]]) -> bool:
    """Whether the digests of every pair are the same, with one wait for each device."""
    devices = {left.device for left, _ in pairs if isinstance(left, Tensor)}
    for device in devices:
        here = [pair for pair in pairs if isinstance(pair[0], Tensor) and pair[0].device == device]
        left, right = (torch.stack([one[side] for one in here]) for side in (0, 1))  # type: ignore[misc]
        if not torch.equal(left, right):
            return False
    return all(is_same(left, right) for left, right in pairs if not isinstance(left, Tensor))


def packed(digests: list[Digest]) -> list[Digest]:
    """The same in one piece of memory for each device, whose allocator rounds every piece up."""
    by_device: dict[torch.device, list[int]] = {}
    for index, found in enumerate(digests):
        if isinstance(found, Tensor):
            by_device.setdefault(found.device, []).append(index)
    for indices in by_device.values():
        together = torch.stack([digests[index] for index in indices])  # type: ignore[misc]
        for index, found in zip(indices, together.unbind(), strict=True):
            digests[index] = found
    return digests


def digest_of_saved(tensor: Tensor) -> Digest:
    """The digest of a tensor that autograd saves; None for single integers and for raw bytes.

    Attention without dropout saves the seed and offset of a generator that it never read, and recurrent layers save a
    workspace whose gaps nobody fills: they hold whatever was in memory, and differ from run to run.
    """
    is_opaque = tensor.dtype is torch.uint8 or (tensor.dim() == 0 and tensor.dtype in _SEEDS)
    return None if is_opaque else digest(tensor)


def _of_host(tensor: Tensor) -> bytes:
    """Through NumPy, which allocates nothing that counts as a tensor.

    Not by `Tensor.numpy`: the storage could not be resized any more, as FSDP2 does to free gathered parameters.
    """
    found = hashlib.blake2b(digest_size=16)
    array = np.from_dlpack(tensor.view(_INTEGERS[tensor.element_size()]))
    if array.flags.c_contiguous:
        found.update(array.data)
    else:
        rows = max(1, _CHUNK_BYTES // max(1, array.nbytes // array.shape[0]))
        for first in range(0, array.shape[0], rows):
            found.update(array[first : first + rows].tobytes())
    return found.digest()


def _of_words(tensor: Tensor) -> Tensor:
    found, start = [], 0
    for piece in _pieces(tensor.squeeze()):
        for words in _words_of(piece):
            found.append(_mixed(words, start).sum())
            start += words.numel()
    return found[0] if len(found) == 1 else torch.stack(found).sum()


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Contiguous pieces of a tensor in the order of its elements: whole words, but for the last one.

    A copy of the whole tensor could be the peak of a step.
    """
    if tensor.is_contiguous() or tensor.nbytes <= _PIECE_BYTES:
        yield tensor.contiguous()
        return
    row_bytes = tensor.nbytes // tensor.shape[0]
    num_rows = max(1, _PIECE_BYTES // row_bytes)
    if row_bytes % 8:
        num_rows = -(-num_rows // 8) * 8
    for rows in tensor.split(num_rows):
        if num_rows == 1:
            yield from _pieces(rows[0])
        else:
            yield rows.contiguous()


def _words_of(piece: Tensor) -> list[Tensor]:
    flat = piece.view(-1)
    num_bytes = flat.nbytes
    # A single element may have any stride, and no word begins inside another.
    if flat.stride(0) != 1 or flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone(memory_format=torch.contiguous_format)
    flat = flat.view(torch.uint8)
    end = num_bytes // 8 * 8
    words = [*flat[:end].view(torch.int64).split(_CHUNK)]
    if end < num_bytes:
        words.append(flat[end:].to(torch.int64))
    return words


def _mixed(words: Tensor, start: int) -> Tensor:
    """Each word mixed with its place: upper bits are folded into lower ones, and a square carries all of them up.

    On a device every operation is a kernel of its own: these are few, and a sum of their results still tells apart
    flipped signs, moved values and changes that cancel in any weighted sum.
    """
    mixed = torch.arange(start + 1, start + 1 + words.numel(), device=words.device)
    torch.add(words, mixed, alpha=_FACTOR, out=mixed)
    halves = mixed.view(torch.int32).view(-1, 2)  # in place: a shift would take as much memory again
    halves[:, 0].bitwise_xor_(halves[:, 1])
    return mixed.mul_(mixed)
