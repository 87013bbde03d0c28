"""Python state as it stands now: what of it changes, and how to put it back.

`preserving` puts back what torch knows of a module. Units also keep counters, lists and caches in their attributes,
and change objects that they are given; an examination runs a unit several times and must leave none of that behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from recoup.measuring.trees import version_of

__all__ = ["Notes", "unchanged_attributes"]

_MOST_ITEMS = 1000
_DEEPEST = 4
_CONTAINERS = (list, dict, set, deque)
_FIXED = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, nn.Module, torch.Size, torch.dtype)


class Notes:
    """Containers, attributes, tensors and generators, as they stood.

    >>> class Cache: ...
    >>> cache = Cache()
    >>> cache.entries = [1]
    >>> notes = Notes()
    >>> notes.add_object("cache", cache)
    >>> cache.entries.append(2)
    >>> notes.changed()
    ['cache.entries']
    >>> notes.put_back()
    >>> cache.entries
    [1]
    """

    def __init__(self) -> None:
        self._places: list[tuple[str, Any, Any]] = []
        self._tensors: list[tuple[str, Tensor, int]] = []
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        self._seen: dict[int, Any] = {}

    def add_object(self, name: str, value: Any, depth: int = _DEEPEST) -> None:
        """Notes an object, and what lies in it."""
        if id(value) in self._seen or depth == 0 or isinstance(value, _FIXED):
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._tensors.append((name, value, version_of(value)))
        elif isinstance(value, torch.Generator):
            self._generators.append((value, value.get_state()))
        elif isinstance(value, _CONTAINERS):
            if len(value) <= _MOST_ITEMS:
                self._add_place(name, value, _items(name, value), depth)
        elif attributes := getattr(value, "__dict__", None):
            self._add_place(
                name, attributes, ((f"{name}.{key}", item) for key, item in attributes.items()), depth
            )

    def _add_place(self, name: str, place: Any, items: Iterable[tuple[str, Any]], depth: int) -> None:
        self._places.append((name, place, place.copy()))
        for path, item in list(items):
            self.add_object(path, item, depth - 1)

    def add_modules(self, root: nn.Module) -> None:
        """Notes the attributes of a module and of all inside it, with lists, dicts and generators there."""
        for name, module in root.named_modules():
            if isinstance(module, torch.jit.ScriptModule):  # its dictionaries are not its own
                continue
            self._places.append((name, vars(module), vars(module).copy()))
            for key, value in vars(module).items():
                if isinstance(value, (*_CONTAINERS, torch.Generator)):
                    self.add_object(f"{name}.{key}", value, depth=1)

    def changed(self) -> list[str]:
        """The names of what is not as it was."""
        places = [name for name, place, then in self._places if not _is_same(place, then)]
        tensors = [name for name, tensor, version in self._tensors if version_of(tensor) != version]
        return places + tensors

    def put_back(self) -> None:
        """Makes containers, attributes and generators what they were. Values of tensors are for others to put back."""
        for _, place, then in self._places:
            if not _is_same(place, then):
                place.clear()
                (place.update if isinstance(place, (dict, set)) else place.extend)(then)
        for generator, state in self._generators:
            generator.set_state(state)


def _items(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, set):
        return ()
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return ((f"{name}[{key!r}]", item) for key, item in pairs)


def _is_same(place: Any, then: Any) -> bool:
    if len(place) != len(then):
        return False
    if isinstance(place, set):
        return bool(place == then)
    if isinstance(place, dict):
        return list(place) == list(then) and all(map(_is_equal, place.values(), then.values()))
    return all(map(_is_equal, place, then))


def _is_equal(now: Any, then: Any) -> bool:
    return now is then or (isinstance(now, (int, float, str)) and type(now) is type(then) and now == then)


@contextmanager
def unchanged_attributes(module: nn.Module) -> Iterator[None]:
    """Puts the attributes of all modules inside back, also if the block raises."""
    notes = Notes()
    notes.add_modules(module)
    try:
        yield
    finally:
        notes.put_back()
