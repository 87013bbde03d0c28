"""Exact bytes of the tensors that a block of code makes, on any device, by watching storages live and die."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

__all__ = ["MemoryTracker"]


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of storages made inside it while they live: each once, however many tensors view it.

    What existed before (parameters, inputs) counts zero. Use it where compiled code does not run: as an ambient
    dispatch mode it makes compiled code run eagerly, and every operation costs tens of microseconds.

    >>> import torch
    >>> with MemoryTracker() as memory:
    ...     x = torch.zeros(256)
    ...     y = x[:128] + 1
    ...     del x
    >>> memory.current_bytes, memory.peak_bytes
    (512, 1536)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current_bytes = 0
        self.peak_bytes = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def reset_peak(self) -> None:
        """Starts a new peak from what lives now."""
        self.peak_bytes = self.current_bytes

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs the operation and counts the storages that it made."""
        for value in tree_iter((args, kwargs)):
            if isinstance(value, Tensor) and value.layout is torch.strided:
                # Anything that arrives without having been made here lived before: it counts zero.
                self._known.add(value.untyped_storage())
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor) and value.layout is torch.strided:
                self._count(value.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        num_bytes = storage.nbytes()
        self.current_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        weakref.finalize(storage, self._release, num_bytes).atexit = False

    def _release(self, num_bytes: int) -> None:
        self.current_bytes -= num_bytes
