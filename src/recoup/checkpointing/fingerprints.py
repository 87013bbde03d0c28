"""Fingerprints of tensors: whether two runs gave the same results, without holding those of the first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from recoup.checkpointing.digest import Digest, digest, is_same
from recoup.checkpointing.mismatch import Kind, kind_of

__all__ = ["Fingerprint", "differing", "fingerprint", "on_host"]

Fingerprint: TypeAlias = tuple[Kind, Digest]
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def fingerprint(tensor: Tensor) -> Fingerprint:
    """A tensor's shape, dtype and device, and a hash of its contents."""
    return kind_of(tensor), digest(on_host(tensor) if tensor.layout in _SPARSE else tensor)


def on_host(tensor: Tensor) -> Tensor:
    """A dense copy in host memory."""
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    return dense.to("cpu", copy=True)


def differing(first: Mapping[str, Fingerprint], second: Mapping[str, Fingerprint]) -> list[str]:
    """Names under which the two have different tensors, or only one has any.

    >>> ones, zeros = fingerprint(torch.ones(2)), fingerprint(torch.zeros(2))
    >>> differing({"a": ones, "b": ones}, {"a": ones, "b": zeros, "c": zeros})
    ['b', 'c']
    """
    return [name for name in {**first, **second} if not _is_same(first.get(name), second.get(name))]


def _is_same(one: Fingerprint | None, other: Fingerprint | None) -> bool:
    if one is None or other is None:
        return False
    return one[0] == other[0] and is_same(one[1], other[1])
