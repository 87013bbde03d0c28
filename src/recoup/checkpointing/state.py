"""What a function reads besides its arguments: the modules and tensors that it is, is bound to, or captures.

NOTE [ The replay sees what the forward saw ]

1. Reachable are: the function itself if it is a module, its bound ``self``, a partial's function and
   arguments, closure cells, defaults, the globals it names, and modules and functions among the call's
   arguments.
2. A module is four dictionaries (attributes, parameters, buffers, children). Their entries are noted before
   the forward. For the replay, entries that differ are put back, and afterwards what stood there before the
   replay. So a flag, a counter, a cached tensor, ``eval()`` in between or a swapped parameter cannot mislead
   the replay, and the replay leaves no trace.
3. Buffers change in place, and batch norm does so without raising the version counter. They are copied
   before the forward. After it, copies are held of those that are small, or that belong to a module whose
   version counters moved. The replay runs on copies of these copies, by rule 2: the real buffers are not
   touched, and a tensor that the replay saves keeps its value.
4. Everything else (parameters, large buffers, captured tensors) is watched: its version counter must not
   have moved when the replay starts. Moved means: an error that names the tensor.
5. Sharded parameters (DTensor) are swapped by their owner around every use; rule 2 leaves them alone.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from operator import is_not
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import UninitializedTensorMixin

from recoup.errors import InputChangedError

__all__ = ["FunctionState"]

_SMALL_BYTES = 64 * 1024
_WATCHED = (Tensor, torch.Generator)
_REACHED = (Module, Tensor, torch.Generator)
_OPAQUE = (BuiltinFunctionType, type)


class FunctionState:
    """The modules, tensors and generators a function reaches, as they stood before its forward."""

    __slots__ = ("_buffers", "_copies", "_dicts", "_roots", "_tensors", "_versions", "generators")

    def __init__(self, fn: Any, others: list[Any]) -> None:
        self.generators: list[torch.Generator] = []
        self._roots: list[tuple[str, Module | Tensor]] = []
        seen: set[int] = set()
        self._find("", fn, seen)
        for value in others:
            self._find(type(value).__name__, value, seen)

    def is_empty(self) -> bool:
        """Whether the function reaches nothing that a replay could find changed."""
        return not self._roots

    def note(self, *, preserve_buffers: bool) -> None:
        """Notes how everything stands, right before the forward."""
        self._dicts: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._tensors: list[Tensor] = []
        self._buffers: list[list[Tensor]] = []
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        """By identity of the buffer, which is kept alive beside its copy."""
        self._note_modules()
        self._versions = [tensor._version for tensor in self._tensors]
        if self._buffers:
            self._copy_buffers(preserve_buffers)

    def _find(self, name: str, value: Any, seen: set[int]) -> None:
        """Collects the roots that a value leads to."""
        if isinstance(value, FunctionType):
            if id(value) not in seen:
                seen.add(id(value))
                self._find_captured(value, seen)
        elif isinstance(value, (Module, Tensor)):
            self._roots.append((name, value))
        elif isinstance(value, torch.Generator):
            self.generators.append(value)
        elif isinstance(value, MethodType):
            self._find(name, value.__self__, seen)
            self._find(name, value.__func__, seen)
        elif isinstance(value, functools.partial):
            self._find(name, value.func, seen)
            for index, item in enumerate(value.args):
                self._find(f"{name}argument {index}", item, seen)
            for key, item in value.keywords.items():
                self._find(key, item, seen)
        elif type(value) in (list, tuple):
            for index, item in enumerate(value):
                self._find(f"{name}[{index}]", item, seen)
        elif type(value) is dict:
            for key, item in value.items():
                self._find(f"{name}[{key!r}]", item, seen)
        elif callable(value) and not isinstance(value, _OPAQUE) and id(value) not in seen:
            seen.add(id(value))
            for key, item in getattr(value, "__dict__", {}).items():
                if isinstance(item, _REACHED):
                    self._find(f"{name}.{key}", item, seen)

    def _find_captured(self, fn: FunctionType, seen: set[int]) -> None:
        code = fn.__code__
        if fn.__closure__:
            for name, cell in zip(code.co_freevars, fn.__closure__, strict=True):
                try:
                    value = cell.cell_contents
                except ValueError:  # a variable that is not bound yet
                    continue
                self._find(name, value, seen)
        if fn.__defaults__:
            for index, value in enumerate(fn.__defaults__):
                self._find(f"default {index}", value, seen)
        if fn.__kwdefaults__:
            for name, value in fn.__kwdefaults__.items():
                self._find(name, value, seen)
        known = fn.__globals__
        for name in code.co_names:
            if name in known and isinstance(value := known[name], _REACHED):
                self._find(name, value, seen)

    def _note_modules(self) -> None:
        stack: list[Module] = []
        for _, root in self._roots:
            if isinstance(root, Module):
                stack.append(root)
            elif not root.is_inference():
                self._tensors.append(root)
        seen: set[int] = set()
        while stack:
            module = stack.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            if isinstance(module, torch.jit.ScriptModule):  # its dictionaries are not its own
                self._tensors += [*module.parameters(), *module.buffers()]
                continue
            attributes = module.__dict__
            children, buffers = attributes["_modules"], attributes["_buffers"]
            parameters = attributes["_parameters"]
            for entries in (attributes, parameters, buffers, children):
                if entries:
                    self._dicts.append((entries, entries.copy()))
            for value in attributes.values():
                if isinstance(value, _WATCHED):
                    self._note_attribute(value)
            for parameter in parameters.values():
                if parameter is not None and not isinstance(parameter, UninitializedTensorMixin):
                    self._tensors.append(parameter)
            if buffers:
                found = [value for value in buffers.values() if value is not None and not value.is_inference()]
                self._buffers.append([item for item in found if not isinstance(item, UninitializedTensorMixin)])
            for child in children.values():
                if child is not None:
                    stack.append(child)

    def _note_attribute(self, value: Tensor | torch.Generator) -> None:
        if isinstance(value, torch.Generator):
            self.generators.append(value)
        elif not value.is_inference():
            self._tensors.append(value)

    def _copy_buffers(self, preserve: bool) -> None:
        with torch.no_grad():
            for group in self._buffers:
                for buffer in group:
                    if preserve:
                        self._copies.setdefault(id(buffer), (buffer, buffer.detach().clone()))
                    self._tensors.append(buffer)
                    self._versions.append(buffer._version)

    def settle(self) -> None:
        """Sorts the buffers, right after the forward, into those to put back and those to watch."""
        if not self._buffers:
            return
        version = {id(tensor): before for tensor, before in zip(self._tensors, self._versions, strict=True)}
        held: set[int] = set()
        for group in self._buffers:
            moved = [buffer for buffer in group if buffer._version != version[id(buffer)]]
            if moved and not self._copies:
                raise InputChangedError(
                    f"The checkpointed function changes {self._name(moved[0])} and preserve_buffers is off,"
                    " so its replay would change it a second time. Use Checkpoint(preserve_buffers=True)."
                )
            held.update(id(buffer) for buffer in group if moved or buffer.nbytes <= _SMALL_BYTES)
        self._copies = {key: pair for key, pair in self._copies.items() if key in held}
        self._buffers = []

    def first_stale(self) -> str | None:
        """Names a watched tensor that was changed in place since before the forward, if there is one."""
        for tensor, before in zip(self._tensors, self._versions, strict=True):
            if tensor._version != before and id(tensor) not in self._copies:
                return f"{self._name(tensor)} (version {before} then, {tensor._version} now)"
        return None

    def enter(self, stack: ExitStack) -> None:
        """Shows the modules as the forward saw them; ``stack`` puts back what stands there now."""
        fresh = {key: copy.clone() for key, (_, copy) in self._copies.items()}
        now = [(entries, entries.copy()) for entries, _ in self._dicts]
        stack.callback(_put_all, now)
        for entries, then in self._dicts:
            if fresh and not fresh.keys().isdisjoint(map(id, then.values())):
                then = {key: fresh.get(id(value), value) for key, value in then.items()}
            _put(entries, then)

    def _name(self, tensor: Tensor) -> str:
        for name, root in self._roots:
            if root is tensor:
                return f"the captured tensor {name!r}"
            if isinstance(root, Module):
                prefix = f"{name}." if name else ""
                for kind, members in (("parameter", root.named_parameters()), ("buffer", root.named_buffers())):
                    for path, member in members:
                        if member is tensor:
                            return f"{kind} {prefix + path!r} of {type(root).__name__}"
                for path, module in root.named_modules():
                    for key, value in module.__dict__.items():
                        if value is tensor:
                            return f"attribute {prefix + '.'.join(filter(None, (path, key)))!r}"
        return "a captured tensor"


def _put_all(dicts: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for entries, wanted in dicts:
        _put(entries, wanted)


def _put(entries: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Makes ``entries`` hold exactly ``wanted``, by identity, and touches nothing that already does."""
    if len(entries) == len(wanted) and not any(map(is_not, entries.values(), wanted.values())):
        return
    for key in [key for key in entries if key not in wanted]:
        del entries[key]
    for key, value in wanted.items():
        present = entries.get(key, _MISSING)
        if present is not value and not (_is_sharded(present) or _is_sharded(value)):
            entries[key] = value


_MISSING = object()


def _is_sharded(value: Any) -> bool:
    # By name: importing torch.distributed.tensor costs a second that most users never need.
    return type(value).__name__ == "DTensor"

