"""What a function can reach besides its arguments: modules, tensors and generators, and the names that lead there."""

from __future__ import annotations

import functools
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Generator, Tensor
from torch.nn import Module

__all__ = ["GlobalName", "Reach", "without_history"]

_MOST_ITEMS = 1000
_REACHED = (Module, Tensor, Generator)
# Nothing that a replay could find changed; most globals that a function names are of these kinds.
_FIXED = (ModuleType, type, BuiltinFunctionType, int, float, str)
_NOT_REBOUND = (ModuleType, type, BuiltinFunctionType, FunctionType)


class GlobalName(NamedTuple):
    """A global variable that a function names."""

    namespace: dict[str, Any]
    name: str


class Reach:
    """The roots that a function leads to, and the variables that it reads them from."""

    __slots__ = ("_budget", "_seen", "bindings", "generators", "roots")

    def __init__(self, fn: Any, others: list[Any]) -> None:
        self.generators: list[Generator] = []
        self.roots: list[tuple[str, Module | Tensor]] = []
        self.bindings: list[tuple[Any, Any]] = []
        """Closure cells and globals with what they refer to: they can be rebound."""
        self._seen: set[int] = set()
        self._budget = _MOST_ITEMS
        self._find("", fn)
        for value in others:
            self._find(type(value).__name__, value)

    def _find(self, name: str, value: Any) -> None:
        if isinstance(value, FunctionType):
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._find_captured(value)
        elif isinstance(value, Module):
            self.roots.append((name, value))
        elif isinstance(value, Tensor):
            self.roots.append((name, without_history(value)))
        elif isinstance(value, Generator):
            self.generators.append(value)
        elif not isinstance(value, _FIXED) and value is not None and id(value) not in self._seen:
            self._seen.add(id(value))
            self._find_inside(name, value)

    def _find_captured(self, fn: FunctionType) -> None:
        code = fn.__code__
        if fn.__closure__:
            for name, cell in zip(code.co_freevars, fn.__closure__, strict=True):
                try:
                    value = cell.cell_contents
                except ValueError:  # a variable that is not bound yet
                    continue
                self.bindings.append((cell, _noted(value)))
                self._find(name, value)
        if fn.__defaults__:
            for index, value in enumerate(fn.__defaults__):
                self._find(f"default {index}", value)
        if fn.__kwdefaults__:
            for name, value in fn.__kwdefaults__.items():
                self._find(name, value)
        known = fn.__globals__
        for name in code.co_names:
            if name in known and not isinstance(value := known[name], _NOT_REBOUND):
                self.bindings.append((GlobalName(known, name), _noted(value)))
                if isinstance(value, _REACHED):
                    self._find(name, value)

    def _find_inside(self, name: str, value: Any) -> None:
        if isinstance(value, MethodType):
            self._find(name, value.__func__)
            self._find(name, value.__self__)
        elif isinstance(value, functools.partial):
            self._find(name, value.func)
            for index, item in enumerate(value.args):
                self._find(f"{name}argument {index}", item)
            for key, item in value.keywords.items():
                self._find(key, item)
        elif type(value) in (list, tuple):
            for index, item in enumerate(value[: self._budget]):
                self._budget -= 1
                self._find(f"{name}[{index}]", item)
        elif type(value) is dict:
            if len(value) <= self._budget:
                self._budget -= len(value)
                for key, item in value.items():
                    self._find(f"{name}[{key!r}]", item)
        else:
            self._find(name, getattr(value, "__wrapped__", None))
            self._find_attributes(name, value)

    def _find_attributes(self, name: str, owner: object) -> None:
        for key, item in getattr(owner, "__dict__", {}).items():
            if isinstance(item, (*_REACHED, list, tuple, dict)):
                self._find(f"{name}.{key}" if name else key, item)

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


def _noted(value: Any) -> Any:
    return without_history(value) if isinstance(value, Tensor) else value


def without_history(tensor: Tensor) -> Tensor:
    """The same data and version counter, and as much need of a gradient, but no graph."""
    if tensor.grad_fn is None:
        return tensor
    return tensor.detach().requires_grad_(tensor.requires_grad)
