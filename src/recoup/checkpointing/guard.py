"""A guard for replays beside tensors that were changed: it raises when an operation really reads one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from recoup.torch_private import WatchingMode, tree_iter

__all__ = ["StaleGuard", "is_unguarded", "unguarded"]


class _Off(threading.local):
    value = False


_off = _Off()


@contextmanager
def unguarded() -> Iterator[None]:
    """What a replay copies for a frame inside it is not yet read by the function."""
    before, _off.value = _off.value, True
    try:
        yield
    finally:
        _off.value = before


def is_unguarded() -> bool:
    """Whether this thread runs an operation of recoup's own, and not of the function."""
    return _off.value


class StaleGuard(WatchingMode):
    """Raises ``refuse(tensor)`` when an operation is given one of the stale tensors, or a view of one.

    A function often reaches more than it reads: all layers of a model, of which it runs one. With an optimizer that
    steps inside the backward the others have changed, and that does not matter.
    """

    def __init__(self, stale: Iterable[Tensor], refuse: Callable[[Tensor], Exception]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stale = {t.untyped_storage()._cdata: t for t in stale if t.layout is torch.strided}
        self._refuse = refuse
        self.error: Exception | None = None
        """What was raised; TorchScript turns exceptions into its own."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs the operation, unless it reads a stale tensor."""
        for value in () if _off.value else tree_iter((args, kwargs)):
            if isinstance(value, Tensor):
                self.check(value)
        return func(*args, **(kwargs or {}))

    def check(self, tensor: Tensor) -> None:
        """Raises if a tensor is stale."""
        if tensor.layout is torch.strided:
            stale = self._stale.get(tensor.untyped_storage()._cdata)
            if stale is not None:
                self.error = self._refuse(stale)
                raise self.error
