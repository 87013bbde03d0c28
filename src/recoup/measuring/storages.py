"""The plain tensors and the storages behind any tensor: views share them, wrapper subclasses hide them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

__all__ = ["num_owners", "plain_tensors", "storages", "tensors"]


def tensors(tree: Any) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dictionaries.

    >>> [len(tensor) for tensor in tensors({"a": [torch.zeros(2)], "b": (1, torch.zeros(3))})]
    [2, 3]
    """
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor))


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor itself, or the parts of a wrapper subclass (such as a sharded tensor) that hold its bytes."""
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        names, _ = wrapper.__tensor_flatten__()
        for name in names:
            yield from plain_tensors(getattr(wrapper, name))
    else:
        yield tensor


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages that hold its bytes: none for sparse tensors.

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
