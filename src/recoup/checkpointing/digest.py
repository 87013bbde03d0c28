"""A digest of a tensor's content: a hash of its bits, made where the tensor lives."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from recoup.tensors import plain_tensors
from recoup.torch_private import FakeTensor, WithoutDispatch, is_traceable_wrapper_subclass, transform_level

__all__ = ["Digest", "are_same", "digest", "digest_of_saved", "fetched", "has_bits", "is_same"]

Digest: TypeAlias = "bytes | int | Tensor | tuple[Digest, ...] | None"
"""Of host memory bytes; of a device's memory a tensor there, and an integer once it was fetched; of a wrapper those of
what it wraps; None without plain storage."""

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
    return are_same([(left, right)])


def are_same(pairs: list[tuple[Digest, Digest]]) -> bool:
    """Whether the digests of every pair are the same, with one wait for each device."""
    found = iter(fetched([one for pair in pairs for one in pair]))
    return all(_is_equal(left, right) for left, right in zip(found, found, strict=True))


def _is_equal(left: Digest, right: Digest) -> bool:
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(_is_equal, left, right))
    return left is None or right is None or left == right


def fetched(digests: Sequence[Digest]) -> list[Digest]:
    """The same on the host, where they take none of a device's memory, with one wait for each device."""
    waiting: dict[torch.device, list[Tensor]] = {}
    for tensor in _tensors_of(digests):
        waiting.setdefault(tensor.device, []).append(tensor)
    values = {
        id(tensor): value
        for tensors in waiting.values()
        for tensor, value in zip(tensors, torch.stack(tensors).tolist(), strict=True)
    }
    return [_with_values(one, values) for one in digests]


def _tensors_of(digests: Sequence[Digest]) -> Iterator[Tensor]:
    for one in digests:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, tuple):
            yield from _tensors_of(one)


def _with_values(found: Digest, values: dict[int, int]) -> Digest:
    if isinstance(found, tuple):
        return tuple(_with_values(one, values) for one in found)
    return values[id(found)] if isinstance(found, Tensor) else found


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
    """Each word mixed with its place: twice, its upper half is folded into its lower one, and x + 2x² carries bits up.

    On a device every operation is a kernel of its own: these are few, no word collides with another one, and a sum of
    their results still tells apart flipped signs, moved values and changes that cancel in any weighted sum. After one
    round it did not: the signs of both floats of a word met in the fold.
    """
    mixed = torch.arange(start + 1, start + 1 + words.numel(), device=words.device)
    torch.add(words, mixed, alpha=_FACTOR, out=mixed)
    halves = mixed.view(torch.int32).view(-1, 2)  # in place: a shift would take as much memory again
    for _ in range(2):
        halves[:, 0].bitwise_xor_(halves[:, 1])
        mixed.addcmul_(mixed, mixed, value=2)
    return mixed
