"""What a function reads besides its arguments: the modules and tensors that it is, is bound to, or captures.

NOTE [ The replay sees what the forward saw ]

1. Reachable are: the function itself if it is a module, its bound ``self``, a partial's function and arguments,
   closure cells, defaults, the globals it names, and modules, functions and objects among the call's arguments;
   functions of the user's own that these call by name; attributes and slots of objects; and what lies in containers
   there, up to 1,000 items a call.
2. What can be *rebound* is noted before the forward: closure cells, globals, a module's attributes, and the items
   of its dictionaries and lists (parameters, buffers, children, hooks, the user's own). For the replay, what
   differs is put back, and afterwards what stood there before the replay. So a loop variable that moved on, a
   flag, a counter, a cached tensor, ``eval()`` in between or a swapped parameter cannot mislead the replay, and
   the replay has no side effects on them. ``requires_grad`` of parameters is treated alike.
3. Containers and objects outside of modules, and the globals of functions that the function calls, are not put back:
   they may be logs and counters, to be seen by others. Tensors in them are watched by rule 5, generators are put where
   they stood. If a result depends on anything else in them, sampled comparison finds it out.
4. Buffers change in place, and batch norm does so without raising the version counter. They are copied before the
   forward. After it, copies are held of those that are small, or that changed. The replay runs on copies of these
   copies, by rule 2: the real buffers are not touched, and a tensor that the replay saves keeps its value. Buffers
   in the same memory are copied together, and stay so. A buffer that needs a gradient is watched like a parameter.
5. Everything else (parameters, large buffers, captured tensors) is watched. If a version counter moved, the replay
   runs under a guard that raises when an operation really reads that tensor, and names it.
6. Noted tensors are held without their history: a frame that held a graph would chain to the frames before it.
7. Sharded parameters (DTensor) are swapped by their owner around every use; rule 2 leaves them alone.
8. Hooks that the forward registered on tensors that it reaches are in place; those that the replay adds are taken
   away.
9. Replays that put something back have the process to themselves: see NOTE [ Threads ].
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.lazy import LazyModuleMixin

from recoup.checkpointing.guard import unguarded
from recoup.checkpointing.module_tree import TreeState, note_tree
from recoup.checkpointing.reach import Reach
from recoup.errors import CheckpointError, InputChangedError
from recoup.snapshot.places import hold_hooks, holds, look, replace
from recoup.tensors import span_of, without_history

__all__ = ["FunctionState"]

_SMALL_BYTES = 64 * 1024
_MOST_ITEMS = 1000
_PLAIN = frozenset({bool, int, float, str, type(None)})
_STRUCTURE = ("_parameters", "_buffers", "_modules")


class FunctionState:
    """The modules and tensors that a function reaches, as they stood before its forward."""

    __slots__ = (
        "_buffers", "_copies", "_empty", "_moved", "_needs_grad", "_noted", "_reach", "_tensors", "_trees",
        "_versions",
    )  # fmt: skip

    def __init__(self, reach: Reach, *, preserve_buffers: bool) -> None:
        self._reach = reach
        self._noted: list[tuple[Any, Any]] = [
            (place, without_history(value)) for place, value in reach.bindings
        ]
        """Containers and variables, each with a copy of what it held."""
        self._trees: list[TreeState] = []
        """Modules whose attributes were read at once."""
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
        seen: set[int] = set()
        for _, root in self._reach.roots:  # which modules add to while they are looked at
            if not isinstance(root, Module):
                self._tensors.append(root)
                continue
            if id(root) not in seen and (tree := note_tree(root)) is not None:
                seen.update(map(id, self._add_tree(tree)))
                continue
            stack = [root]
            while stack:
                module = stack.pop()
                if id(module) not in seen:
                    seen.add(id(module))
                    self._note_module(module, stack)

    def _add_tree(self, found: TreeState) -> list[Module]:
        self._trees.append(found)
        self._tensors += found.tensors()
        self._buffers += found.buffers()
        modules = found.tree.modules()
        for index in found.tree.own_code:
            self._reach.add_code(modules[index])
        return modules

    def _note_module(self, module: Module, stack: list[Module]) -> None:
        if isinstance(module, torch.jit.ScriptModule):  # its dictionaries are not its own
            self._tensors += [*module.parameters(), *module.buffers()]
            return
        if isinstance(module, LazyModuleMixin):  # it is an ordinary module once it has run
            raise CheckpointError(
                f"{type(module).__name__} has not run yet, and what its first forward makes cannot be replayed."
                " Run the model once on a sample without checkpointing."
            )
        attributes = module.__dict__
        noted = attributes.copy()
        self._noted.append((attributes, noted))
        self._reach.add_code(module)
        for name, value in attributes.items():
            kind = type(value)
            if kind in _PLAIN or (kind is set and not value):
                continue
            if kind is dict or isinstance(value, (dict, list)):
                if not value:  # as most of a module's own dictionaries are: the cheapest of checks is enough
                    self._empty.append(value)
                elif len(value) <= _MOST_ITEMS or name in _STRUCTURE:
                    items = value.copy()
                    keys = value if isinstance(value, dict) else range(len(value))
                    had_history = [self._note_item(name, items, key, stack) for key in keys]
                    if any(had_history) and name not in _STRUCTURE:
                        noted[name] = items  # the container itself leads to that history
                    else:
                        self._noted.append((value, items))
            else:
                self._note_item(name, noted, name, stack)
        if buffers := attributes["_buffers"]:
            self._buffers.append([value for value in buffers.values() if value is not None])

    def _note_item(self, name: str, items: Any, key: Any, stack: list[Module]) -> bool:
        """Looks at an item of a copy; returns whether it had a history, of which it is stripped there."""
        then = item = items[key]
        if isinstance(item, Tensor):
            if item.grad_fn is not None:
                self._reach.originals.append(weakref.ref(item))
                item = items[key] = without_history(item)
            if name != "_buffers":
                self._tensors.append(item)
        elif isinstance(item, Module):
            stack.append(item)
        elif type(item) not in _PLAIN:
            if isinstance(item, tuple) and all(type(part) in _PLAIN for part in item):
                return False
            self._reach.add_attribute(name, item)
            if isinstance(item, (tuple, list, dict)):
                item = items[key] = without_history(item)
        return item is not then

    def _copy_buffers(self, preserve: bool) -> None:
        found = {id(b): b for group in self._buffers for b in group if not b.is_inference()}
        for buffer in found.values():
            self._tensors.append(without_history(buffer))
            self._versions.append(buffer._version)
            self._needs_grad.append(buffer.requires_grad)
        if preserve:
            buffers = [buffer for buffer in found.values() if not buffer.requires_grad]
            self._copies = {id(b): (b, copy) for b, copy in zip(buffers, _copied(buffers), strict=True)}

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
        if buffer.layout is not torch.strided or buffer.nbytes <= _SMALL_BYTES:
            return True
        # A change that raised no version counter. Elsewhere than on the CPU, looking would mean waiting.
        pair = self._copies.get(id(buffer))
        if pair is None or buffer.untyped_storage().device.type != "cpu":  # fake tensors lie on no device
            return False
        with unguarded():
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
        fresh = dict(zip(self._copies, _copied([copy for _, copy in self._copies.values()]), strict=True))
        unchanged: list[TreeState] = []
        changed: list[TreeState] = []
        for tree in self._trees:
            (changed if fresh or not tree.is_unchanged() else unchanged).append(tree)
        stack.callback(_put_back, unchanged)
        others = [place for tree in changed for place in tree.places()]
        noted = [((place, then), holds(place, then)) for place, then in self._noted + others]
        now = [(place, then if same else look(place)) for (place, then), same in noted]
        filled = [(place, look(place)) for place in self._empty if place]
        stack.callback(_put_all, now + filled)
        stack.callback(_clear_all, self._empty)
        _clear_all(self._empty)
        for (place, then), same in noted:
            if fresh and isinstance(then, dict) and not fresh.keys().isdisjoint(map(id, then.values())):
                then = {key: fresh.get(id(value), value) for key, value in then.items()}
                same = False
            if not same:
                _replace(place, then)
        for tensor, then in zip(self._tensors, self._needs_grad, strict=True):
            if tensor.requires_grad != then and tensor.is_leaf:
                stack.callback(tensor.requires_grad_, not then)
                tensor.requires_grad_(then)
        tensors = self._tensors
        if self._reach.originals:
            tensors = [*tensors, *(t for original in self._reach.originals if (t := original()) is not None)]
        stack.callback(hold_hooks(tensors))


def _clear_all(places: list[Any]) -> None:
    for place in places:
        if place:
            place.clear()


def _put_back(trees: list[TreeState]) -> None:
    for tree in trees:
        if not tree.is_unchanged():
            _put_all(list(tree.places()))


def _put_all(places: list[tuple[Any, Any]]) -> None:
    for place, wanted in places:
        if not holds(place, wanted):
            _replace(place, wanted)


def _replace(place: Any, wanted: Any) -> None:
    """Makes a place hold what is wanted, but for sharded parameters (rule 7)."""
    if isinstance(place, dict):
        others = [key for key, value in wanted.items() if place.get(key, value) is not value]
        sharded = [key for key in others if _is_sharded(place[key]) or _is_sharded(wanted[key])]
        wanted = wanted | {key: place[key] for key in sharded} if sharded else wanted
    replace(place, wanted)


def _is_sharded(value: Any) -> bool:
    # By name: importing torch.distributed.tensor costs a second that most users never need.
    return type(value).__name__ == "DTensor"


def _copied(tensors: list[Tensor]) -> list[Tensor]:
    """Copies without history; of tensors in the same memory, copies in the same memory."""
    if not tensors:
        return []
    with torch.no_grad(), unguarded():
        by_storage: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            by_storage.setdefault(_storage_key(tensor), []).append(tensor)
        ranges = {key: _copied_range(some) for key, some in by_storage.items() if key and len(some) > 1}
        return [
            _view_of(*ranges[key], tensor)
            if ranges and (key := _storage_key(tensor)) in ranges
            else tensor.detach().clone()
            for tensor in tensors
        ]


def _copied_range(tensors: list[Tensor]) -> tuple[Any, int]:
    """A copy of the bytes from the first to the last of some tensors in one storage, and where it began there."""
    begins = [tensor.storage_offset() * tensor.element_size() for tensor in tensors]
    ends = [b + span_of(t) * t.element_size() for b, t in zip(begins, tensors, strict=True)]
    begin = min(begins) // 16 * 16  # no element of any type is cut
    size = tensors[0].element_size()
    span = tensors[0].detach().as_strided((-(-(max(ends) - begin) // size),), (1,), begin // size)
    return span.clone().untyped_storage(), begin


def _view_of(storage: Any, begin: int, tensor: Tensor) -> Tensor:
    offset = tensor.storage_offset() - begin // tensor.element_size()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        storage, offset, tensor.shape, tensor.stride()
    )


def _storage_key(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided or type(tensor) is not Tensor:
        return 0
    key: int = tensor.untyped_storage()._cdata
    return key
