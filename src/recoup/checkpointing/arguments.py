"""The arguments of one checkpointed call: taken apart, held, and put together again for the replay.

Containers (lists, tuples, dicts, deques, dataclasses, to any depth) are taken apart so that each tensor is held and
watched by itself, and so that the replay gets containers of its own, filled as they were before the forward,
whatever the caller or the function did to the originals. All other values are held as they are; iterators, which a
replay would find used up, are refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from torch import Tensor

from recoup.tensors import PLAIN, argument_paths, put_together, take_apart, versions_of
from recoup.torch_private import top_saved_tensor_hooks

__all__ = ["Arguments", "Given"]

Given: TypeAlias = tuple[Sequence[Any], dict[str, Any]]
"""Positional and keyword arguments."""
_OURS = f"{__name__.partition('.')[0]}."


class Arguments:
    """What a call was given, ready to be given again.

    Without saved-tensor hooks around the call the tensors are held as they are, and their version counters
    tell whether anyone changed them. With hooks around it (an enclosing checkpoint, ``save_on_cpu``) the
    tensors go through those hooks, as anything saved there does: an enclosing checkpoint then drops and
    replays them too.

    If an argument has hooks after the forward, the replay gets tensors of its own: what the function registers on
    them a second time must not reach the real graph.
    """

    __slots__ = (
        "_given", "_has_hooks", "_held", "_is_flat", "_needs_grad", "_originals", "_tensors", "_unpack",
        "_versions", "are_copied", "changed", "others",
    )  # fmt: skip

    feeds: Mapping[int, Any] = MappingProxyType({})
    """By slot, what earlier calls return; see `FedArguments`."""
    changed_feeds: Collection[tuple[int, int]] = ()

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors: list[Tensor] = []
        hooks = top_saved_tensor_hooks(False)
        self._is_flat = hooks is None and _collect((*args, *kwargs.values()) if kwargs else args, tensors)
        """The usual call: tensors and plain values, held as they are. Nothing to take apart."""
        self._given: Any = args, kwargs
        self.others: list[Any] = []
        """Values that are neither plain data, containers nor tensors: modules, generators, functions, objects."""
        if not self._is_flat:
            tensors.clear()
            self._given = take_apart((args, kwargs), tensors, self.others)
        self.changed: list[int] = []
        """Slots that the function itself changed in place, filled by `settle`."""
        self.are_copied = False
        """Whether hooks of others give the tensors back, perhaps in fewer bits."""
        self._tensors = tensors
        self._versions = versions_of(tensors)
        self._needs_grad = [tensor.requires_grad for tensor in tensors]
        self._has_hooks = False
        self._held: list[Any] = tensors
        self._unpack: Callable[[Any], Tensor] | None = None
        if hooks is not None and tensors:
            pack, self._unpack = hooks
            self.are_copied = not str(getattr(pack, "__module__", "")).startswith(_OURS)
            # One tensor given twice (key and value of an attention) goes through the hooks once, and comes back as one.
            packed = {
                id(tensor): pack(tensor) for tensor in {id(tensor): tensor for tensor in tensors}.values()
            }
            self._held = [packed[id(tensor)] for tensor in tensors]
            self._originals = [weakref.ref(tensor) for tensor in tensors]

    def __len__(self) -> int:
        return len(self._versions)

    def settle(self) -> bool:
        """Notes, right after the forward, which tensors the function itself changed in place; returns whether any."""
        now = versions_of(self._tensors)
        self._has_hooks = any(t._backward_hooks or t._post_accumulate_grad_hooks for t in self._tensors)
        if now != self._versions:
            self.changed = [index for index, version in enumerate(self._versions) if version != now[index]]
        self._tensors = []
        return bool(self.changed)

    def rebuild(self) -> Given:
        """Gives the arguments as they were, in new containers."""
        held = self._held
        if self._unpack is not None:
            unpacked = {id(packed): self._unpack(packed) for packed in {id(p): p for p in held}.values()}
            held = [unpacked[id(packed)] for packed in held]
        if self._has_hooks or [tensor.requires_grad for tensor in held] != self._needs_grad:
            # Hooks around the call give back bare data, and the caller may have switched a leaf on or off.
            fresh = {
                id(tensor): tensor.detach().requires_grad_(needs_grad)
                if needs_grad or tensor.requires_grad
                else tensor
                for tensor, needs_grad in zip(held, self._needs_grad, strict=True)
            }
            held = [fresh[id(tensor)] for tensor in held]
        elif self._is_flat:
            return self._given  # type: ignore[no-any-return]
        return put_together(self._taken_apart(), held)  # type: ignore[no-any-return]

    def put_together(self, rebuilt: Given, give: Callable[[Any], Tensor] | None) -> Given:
        """The arguments for a replay; ``give`` gives what earlier calls returned."""
        return rebuilt

    def _taken_apart(self) -> Any:
        return take_apart(self._given, [], []) if self._is_flat else self._given

    def first_stale(self) -> int | None:
        """The first slot whose tensor was changed in place since before the forward."""
        if self.changed:
            return self.changed[0]
        if self._unpack is not None:
            return self._first_stale_behind_hooks(self._unpack)
        if (now := versions_of(self._held)) != self._versions:
            return next(index for index, version in enumerate(self._versions) if version != now[index])
        return None

    def _first_stale_behind_hooks(self, unpack: Callable[[Any], Tensor]) -> int | None:
        """Hooks that copy are safe; ones that hand back the same memory are not."""
        for index, (reference, version) in enumerate(zip(self._originals, self._versions, strict=True)):
            original = reference()
            if original is not None and versions_of([original]) != [version]:
                given = unpack(self._held[index])
                if given.data_ptr() == original.data_ptr():
                    return index
        return None

    def describe(self) -> list[str]:
        """The kind of each held tensor, or where it went."""
        if self._unpack is not None:
            return ["held by enclosing hooks"] * len(self._held)
        return [f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in self._held]

    def path(self, index: int, names: Sequence[str]) -> str:
        """Names a slot as the caller wrote it: ``x``, ``batch['mask']``, ``states[2].hidden``."""
        return dict(argument_paths(self._taken_apart(), names))[index]


def _collect(values: Iterable[Any], tensors: list[Tensor]) -> bool:
    """Collects the tensors among values; returns whether all others are plain."""
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif type(value) not in PLAIN:
            return False
    return True
