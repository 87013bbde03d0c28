"""What a function reads besides its arguments: the modules and tensors that it is, is bound to, or captures.

NOTE [ The replay sees what the forward saw ]

1. Reachable are: the function itself if it is a module, its bound ``self``, a partial's function and arguments,
   closure cells, defaults, the globals it names, and modules, functions and objects among the call's arguments;
   their attributes; and what lies in lists, tuples and dicts there, up to 1,000 items a call.
2. What can be *rebound* is noted before the forward: closure cells, globals, a module's attributes, and the items
   of its dictionaries and lists (parameters, buffers, children, hooks, the user's own). For the replay, what
   differs is put back, and afterwards what stood there before the replay. So a loop variable that moved on, a
   flag, a counter, a cached tensor, ``eval()`` in between or a swapped parameter cannot mislead the replay, and
   the replay leaves no trace. ``requires_grad`` of parameters is treated alike.
3. Buffers change in place, and batch norm does so without raising the version counter. They are copied before the
   forward. After it, copies are held of those that are small, or that changed. The replay runs on copies of these
   copies, by rule 2: the real buffers are not touched, and a tensor that the replay saves keeps its value.
4. Everything else (parameters, large buffers, captured tensors) is watched. If a version counter moved, the replay
   runs under a guard that raises when an operation really reads that tensor, and names it.
5. Noted tensors are held without their history: a frame that held a graph would chain to the frames before it.
6. Sharded parameters (DTensor) are swapped by their owner around every use; rule 2 leaves them alone.
7. Replays that put something back run one at a time, so that two threads never take each other's copies for the
   real thing. Frames made inside a replay belong to it and do not wait.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from operator import is_not
from types import CellType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.lazy import LazyModuleMixin

from recoup.checkpointing.reach import GlobalName, Reach, without_history
from recoup.errors import CheckpointError, InputChangedError

__all__ = ["FunctionState"]

_SMALL_BYTES = 64 * 1024
_MOST_ITEMS = 1000
_one_at_a_time = threading.RLock()


class FunctionState:
    """The modules and tensors that a function reaches, as they stood before its forward."""

    __slots__ = (
        "_buffers", "_copies", "_empty", "_moved", "_needs_grad", "_noted", "_reach", "_tensors", "_versions", "_waits",
    )  # fmt: skip

    def __init__(self, reach: Reach, *, preserve_buffers: bool, waits: bool) -> None:
        self._reach = reach
        self._waits = waits
        self._noted: list[tuple[Any, Any]] = list(reach.bindings)
        """Containers and cells, each with a copy of what it held."""
        self._tensors: list[Tensor] = []
        self._empty: list[Any] = []
        """Containers that held nothing."""
        self._buffers: list[list[Tensor]] = []
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        """By identity of the buffer, which is kept alive beside its copy."""
        self._moved: set[int] = set()
        self._note_modules()
        try:
            self._versions = [tensor._version for tensor in self._tensors]
        except RuntimeError:  # inference tensors have no version counter
            self._tensors = [tensor for tensor in self._tensors if not tensor.is_inference()]
            self._versions = [tensor._version for tensor in self._tensors]
        self._needs_grad = [tensor.requires_grad for tensor in self._tensors]
        if self._buffers:
            self._copy_buffers(preserve_buffers)

    def _note_modules(self) -> None:
        stack: list[Module] = []
        for _, root in self._reach.roots:
            if isinstance(root, Module):
                stack.append(root)
            else:
                self._tensors.append(root)
        seen: set[int] = set()
        while stack:
            module = stack.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            if isinstance(module, torch.jit.ScriptModule):  # its dictionaries are not its own
                self._tensors += [*module.parameters(), *module.buffers()]
            elif isinstance(module, LazyModuleMixin):  # it is an ordinary module once it has run
                raise CheckpointError(
                    f"{type(module).__name__} has not run yet, and what its first forward makes cannot be replayed."
                    " Run the model once on a sample without checkpointing."
                )
            else:
                self._note_module(module, stack)

    def _note_module(self, module: Module, stack: list[Module]) -> None:
        attributes = module.__dict__
        noted = attributes.copy()
        self._noted.append((attributes, noted))
        buffers = attributes["_buffers"]
        for name, value in attributes.items():
            if isinstance(value, (dict, list)):
                if not value:  # as most of a module's own dictionaries are: the cheapest of checks is enough
                    self._empty.append(value)
                elif len(value) <= _MOST_ITEMS:
                    self._noted.append((value, value.copy()))
                    if value is not buffers:
                        self._note_items(value.values() if isinstance(value, dict) else value, stack)
            elif isinstance(value, Tensor):
                noted[name] = kept = without_history(value)
                self._tensors.append(kept)
            elif isinstance(value, Module):
                stack.append(value)
            elif isinstance(value, torch.Generator):
                self._reach.generators.append(value)
        if buffers:
            self._buffers.append([value for value in buffers.values() if value is not None])

    def _note_items(self, items: Any, stack: list[Module]) -> None:
        for item in items:
            if isinstance(item, Tensor):
                self._tensors.append(item)
            elif isinstance(item, Module):
                stack.append(item)
            elif isinstance(item, torch.Generator):
                self._reach.generators.append(item)

    def _copy_buffers(self, preserve: bool) -> None:
        with torch.no_grad():
            for group in self._buffers:
                for buffer in group:
                    if buffer.is_inference():
                        continue
                    if preserve:
                        self._copies.setdefault(id(buffer), (buffer, buffer.detach().clone()))
                    self._tensors.append(buffer)
                    self._versions.append(buffer._version)
                    self._needs_grad.append(buffer.requires_grad)

    def settle(self) -> None:
        """Sorts, right after the forward, what to put back from what to watch, and notes what the function changed."""
        now = [tensor._version for tensor in self._tensors]
        if now != self._versions:
            pairs = zip(self._tensors, now, self._versions, strict=True)
            self._moved = {id(tensor) for tensor, after, before in pairs if after != before}
        held: set[int] = set()
        for group in self._buffers:
            moved = [buffer for buffer in group if id(buffer) in self._moved]
            if moved and not self._copies:
                raise InputChangedError(
                    f"The checkpointed function changes {self._reach.name(moved[0])} and preserve_buffers is off,"
                    " so its replay would change it a second time. Use Checkpoint(preserve_buffers=True)."
                )
            held.update(id(buffer) for buffer in group if moved or self._must_hold(buffer))
        if self._copies:
            self._copies = {key: pair for key, pair in self._copies.items() if key in held}
        self._buffers = []

    def _must_hold(self, buffer: Tensor) -> bool:
        if buffer.nbytes <= _SMALL_BYTES:
            return True
        # A change that raised no version counter. Elsewhere than on the CPU, looking would mean waiting.
        pair = self._copies.get(id(buffer))
        if pair is None or buffer.untyped_storage().device.type != "cpu":  # fake tensors lie on no device
            return False
        return not torch.equal(*pair)

    def stale(self) -> list[Tensor]:
        """The watched tensors that were changed in place since before the forward."""
        pairs = zip(self._tensors, self._versions, strict=True)
        return [t for t, before in pairs if t._version != before and id(t) not in self._copies]

    def describe(self, tensor: Tensor) -> tuple[str, bool]:
        """Names a watched tensor, and says whether the function itself changed it."""
        return self._reach.name(tensor), id(tensor) in self._moved

    def enter(self, stack: ExitStack) -> None:
        """Shows everything as the forward saw it; ``stack`` puts back what stands there now."""
        if self._waits:
            stack.enter_context(_one_at_a_time)
        fresh = {key: copy.clone() for key, (_, copy) in self._copies.items()}
        now = [(place, then if _holds(place, then) else _look(place)) for place, then in self._noted]
        filled = [(place, place.copy()) for place in self._empty if place]
        stack.callback(_put_all, now + filled)
        stack.callback(_clear_all, self._empty)
        _clear_all(self._empty)
        for place, then in self._noted:
            if fresh and isinstance(then, dict) and not fresh.keys().isdisjoint(map(id, then.values())):
                then = {key: fresh.get(id(value), value) for key, value in then.items()}
            _put(place, then)
        for tensor, then in zip(self._tensors, self._needs_grad, strict=True):
            if tensor.requires_grad != then and tensor.is_leaf:
                stack.callback(tensor.requires_grad_, not then)
                tensor.requires_grad_(then)


_EMPTY = object()


def _look(place: Any) -> Any:
    if isinstance(place, GlobalName):
        return place.namespace.get(place.name, _EMPTY)
    if isinstance(place, CellType):
        try:
            return place.cell_contents
        except ValueError:  # not bound
            return _EMPTY
    return place.copy()


def _clear_all(places: list[Any]) -> None:
    for place in places:
        if place:
            place.clear()


def _holds(place: Any, wanted: Any) -> bool:
    """Whether a place holds exactly what is wanted, by identity."""
    if isinstance(place, (CellType, GlobalName)):
        return _look(place) is wanted
    if len(place) != len(wanted):
        return False
    if isinstance(place, list):
        return not any(map(is_not, place, wanted))
    return list(place) == list(wanted) and not any(map(is_not, place.values(), wanted.values()))


def _put_all(places: list[tuple[Any, Any]]) -> None:
    for place, wanted in places:
        _put(place, wanted)


def _put(place: Any, wanted: Any) -> None:
    """Makes a place hold exactly what is wanted, by identity, and touches nothing that already does."""
    if _holds(place, wanted):
        return
    if isinstance(place, (CellType, GlobalName)):
        _bind(place, wanted)
    elif isinstance(place, list):
        place[:] = wanted
    else:
        _put_items(place, wanted)


def _bind(place: CellType | GlobalName, wanted: Any) -> None:
    if isinstance(place, GlobalName):
        if wanted is _EMPTY:
            del place.namespace[place.name]
        else:
            place.namespace[place.name] = wanted
    elif wanted is _EMPTY:
        del place.cell_contents
    else:
        place.cell_contents = wanted


def _put_items(place: dict[Any, Any], wanted: dict[Any, Any]) -> None:
    if list(place) != list(wanted):
        sharded = {key: value for key, value in place.items() if _is_sharded(value)}
        place.clear()
        place.update(wanted | {key: value for key, value in sharded.items() if key in wanted})
    else:
        for key, value in wanted.items():
            present = place[key]
            if present is not value and not (_is_sharded(present) or _is_sharded(value)):
                place[key] = value


def _is_sharded(value: Any) -> bool:
    # By name: importing torch.distributed.tensor costs a second that most users never need.
    return type(value).__name__ == "DTensor"
