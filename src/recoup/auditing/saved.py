"""A unit's plain forward, with a log of what it saves and decides, and in which module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from recoup.checkpointing.decisions import ALL, Kept, Recording, most_bytes_of, run_in
from recoup.model.calls import hooks_on_all_modules
from recoup.model.streaming import UnitCall
from recoup.torch_private import pop_saved_tensor_hooks, push_saved_tensor_hooks

__all__ = ["SavedLog", "first_difference", "run_logged"]


@dataclass
class SavedLog:
    """What a forward saved and decided.

    Attributes:
        entries: shape, dtype and the name (relative to the unit) of the module that saved it.
        is_read: whether the forward itself read one of them, because it ran a backward.
        kept: what a replay would be given, with the name of the module that decided it.
    """

    entries: list[tuple[torch.Size, torch.dtype, str]] = field(default_factory=list)
    is_read: bool = False
    kept: list[tuple[str, Kept]] = field(default_factory=list)


def run_logged(call: UnitCall) -> tuple[Any, SavedLog]:
    """Runs a call's forward on the real arguments, as `UnitCall.glance` does, and logs what it saves and decides."""
    log = SavedLog()
    current: list[str] = []

    def pack(tensor: Tensor) -> Tensor:
        log.entries.append((tensor.shape, tensor.dtype, current[-1] if current else ""))
        # A graph that held its own output would be a cycle.
        return tensor.detach()

    def unpack(tensor: Tensor) -> Tensor:
        log.is_read = True
        return tensor

    region = _Named(log.kept, current, most_bytes_of((call.args, call.kwargs)))
    with _naming(call.module, current):
        push_saved_tensor_hooks(pack, unpack)
        try:
            return run_in(region, call.fn, call.args, call.kwargs), log
        finally:
            pop_saved_tensor_hooks()


class _Named(Recording):
    """Notes what is kept by the module that decides it."""

    def __init__(self, named: list[tuple[str, Kept]], current: list[str], most_bytes: int) -> None:
        super().__init__(most_bytes, ALL)
        self._named, self._current = named, current

    def add(self, kept: Kept) -> None:
        self._named.append((self._current[-1] if self._current else "", kept))


@contextmanager
def _naming(unit: nn.Module, current: list[str]) -> Iterator[None]:
    """Keeps ``current`` a stack of the names of the modules that run inside a unit."""
    names = {module: name for name, module in unit.named_modules()}

    def enter(module: nn.Module, args: Any) -> None:
        if module in names:
            current.append(names[module])

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if module in names and current:
            current.pop()

    with hooks_on_all_modules(enter, leave, always_leave=True):
        yield


def first_difference(left: SavedLog, right: SavedLog) -> str | None:
    """The module that first saves something else; None if all is the same."""
    for one, other in zip_longest(left.entries, right.entries):
        if one is None or other is None or one[:2] != other[:2]:
            return str((one or other)[2])
    return None
