"""Nested values (containers, dataclasses, model outputs) as the tensors that are in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from recoup.checkpointing.arguments import _put_together, _take_apart
from recoup.measuring.storages import storages

__all__ = ["map_tensors", "named_outputs", "needing_gradient", "storages_of", "tensors_in", "version_of"]


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in nested containers, each object once.

    >>> import torch
    >>> x = torch.zeros(2)
    >>> len(tensors_in({"a": [x, (x, torch.ones(3))]}))
    2
    """
    found: list[Tensor] = []
    _take_apart(tree, found, [])
    return list({id(tensor): tensor for tensor in found}.values())


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same nested containers with other tensors; one that occurs twice is changed once."""
    found: list[Tensor] = []
    node = _take_apart(tree, found, [])
    changed = {key: change(tensor) for key, tensor in {id(tensor): tensor for tensor in found}.items()}
    return _put_together(node, [changed[id(tensor)] for tensor in found])


def needing_gradient(tree: Any) -> list[Tensor]:
    """The tensors in nested containers that need a gradient."""
    return [tensor for tensor in tensors_in(tree) if tensor.requires_grad]


def named_outputs(output: Any) -> list[tuple[str, Tensor]]:
    """The tensors of a model's output with the names that its user knows them by.

    >>> import torch
    >>> [name for name, _ in named_outputs({"logits": torch.zeros(1), "states": [torch.zeros(1), torch.zeros(1)]})]
    ['logits', 'states', 'states']
    >>> [name for name, _ in named_outputs(torch.zeros(1))]
    ['the output']
    """
    if isinstance(output, Mapping):
        parts = [(str(key), value) for key, value in output.items()]
    elif isinstance(output, (tuple, list)):
        parts = [(f"output {index}", value) for index, value in enumerate(output)]
    else:
        parts = [("the output", output)]
    return [(name, tensor) for name, value in parts for tensor in tensors_in(value)]


def storages_of(tree: Any) -> dict[int, int]:
    """Bytes by storage: views and aliases count once."""
    found = (storage for tensor in tensors_in(tree) for storage in storages(tensor))
    return {storage._cdata: storage.nbytes() for storage in found}


def version_of(tensor: Tensor) -> int:
    """Its version counter; inference tensors have none."""
    return -1 if tensor.is_inference() else tensor._version
