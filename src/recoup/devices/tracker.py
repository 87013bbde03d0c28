"""Exact bytes of the storages that a block of code allocates, on any device."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from recoup.sizes import format_bytes
from recoup.tensors import storage_of, storages
from recoup.torch_private import WatchingMode, allocations_seen, is_traceable_wrapper_subclass

__all__ = ["MemoryTracker"]


class _Seen(weakref.ref[torch.UntypedStorage]):
    """A storage that an operation read or made: its size, the part that existed before, and the bytes that count."""

    __slots__ = ("base_bytes", "counted_bytes", "is_recent", "key", "num_bytes")
    key: int
    is_recent: bool
    base_bytes: int
    num_bytes: int
    counted_bytes: int


class MemoryTracker(WatchingMode):
    """Counts the bytes of storages allocated in a ``with`` block until they are freed: each once, whatever aliases it.

    What existed before (parameters, inputs) counts zero, but its growth counts. A storage that is resized without an
    operation (`storage.resize_`) is counted anew when an operation next reads it. Tensors that the autograd engine
    makes without an operation are seen first as arguments, and count zero.

    Compiled code runs as compiled, and what it allocates counts too, if it was compiled before the block. Each
    operation takes about ten microseconds longer.

    Args:
        limit_bytes: for tests of what happens when a step does not fit. An operation or generated code whose
            results pass this limit raises `torch.OutOfMemoryError`, and its results are freed.

    >>> import torch
    >>> with MemoryTracker() as memory:
    ...     x = torch.zeros(256)
    ...     y = x[:128] + 1
    ...     del x
    >>> memory.current_bytes, memory.peak_bytes, memory.made_bytes
    (512, 1536, 1536)
    >>> with MemoryTracker(limit_bytes=1000):
    ...     torch.zeros(256)
    Traceback (most recent call last):
        ...
    torch.OutOfMemoryError: aten.zeros.default needs 1.00 KiB beside 0 B in use; the limit is 1000 B.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit_bytes = limit_bytes
        #: Called with the current bytes whenever they have changed.
        self.observer: Callable[[int], None] | None = None
        self.current_bytes = 0
        self.peak_bytes = 0
        self.made_bytes = 0
        #: Current and peak bytes of what `begin` was given and of what was allocated since.
        self.recent_bytes = 0
        self.recent_peak_bytes = 0
        self._at_next: Callable[[], None] | None = None
        self._followed: list[torch.UntypedStorage] = []
        #: Whether other threads may hold storages a moment longer than the code that counts.
        self.waits = False
        # By id: a storage keeps its Python object until it is freed, which removes it here.
        self._seen: dict[int, _Seen] = {}

    def __enter__(self) -> MemoryTracker:
        """Begins to count."""
        with ExitStack() as stack:
            stack.enter_context(allocations_seen(self._count))
            super().__enter__()  # type: ignore[no-untyped-call]
            self._generated = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> Any:
        """Ends the count."""
        self._generated.close()
        return super().__exit__(*error)  # type: ignore[no-untyped-call]

    def reset_peak(self) -> None:
        """Starts a new peak from the current bytes."""
        self.peak_bytes = self.current_bytes

    def begin(self, tensors: Iterable[Tensor] = (), at_next: Callable[[], None] | None = None) -> None:
        """Restarts the recent bytes: they count some tensors, and whatever is allocated from now on.

        Args:
            tensors: to count from the start.
            at_next: called before the next operation runs.
        """
        self._at_next = at_next
        keys = {id(storage_of(tensor)) for tensor in tensors}
        for seen in self._seen.values():
            seen.is_recent = seen.key in keys
        self.recent_bytes = sum(self._seen[key].counted_bytes for key in keys if key in self._seen)
        self.recent_peak_bytes = self.recent_bytes

    def follow(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Counts storages that are resized without an operation, such as gathered parameters, as soon as they are."""
        for storage in storages:
            if id(storage) not in self._seen:
                self._meet(storage, is_new=True)
            self._followed.append(storage)

    def count(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Counts storages that existed before as if the block had allocated them, so that freeing them shows."""
        for storage in storages:
            if id(storage) not in self._seen:
                self._meet(storage, is_new=True)

    def ignore(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Counts storages as what existed before, however large they become."""
        for storage in storages:
            if id(storage) not in self._seen:
                self._meet(storage, is_new=False)
            self._seen[id(storage)].base_bytes = sys.maxsize

    def _follow(self) -> None:
        for storage in self._followed:
            known = self._seen[id(storage)]
            if known.num_bytes != storage.nbytes():
                self._resized(known, storage.nbytes())

    def wait(self, until_bytes: int = 0) -> None:
        """Lets other threads free what they hold without need: gloo's, a moment after a collective has ended.

        Args:
            until_bytes: no longer than until so much is left.
        """
        for _ in range(_NUM_WAITS):
            time.sleep(_WAIT_S)
            if self.current_bytes <= until_bytes:
                return

    def living(self) -> list[torch.UntypedStorage]:
        """The storages that count and are not freed yet."""
        found = (seen() for seen in list(self._seen.values()) if seen.counted_bytes)
        return [storage for storage in found if storage is not None]

    def lived_before(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage existed before an operation first read it, and has not grown."""
        seen = self._seen.get(id(storage))
        return seen is not None and seen.base_bytes > 0 and seen.counted_bytes == 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs an operation and counts the storages that it allocates."""
        if self._at_next is not None:
            at_next, self._at_next = self._at_next, None
            at_next()
        if self._followed:
            self._follow()
        # An argument that no operation here made existed before: it counts zero.
        if func is not _LIFT_FRESH or not args[0].untyped_storage().resizable():
            self._look(args, False)
        if kwargs:
            self._look(kwargs.values(), False)
        result = func(*args, **(kwargs or {}))
        before_bytes = self.current_bytes
        self._look((result,), True)
        if refusal := self._at_peak(func, before_bytes):
            # The traceback must not hold what did not fit.
            del result, args, kwargs
            raise torch.OutOfMemoryError(refusal)
        return result

    def _count(self, made: Tensor) -> None:
        """Counts what generated code allocates."""
        before_bytes = self.current_bytes
        self._look((made,), True)
        if refusal := self._at_peak("generated code", before_bytes):
            del made
            raise torch.OutOfMemoryError(refusal)

    def _at_peak(self, what: Any, before_bytes: int) -> str:
        """Notes a new peak; says so if it passes the limit."""
        if self.waits and self.current_bytes > self.peak_bytes:
            self.wait(until_bytes=self.peak_bytes)
        self.recent_peak_bytes = max(self.recent_peak_bytes, self.recent_bytes)
        if self.current_bytes > self.peak_bytes:
            if self.limit_bytes is not None and self.current_bytes > self.limit_bytes:
                need_bytes = self.current_bytes - before_bytes
                return (
                    f"{what} needs {format_bytes(need_bytes)} beside {format_bytes(before_bytes)} in use; "
                    f"the limit is {format_bytes(self.limit_bytes)}."
                )
            self.peak_bytes = self.current_bytes
        return ""

    def _counts(self, tensor: Tensor) -> bool:
        """Whether a new tensor counts."""
        return True

    def _taken(self, num_bytes: int) -> int:
        """The bytes that a storage of this size takes."""
        return num_bytes

    def _look(self, values: Iterable[Any], is_new: bool) -> None:
        seen = self._seen
        for value in values:
            if isinstance(value, Tensor):
                # `storages` finds those of all tensors, but takes longer.
                is_plain = value.layout is torch.strided and not is_traceable_wrapper_subclass(value)
                for storage in (value.untyped_storage(),) if is_plain else storages(value):
                    known = seen.get(id(storage))
                    if known is None:
                        self._meet(storage, is_new and self._counts(value))
                    elif known.num_bytes != storage.nbytes():
                        self._resized(known, storage.nbytes())
            elif isinstance(value, (list, tuple)):
                self._look(value, is_new)
            elif isinstance(value, dict):
                self._look(value.values(), is_new)

    def _meet(self, storage: torch.UntypedStorage, is_new: bool) -> None:
        known = _Seen(storage, self._release)
        known.key = id(storage)
        known.num_bytes = known.base_bytes = storage.nbytes()
        known.counted_bytes = 0
        known.is_recent = is_new
        self._seen[known.key] = known
        if is_new:
            known.base_bytes = 0
            self._resized(known, known.num_bytes)

    def _resized(self, known: _Seen, num_bytes: int) -> None:
        grown_bytes = self._taken(max(0, num_bytes - known.base_bytes)) - known.counted_bytes
        known.num_bytes = num_bytes
        known.counted_bytes += grown_bytes
        self.current_bytes += grown_bytes
        self.recent_bytes += grown_bytes * known.is_recent
        self.made_bytes += max(0, grown_bytes)
        if self.observer is not None:
            self.observer(self.current_bytes)

    def _release(self, known: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(known, _Seen)
        del self._seen[known.key]
        self.current_bytes -= known.counted_bytes
        self.recent_bytes -= known.counted_bytes * known.is_recent
        if self.observer is not None:
            self.observer(self.current_bytes)


_NUM_WAITS, _WAIT_S = 4, 0.0005
# The result of torch.tensor is first seen as the argument of this operation; so is that of torch.from_numpy, whose
# memory is NumPy's and cannot be resized.
_LIFT_FRESH = torch.ops.aten.lift_fresh.default
