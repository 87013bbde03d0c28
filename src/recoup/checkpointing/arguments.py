"""The arguments of one checkpointed call: taken apart, held, and put together again for the replay.

Containers (lists, tuples, dicts, dataclasses, to any depth) are taken apart so that each tensor is held and
watched by itself, and so that the replay gets containers of its own, filled as they were before the forward,
whatever the caller or the function did to the originals. All other values are held as they are.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Arguments"]

_PLAIN = frozenset({int, float, bool, str, type(None), complex, bytes, torch.dtype, torch.device, torch.Size})
_BARE = frozenset({list, tuple, dict})


class _Slot:
    """Stands for the tensor with this index."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Container:
    """Stands for a container. It never refers to the original, which would keep its tensors alive."""

    __slots__ = ("children", "keys", "kind", "pattern")

    def __init__(self, original: Any, keys: tuple[Any, ...], children: list[Any]) -> None:
        self.kind = type(original)
        self.keys = keys
        self.children = children
        self.pattern: Any = None
        """An emptied copy, for containers that carry more than their items."""
        if self.kind not in _BARE and not isinstance(original, tuple):
            self.pattern = copy.copy(original)
            self.fill(self.pattern, [None] * len(keys))

    def fill(self, container: Any, values: list[Any]) -> None:
        if isinstance(container, list):
            container[:] = values
        elif isinstance(container, (dict, UserDict)):
            for key, value in zip(self.keys, values, strict=True):
                container[key] = value
        else:
            for key, value in zip(self.keys, values, strict=True):
                object.__setattr__(container, key, value)  # frozen dataclasses too


class Arguments:
    """What a call was given, ready to be given again.

    Without saved-tensor hooks around the call the tensors are held as they are, and their version counters
    tell whether anyone changed them. With hooks around it (an enclosing checkpoint, ``save_on_cpu``) the
    tensors go through those hooks, as anything saved there does: an enclosing checkpoint then forgets and
    replays them too.
    """

    __slots__ = (
        "_args", "_held", "_is_flat", "_kwargs", "_needs_grad", "_tensors", "_unpack", "_versions", "changed", "others",
    )  # fmt: skip

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors: list[Tensor] = []
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self._is_flat = hooks is None and _collect(args, tensors) and _collect(kwargs.values(), tensors)
        """The usual call: tensors and plain values, held as they are. Nothing to take apart."""
        self._args: Any = args
        self._kwargs: Any = kwargs
        self.others: list[Any] = []
        """Values that are neither plain data, containers nor tensors: modules, generators, functions, objects."""
        if not self._is_flat:
            tensors.clear()
            self._args, self._kwargs = self._take_all_apart(tensors, self.others)
        self.changed: list[int] = []
        """Slots that the function itself changed in place, filled by `settle`."""
        self._tensors = tensors
        self._versions = _versions(tensors)
        self._held: list[Any] = tensors
        self._unpack: Callable[[Any], Tensor] | None = None
        if hooks is not None and tensors:
            pack, self._unpack = hooks
            self._needs_grad = [tensor.requires_grad for tensor in tensors]
            self._held = [pack(tensor) for tensor in tensors]

    def _take_all_apart(self, tensors: list[Tensor], others: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        args = [_take_apart(value, tensors, others) for value in self._args]
        return args, {key: _take_apart(value, tensors, others) for key, value in self._kwargs.items()}

    def __len__(self) -> int:
        return len(self._versions)

    def settle(self) -> None:
        """Notes, right after the forward, which tensors the function itself changed in place."""
        now = _versions(self._tensors)
        if now != self._versions:
            self.changed = [index for index, version in enumerate(self._versions) if version != now[index]]
        self._tensors = []

    def rebuild(self) -> tuple[Sequence[Any], dict[str, Any]]:
        """Gives the arguments as they were, in new containers."""
        if self._is_flat:
            return self._args, self._kwargs
        tensors = self._held
        if self._unpack is not None:
            tensors = [
                _with_grad(self._unpack(packed)) if needs_grad else self._unpack(packed)
                for packed, needs_grad in zip(self._held, self._needs_grad, strict=True)
            ]
        args = [_put_together(node, tensors) for node in self._args]
        return args, {key: _put_together(node, tensors) for key, node in self._kwargs.items()}

    def first_stale(self) -> int | None:
        """The first slot whose tensor was changed in place since before the forward."""
        if self.changed:
            return self.changed[0]
        if self._unpack is None and (now := _versions(self._held)) != self._versions:
            return next(index for index, version in enumerate(self._versions) if version != now[index])
        return None

    def describe(self) -> list[str]:
        """The kind of each held tensor, or where it went."""
        if self._unpack is not None:
            return ["held by enclosing hooks"] * len(self._held)
        return [f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in self._held]

    def path(self, index: int, names: list[str]) -> str:
        """Names a slot as the caller wrote it: ``x``, ``batch['mask']``, ``states[2].hidden``."""
        args, kwargs = self._take_all_apart([], []) if self._is_flat else (self._args, self._kwargs)
        for position, node in enumerate(args):
            name = names[position] if position < len(names) else f"argument {position}"
            for found, path in _paths(node, name):
                if found == index:
                    return path
        for key, node in kwargs.items():
            for found, path in _paths(node, repr(key)):
                if found == index:
                    return path
        raise IndexError(index)


def _collect(values: Iterable[Any], tensors: list[Tensor]) -> bool:
    """Collects the tensors among values; returns whether all others are plain."""
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif type(value) not in _PLAIN:
            return False
    return True


def _versions(tensors: list[Tensor]) -> list[int]:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # inference tensors have no version counter
        return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def _with_grad(tensor: Tensor) -> Tensor:
    # Hooks give back bare data. Without this the replay would record no graph and save nothing.
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()


def _take_apart(value: Any, tensors: list[Tensor], others: list[Any]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Slot(len(tensors) - 1)
    if type(value) in _PLAIN:
        return value
    if isinstance(value, (list, tuple)):
        return _Container(value, tuple(range(len(value))), [_take_apart(item, tensors, others) for item in value])
    if isinstance(value, (dict, UserDict)):
        children = [_take_apart(item, tensors, others) for item in value.values()]
        return _Container(value, tuple(value), children)
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, torch.nn.Module)):
        keys = tuple(field.name for field in dataclasses.fields(value) if hasattr(value, field.name))
        return _Container(value, keys, [_take_apart(getattr(value, key), tensors, others) for key in keys])
    others.append(value)
    return value


def _put_together(node: Any, tensors: list[Tensor]) -> Any:
    if type(node) is _Slot:
        return tensors[node.index]
    if type(node) is not _Container:
        return node
    children = [_put_together(child, tensors) for child in node.children]
    if node.kind is list:
        return children
    if node.kind is dict:
        return dict(zip(node.keys, children, strict=True))
    if issubclass(node.kind, tuple):
        # Past the subclass's own __new__: a named tuple takes fields, a packed sequence computes some.
        return tuple.__new__(node.kind, children)
    container = copy.copy(node.pattern)
    node.fill(container, children)
    return container


def _paths(node: Any, name: str) -> Iterator[tuple[int, str]]:
    if type(node) is _Slot:
        yield node.index, name
    elif type(node) is _Container:
        attributes = not issubclass(node.kind, (list, tuple, dict, UserDict))
        for key, child in zip(node.keys, node.children, strict=True):
            yield from _paths(child, f"{name}.{key}" if attributes else f"{name}[{key!r}]")
