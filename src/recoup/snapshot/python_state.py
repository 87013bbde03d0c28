"""Python state of modules and objects, found by looking into them: what of it changes, and how to put it back.

Units keep counters, lists and caches in their attributes, change objects that they are given, and have hooks that fill
lists. Code that runs a unit several times must leave none of that behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextvars import copy_context
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from recoup.snapshot.accessors import random_generator, setting
from recoup.snapshot.own_code import UNBOUND, content_of, is_machinery
from recoup.snapshot.places import Snapshot
from recoup.tensors import version_of

__all__ = ["Notes"]

_MOST_ITEMS = 1000
_DEEPEST = 4
_HOOK_DEPTH = 3
_CONTEXT_DEPTH = 2
_CONTAINERS = (list, dict, set, deque)
_FIXED = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, nn.Module, torch.Size, torch.dtype)

_STRUCTURE = frozenset(vars(nn.Module()))


class Notes(Snapshot):
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
        super().__init__()
        self._tensors: list[tuple[str, Tensor, int]] = []
        self._seen: dict[int, Any] = {}

    def add_object(self, name: str, value: Any, depth: int = _DEEPEST) -> None:
        """Notes an object, and what lies in it. Values of tensors are for others to put back."""
        if id(value) in self._seen or depth == 0 or isinstance(value, _FIXED) or is_machinery(value):
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._tensors.append((name, value, version_of(value)))
            self.add_hooks([value])
        elif (generator := random_generator(value)) is not None:
            self.add(generator, name)
        elif isinstance(value, _CONTAINERS):
            if len(value) <= _MOST_ITEMS:
                self.add(value, name)
                self._add_items(_items(name, value), depth)
        elif isinstance(attributes := getattr(value, "__dict__", None), dict):
            self.add(attributes, name)
            self._add_items(((f"{name}.{key}", item) for key, item in attributes.items()), depth)

    def _add_items(self, items: Iterable[tuple[str, Any]], depth: int) -> None:
        for path, item in list(items):
            self.add_object(path, item, depth - 1)

    def add_modules(self, root: nn.Module) -> None:
        """Notes the attributes of a module and of all inside it, what lies in them, and hooks."""
        for name, module in root.named_modules():
            self._add_module(name, module)

    def _add_module(self, name: str, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):  # its dictionaries are not its own
            self.add(
                setting(partial(getattr, module, "training", None), partial(setattr, module, "training"))
            )
            return
        self.add(vars(module), name)
        self.add_hooks((*module.parameters(recurse=False), *module.buffers(recurse=False)))
        for key, value in list(vars(module).items()):
            if key not in _STRUCTURE:
                self.add_object(f"{name}.{key}", value)
            elif isinstance(value, _CONTAINERS):
                self.add(value, f"{name}.{key}")

    def add_module_hooks(self, root: nn.Module) -> None:
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
        """The names of containers and tensors that changed."""
        tensors = [name for name, tensor, version in self._tensors if version_of(tensor) != version]
        return super().changed() + tensors


def _reached(hook: Any) -> Iterator[Any]:
    """What a function can get at without being given it."""
    if isinstance(hook, partial):
        yield from (*hook.args, *hook.keywords.values())
        yield from _reached(hook.func)
    elif isinstance(hook, MethodType):
        yield hook.__self__
        yield from _reached(hook.__func__)
    elif isinstance(hook, FunctionType):
        yield from (item for cell in hook.__closure__ or () if (item := content_of(cell)) is not UNBOUND)
        known = hook.__globals__
        yield from (
            known[name] for name in hook.__code__.co_names if isinstance(known.get(name), _CONTAINERS)
        )
    else:
        yield hook


def _items(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, set):
        return ()
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return ((f"{name}[{key!r}]", item) for key, item in pairs)
