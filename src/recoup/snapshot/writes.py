"""Values of tensors that a step writes to, whoever they belong to, and how to put them back.

NOTE [ Copy on write ]
    1. A first run under a dispatch mode copies to host memory what is about to be written for the first time, unless it
       was made in that run. So other models, averaged weights, scales and statistics are found without looking for
       them, and data that is only read is not copied.
    2. Later runs, which may be timed and must not be slowed down, hold what the first one wrote.
    3. What NumPy and kernels of generated code write, out of the dispatcher's sight, is not found. A storage that
       ``.data = …`` replaces is held by others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from recoup.snapshot.tensor_values import HeldStorage
from recoup.tensors import each_tensor, operand_storages, storages
from recoup.torch_private import WatchingMode, allocations_seen

__all__ = ["Writes"]


class Writes:
    """The storages that a step writes to.

    >>> average = torch.zeros(2)
    >>> writes = Writes()
    >>> with writes.found():
    ...     average.add_(1)
    tensor([1., 1.])
    >>> average
    tensor([0., 0.])
    >>> put_back = writes.hold()
    >>> average.add_(2)
    tensor([2., 2.])
    >>> put_back()
    >>> average
    tensor([0., 0.])
    """

    def __init__(self) -> None:
        self._storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._open: list[list[HeldStorage]] = []

    @contextmanager
    def found(self, others: Iterable[Tensor] = ()) -> Iterator[None]:
        """Finds what a block writes to, and puts it back when the block ends.

        Args:
            others: tensors that someone else puts back.
        """
        known = {storage._cdata for tensor in others for storage in storages(tensor)}
        mode = _CopyOnWrite(known)
        try:
            with mode, allocations_seen(mode.see_fresh):
                yield
        finally:
            found = [held.restore() for held in mode.held]
            # Whoever holds already, holds what is new, too: its values are still those of then.
            for one in self._open:
                one.extend(HeldStorage(storage) for storage in found if storage not in self._storages)
            self._storages.update(found)

    def hold(self) -> Callable[[], None]:
        """Copies to host memory what was found, or is found before it is put back; returns what does that."""
        held = [HeldStorage(storage) for storage in list(self._storages)]
        self._open.append(held)

        def put_back() -> None:
            # By identity: lists of other copies may be equal.
            self._open[:] = [one for one in self._open if one is not held]
            for storage in held:
                storage.restore()

        return put_back


class _CopyOnWrite(WatchingMode):
    def __init__(self, known: Collection[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held: list[HeldStorage] = []
        self._met: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._fresh: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._known = known

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for tensor in _written(func, args, kwargs):
                for storage in storages(tensor):
                    self._hold(storage)
        result = func(*args, **kwargs)
        made = [storage for storage in operand_storages((result,)) if storage not in self._fresh]
        if made:
            given = {id(storage) for storage in operand_storages((*args, *kwargs.values()))}
            self._fresh.update(storage for storage in made if id(storage) not in given)
        return result

    def see_fresh(self, tensor: Tensor) -> None:
        """What generated code has allocated, and will let operations write to."""
        self._fresh.add(tensor.untyped_storage())

    def _hold(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known or storage in self._met or storage in self._fresh:
            return
        self._met.add(storage)
        self.held.append(HeldStorage(storage))


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from each_tensor(value)
