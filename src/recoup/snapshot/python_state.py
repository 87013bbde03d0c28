"""Python state as it stands now: what of it changes, and how to put it back.

Units keep counters, lists and caches in their attributes, change objects that they are given, and have hooks that fill
lists; what runs a unit several times must leave none of that behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import copy_context
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from recoup.snapshot.reachable import is_machinery
from recoup.snapshot.tensors import held_hooks
from recoup.tensors import version_of

__all__ = ["Notes"]

_MOST_ITEMS = 1000
_DEEPEST = 4
_HOOK_DEPTH = 3
_CONTEXT_DEPTH = 2
_CONTAINERS = (list, dict, set, deque)
_FIXED = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, nn.Module, torch.Size, torch.dtype)

_STRUCTURE = frozenset(vars(nn.Module()))


class Notes:
    """Containers, attributes, tensors and generators, as they stood.

    >>> from types import SimpleNamespace
    >>> cache = SimpleNamespace(entries=[1])
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
        self._hooks: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {}

    def add_object(self, name: str, value: Any, depth: int = _DEEPEST) -> None:
        """Notes an object, and what lies in it."""
        if id(value) in self._seen or depth == 0 or isinstance(value, _FIXED) or is_machinery(value):
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._tensors.append((name, value, version_of(value)))
            self._hooks.append(held_hooks(value))
        elif isinstance(value, torch.Generator):
            self._generators.append((value, value.get_state()))
        elif isinstance(value, _CONTAINERS):
            if len(value) <= _MOST_ITEMS:
                self._add_place(name, value, _items(name, value), depth)
        elif isinstance(attributes := getattr(value, "__dict__", None), dict):
            self._add_place(
                name, attributes, ((f"{name}.{key}", item) for key, item in attributes.items()), depth
            )

    def _add_place(self, name: str, place: Any, items: Iterable[tuple[str, Any]], depth: int) -> None:
        self._places.append((name, place, place.copy()))
        for path, item in list(items):
            self.add_object(path, item, depth - 1)

    def add_modules(self, root: nn.Module) -> None:
        """Notes the attributes of a module and of all inside it, what lies in them, and hooks."""
        for name, module in root.named_modules():
            self._add_module(name, module)

    def _add_module(self, name: str, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):  # its dictionaries are not its own
            return
        self._places.append((name, vars(module), vars(module).copy()))
        self._hooks += map(held_hooks, (*module.parameters(recurse=False), *module.buffers(recurse=False)))
        for key, value in list(vars(module).items()):
            if key not in _STRUCTURE:
                self.add_object(f"{name}.{key}", value)
            elif isinstance(value, _CONTAINERS):
                self._places.append((f"{name}.{key}", value, value.copy()))

    def add_hooks(self, root: nn.Module) -> None:
        """Notes what the hooks of a module, and of all inside it, may fill: what they close over and belong to."""
        for name, module in root.named_modules():
            for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
                for value in _reached(hook):
                    if isinstance(value, nn.Module):
                        self._add_module(name, value)
                    else:
                        self.add_object(f"a hook of {name}", value, _HOOK_DEPTH)

    def add_context(self) -> None:
        """Notes the lists and dicts that context variables lead to."""
        for variable, value in copy_context().items():
            if isinstance(value, _CONTAINERS):
                self.add_object(variable.name, value, _CONTEXT_DEPTH)

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
        for restore in self._hooks:
            restore()


def _reached(hook: Any) -> Iterator[Any]:
    """What a function can get at without being given it."""
    if isinstance(hook, partial):
        yield from (*hook.args, *hook.keywords.values())
        yield from _reached(hook.func)
    elif isinstance(hook, MethodType):
        yield hook.__self__
        yield from _reached(hook.__func__)
    elif isinstance(hook, FunctionType):
        yield from _closed_over(hook)
        known = hook.__globals__
        yield from (
            known[name] for name in hook.__code__.co_names if isinstance(known.get(name), _CONTAINERS)
        )
    else:
        yield hook


def _closed_over(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not set yet
            continue


def _items(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, set):
        return ()
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return ((f"{name}[{key!r}]", item) for key, item in pairs)


def _is_same(place: Any, then: Any) -> bool:
    """Whether a container has the entries that it had: the same objects, or equal numbers and texts."""
    if len(place) != len(then):
        return False
    if isinstance(place, set):
        return bool(place == then)
    if isinstance(place, dict):
        return all(map(_is_equal, place, then)) and all(map(_is_equal, place.values(), then.values()))
    return all(map(_is_equal, place, then))


def _is_equal(now: Any, then: Any) -> bool:
    return now is then or (isinstance(now, (int, float, str)) and type(now) is type(then) and now == then)
