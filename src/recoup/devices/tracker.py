"""Exact bytes of the tensors that a block of code makes, on any device, by watching storages live and die."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from recoup.sizes import format_bytes
from recoup.tensors import storages
from recoup.torch_private import TorchDispatchMode

__all__ = ["MemoryTracker"]


class _Seen(weakref.ref[torch.UntypedStorage]):
    """A storage that passed by: what it measured before it counted, and the bytes that count now."""

    __slots__ = ("base_bytes", "counted_bytes", "is_recent", "key", "num_bytes")
    key: int
    is_recent: bool
    base_bytes: int
    num_bytes: int
    counted_bytes: int


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of storages made inside it while they live: each once, however many tensors view it.

    What existed before (parameters, inputs) counts zero; where it grows inside, the growth counts. A storage that
    is resized behind the dispatcher's back (`storage.resize_`) is measured anew when an operation next meets it.
    Tensors that the autograd engine makes without an operation are seen first as arguments, and count zero.

    Use it where compiled code does not run: as an ambient dispatch mode it makes compiled code run eagerly, and
    every operation costs about ten microseconds.

    Args:
        limit_bytes: a hard cap, for tests of what happens when a step does not fit. An operation whose results
            pass it raises `torch.OutOfMemoryError`, and its results are dropped.

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
        #: Told the current bytes whenever they have changed.
        self.observer: Callable[[int], None] | None = None
        self.current_bytes = 0
        self.peak_bytes = 0
        self.made_bytes = 0
        #: As current and peak bytes, of what `begin` was given and what was made since.
        self.recent_bytes = 0
        self.recent_peak_bytes = 0
        self._at_next: Callable[[], None] | None = None
        # By id: a storage keeps its Python object for life, and leaves here when it dies.
        self._seen: dict[int, _Seen] = {}

    def reset_peak(self) -> None:
        """Starts a new peak from what lives now."""
        self.peak_bytes = self.current_bytes

    def begin(self, tensors: Iterable[Tensor] = (), at_next: Callable[[], None] | None = None) -> None:
        """Starts to count some tensors, and what is made from now on, by themselves, whatever else goes meanwhile.

        Args:
            tensors: that count from the start.
            at_next: is called before the next operation runs.
        """
        self._at_next = at_next
        keys = {id(tensor.untyped_storage()) for tensor in tensors}
        for seen in self._seen.values():
            seen.is_recent = seen.key in keys
        self.recent_bytes = sum(self._seen[key].counted_bytes for key in keys if key in self._seen)
        self.recent_peak_bytes = self.recent_bytes

    def living(self) -> list[torch.UntypedStorage]:
        """The storages that count now."""
        found = (seen() for seen in list(self._seen.values()) if seen.counted_bytes)
        return [storage for storage in found if storage is not None]

    def lived_before(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage was there when an operation first met it, and has not grown."""
        seen = self._seen.get(id(storage))
        return seen is not None and seen.base_bytes > 0 and seen.counted_bytes == 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs the operation and counts the storages that it made."""
        if self._at_next is not None:
            at_next, self._at_next = self._at_next, None
            at_next()
        # Anything that arrives without having been made here lived before: it counts zero.
        if func is not _LIFT_FRESH or not args[0].untyped_storage().resizable():
            self._look(args, False)
        if kwargs:
            self._look(kwargs.values(), False)
        result = func(*args, **(kwargs or {}))
        before_bytes = self.current_bytes
        self._look((result,), True)
        self.recent_peak_bytes = max(self.recent_peak_bytes, self.recent_bytes)
        if self.current_bytes > self.peak_bytes:
            if self.limit_bytes is not None and self.current_bytes > self.limit_bytes:
                need_bytes = self.current_bytes - before_bytes
                # The traceback must not keep alive what did not fit.
                del result, args, kwargs
                raise torch.OutOfMemoryError(
                    f"{func} needs {format_bytes(need_bytes)} beside {format_bytes(before_bytes)} in use; "
                    f"the limit is {format_bytes(self.limit_bytes)}."
                )
            self.peak_bytes = self.current_bytes
        return result

    def _counts(self, tensor: Tensor) -> bool:
        """Whether a new tensor counts."""
        return True

    def _taken(self, num_bytes: int) -> int:
        """What a size takes of the memory."""
        return num_bytes

    def _look(self, values: Iterable[Any], is_new: bool) -> None:
        seen = self._seen
        for value in values:
            if isinstance(value, Tensor):
                found: Iterable[torch.UntypedStorage]
                try:
                    found = (value.untyped_storage(),)
                except NotImplementedError:  # sparse: those of its parts
                    found = storages(value)
                for storage in found:
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


# torch.tensor makes its result out of sight and shows it first as the argument of this; so does torch.from_numpy,
# whose memory is NumPy's and cannot be resized.
_LIFT_FRESH = torch.ops.aten.lift_fresh.default
