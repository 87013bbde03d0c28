"""The plain tensors and the storages behind any tensor: views share them, wrapper subclasses hide them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

__all__ = ["num_owners", "plain_tensors", "storages", "tensors"]

_BY_ROW = ("crow_indices", "col_indices", "values")
_BY_COLUMN = ("ccol_indices", "row_indices", "values")
_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _BY_ROW,
    torch.sparse_bsr: _BY_ROW,
    torch.sparse_csc: _BY_COLUMN,
    torch.sparse_bsc: _BY_COLUMN,
}


def tensors(tree: Any) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dictionaries.

    >>> [len(tensor) for tensor in tensors({"a": [torch.zeros(2)], "b": (1, torch.zeros(3))})]
    [2, 3]
    """
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor))


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor itself, or what holds its bytes: parts of a wrapper subclass (a sharded tensor), or of a sparse one.

    >>> [part.dtype for part in plain_tensors(torch.eye(3).to_sparse())]
    [torch.int64, torch.float32]
    """
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        names, _ = wrapper.__tensor_flatten__()
        for name in names:
            yield from plain_tensors(getattr(wrapper, name))
    elif tensor.layout in _SPARSE_PARTS:
        yield from (getattr(tensor, name)() for name in _SPARSE_PARTS[tensor.layout])
    else:
        yield tensor


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages that hold its bytes.

    >>> [storage.nbytes() for storage in storages(torch.zeros(10)[:3])]
    [40]
    """
    for plain in plain_tensors(tensor):
        if plain.layout is torch.strided:
            yield plain.untyped_storage()


def num_owners(storage: torch.UntypedStorage) -> int:
    """How many refer to a storage: tensors, graphs and the Python object itself.

    >>> tensor = torch.zeros(10)
    >>> alias = tensor[:3]
    >>> num_owners(tensor.untyped_storage())
    3
    """
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count
