"""What a function can reach besides its arguments: modules, tensors and generators, and the names that lead there."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

from torch import Generator, Tensor
from torch.nn import Module

from recoup.snapshot.own_code import (
    UNBOUND,
    content_of,
    global_names,
    is_library,
    is_own,
    methods_of_forward,
    slots_of,
)
from recoup.snapshot.places import GlobalName
from recoup.tensors import without_history

__all__ = ["Reach", "bound_parts"]

_MOST_ITEMS = 1000
_DEEPEST = 40
_REACHED = (Module, Tensor, Generator)
# Nothing that a replay could find changed; most globals that a function names are of these kinds.
_FIXED = (ModuleType, type, int, float, str)
_BOUND = (MethodType, BuiltinFunctionType, MethodWrapperType, functools.partial)
"""Callables that lead to what they are bound to."""
_CONTAINERS = (list, tuple, deque, set, frozenset, dict)


class Reach:
    """The roots that a function leads to, and the variables that it reads them from.

    Attributes:
        roots: modules and tensors, with their names.
        generators: of random numbers.
        originals: the tensors with a history among the roots, which are held without.
        bindings: variables of the function itself, with what they refer to: closure cells and globals.
    """

    __slots__ = ("_binds", "_budget", "_depth", "_seen", "bindings", "generators", "originals", "roots")

    def __init__(self, fn: Any, arguments: list[Any]) -> None:
        self.generators: list[Generator] = []
        self.roots: list[tuple[str, Module | Tensor]] = []
        self.bindings: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        self._budget = _MOST_ITEMS
        self._depth = 0
        self.originals: list[weakref.ref[Tensor]] = []
        self._binds = True
        """Whether variables are noted, or only looked through."""
        self._find("", fn)
        for value in arguments:
            self._find(type(value).__name__, value)

    def add_code(self, module: Module) -> None:
        """Follows what the user wrote for a module's forward."""
        for method in methods_of_forward(type(module)):
            self._find_helper(method)

    def add_attribute(self, name: str, value: Any) -> None:
        """Follows a module's attribute, but not objects of libraries: a trainer, say, leads too far."""
        if isinstance(value, FunctionType):
            self._find_helper(value)
        elif isinstance(value, _BOUND):
            if id(value) not in self._seen:
                self._seen.add(id(value))
                for key, part in bound_parts(value, name):
                    self.add_attribute(key, part)
        elif isinstance(value, (*_CONTAINERS, *_REACHED)) or is_own(type(value)):
            self._find(name, value)

    def _find(self, name: str, value: Any) -> None:
        if isinstance(value, FunctionType):
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._find_captured(value)
        elif isinstance(value, Module):
            self.roots.append((name, value))
        elif isinstance(value, Tensor):
            if value.grad_fn is not None:
                self.originals.append(weakref.ref(value))
            self.roots.append((name, without_history(value)))
        elif not isinstance(value, _FIXED) and value is not None and id(value) not in self._seen:
            self._seen.add(id(value))
            # Not by `isinstance`, which asks Python code of torch's.
            if Generator in type(value).__mro__:
                self.generators.append(value)
            elif self._depth < _DEEPEST:
                self._depth += 1
                with suppress(Exception):  # objects may raise whatever they want when they are looked at
                    self._find_inside(name, value)
                self._depth -= 1

    def _find_helper(self, fn: FunctionType) -> None:
        if id(fn) not in self._seen and not is_library(fn.__code__.co_filename):
            self._seen.add(id(fn))
            before, self._binds = self._binds, False
            self._find_captured(fn)
            self._binds = before

    def _find_captured(self, fn: FunctionType) -> None:
        code, binds = fn.__code__, self._binds
        if fn.__closure__:
            for name, cell in zip(code.co_freevars, fn.__closure__, strict=True):
                value = content_of(cell)
                if value is not UNBOUND:
                    if binds:
                        self.bindings.append((cell, value))
                    self._find(name, value)
        if fn.__defaults__:
            for index, value in enumerate(fn.__defaults__):
                self._find(f"default {index}", value)
        if fn.__kwdefaults__:
            for name, value in fn.__kwdefaults__.items():
                self._find(name, value)
        known = fn.__globals__
        for name in global_names(code):
            if name not in known:
                continue
            value = known[name]
            if isinstance(value, FunctionType):
                self._find_helper(value)
            elif not isinstance(value, (ModuleType, type, BuiltinFunctionType)):
                if binds:
                    self.bindings.append((GlobalName(known, name), value))
                if isinstance(value, (*_REACHED, *_CONTAINERS)) or is_own(type(value)):
                    self._find(name, value)

    def _find_inside(self, name: str, value: Any) -> None:
        if isinstance(value, _BOUND):
            for key, part in bound_parts(value, name):
                self._find(key, part)
        elif isinstance(value, _CONTAINERS):
            if len(value) <= self._budget:
                self._budget -= len(value)
                pairs = value.items() if isinstance(value, dict) else enumerate(value)
                for key, item in list(pairs):  # another thread may be filling it
                    self._find(f"{name}[{key!r}]", item)
        else:
            self._find(name, _wrapped(value))
            self._find_attributes(name, value)

    def _find_attributes(self, name: str, owner: Any) -> None:
        """Of an object; all that it leads to if the user wrote its class."""
        own = is_own(type(owner))
        prefix = f"{name}." if name else ""
        attributes = getattr(owner, "__dict__", {})
        if own:
            slots = {slot.__name__: getattr(owner, slot.__name__, None) for slot in slots_of(type(owner))}
            attributes = attributes | slots
            self._budget -= len(attributes)
        for key, item in attributes.items():
            if (own and self._budget > 0) or isinstance(item, (*_REACHED, list, tuple, dict)):
                self._find(prefix + key, item)

    def name(self, tensor: Tensor) -> str:
        """Says how the function reaches a tensor."""
        for name, root in self.roots:
            if root is tensor:
                return f"the captured tensor {name!r}"
            if isinstance(root, Module):
                found = _name_inside(root, tensor, f"{name}." if name else "")
                if found is not None:
                    return found
        return "a captured tensor"


def bound_parts(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """What a partial, or a bound method, calls and is bound to, with names."""
    if isinstance(value, functools.partial):
        yield name, value.func
        yield from ((f"{name} argument {index}".lstrip(), item) for index, item in enumerate(value.args))
        yield from list(value.keywords.items())
    else:
        if isinstance(value, MethodType):
            yield name, value.__func__
        yield name, value.__self__


def _name_inside(root: Module, tensor: Tensor, prefix: str) -> str | None:
    for kind, members in (("parameter", root.named_parameters()), ("buffer", root.named_buffers())):
        for path, member in members:
            if member is tensor:
                return f"{kind} {prefix + path!r} of {type(root).__name__}"
    for path, module in root.named_modules():
        for key, value in module.__dict__.items():
            if isinstance(value, Tensor) and (value is tensor or value.data_ptr() == tensor.data_ptr()):
                return f"attribute {prefix + '.'.join(filter(None, (path, key)))!r}"
    return None


def _wrapped(value: Any) -> Any:
    """What a wrapper says that it wraps; not what an object makes up for any name."""
    if "__wrapped__" in getattr(value, "__dict__", ()) or hasattr(type(value), "__wrapped__"):
        return getattr(value, "__wrapped__", None)
    return None
