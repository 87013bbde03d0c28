"""What frames and segments have in common: values that a replay makes and a backward reads."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from recoup.checkpointing.replay import Manner
from recoup.errors import ReplayMismatchError
from recoup.torch_private import current_graph_task, queue_callback

if TYPE_CHECKING:
    from recoup.checkpointing.api import Checkpoint

__all__ = ["SEEKING", "Replayable", "Sought", "seeking"]

_NO_TASK = -1


class Sought(BaseException):
    """Carries a frame or segment out of its unpack hook while `seeking`."""

    def __init__(self, found: Replayable) -> None:
        self.found = found


class _Seeking(threading.local):
    active = False


SEEKING = _Seeking()
"""Unpack hooks look at it, and raise `Sought` while it is active."""


@contextmanager
def seeking() -> Iterator[None]:
    """Makes frames and segments on this thread show themselves, by raising `Sought`, instead of replaying."""
    SEEKING.active = True
    try:
        yield
    finally:
        SEEKING.active = False


class _Lasting(dict[Any, Tensor]):
    """Values that may be read any number of times."""

    def pop(self, key: Hashable, default: Any = None) -> Any:
        return self.get(key, default)


class Replayable(ABC):
    """Hands out the values of a replay, each once, and forgets the others when the backward ends.

    See NOTE [ How a frame works ], 4 and 5. Subclasses say how to replay.
    """

    __slots__ = ("__weakref__", "_lock", "_options", "_task", "_values", "_versions")

    def __init__(self, options: Checkpoint) -> None:
        self._options = options
        self._values: dict[Any, Tensor] = {}
        self._versions: dict[Any, int] = {}
        self._task = _NO_TASK
        self._lock = threading.RLock()

    @abstractmethod
    def _make(self, key: Any, *, locating: bool) -> tuple[dict[Any, Tensor], dict[Any, int]]:
        """Replays until a wanted value is there; returns it and others, and the version counters that are not 0.

        Args:
            key: the value.
            locating: a replay has gone astray: all that is known is compared, from the first call on.
        """

    def _manner(self, locating: bool, *, to_end: bool = False) -> Manner:
        return Manner(locating or self._options.check == "values", to_end)

    def _is_ahead(self, key: Any) -> bool:
        """Whether the replay of this backward has yet to get to a value, from where it left off."""
        return False

    def _has_left(self) -> bool:
        """Whether there is anything to drop when the backward ends."""
        return bool(self._values)

    def _needs_locating(self) -> bool:
        """Whether a second replay can say more about where the first one went astray."""
        return self._options.check not in ("values", "none")

    def _drop(self) -> None:
        """Lets go of all that replays have left."""
        self._values = {}
        self._versions = {}

    def _fetch(self, key: Any) -> Tensor:
        """Gives a value that has not been made yet, or was handed out before."""
        if SEEKING.active:
            raise Sought(self)
        task = current_graph_task()
        with self._lock:
            # Another thread of this backward may have replayed while this one waited.
            tensor: Tensor | None = self._values.pop(key, None)
            if tensor is not None:
                return tensor
            in_backward = task != _NO_TASK
            is_new = not in_backward or task != self._task
            if is_new or not self._is_ahead(key):
                self._drop()
                if not is_new:  # read a second time
                    self._values = _Lasting()
            try:
                values, versions = self._make(key, locating=False)
            except ReplayMismatchError as error:
                raise self._locate(key, error) from None
            except BaseException:
                self._drop()
                raise
            if not in_backward:
                self._drop()
                return values[key]
            # Taken before the others are there for all to see.
            tensor = values[key] if type(self._values) is _Lasting else values.pop(key)
            if not is_new:
                self._versions.update(versions)
                self._values.update(values)
            else:
                self._versions, self._task, self._values = versions, task, values
                if self._has_left():
                    # Weakly: the callback lives until the backward ends, the frame should not.
                    queue_callback(partial(_forget, weakref.ref(self), task))
            return tensor

    def forget(self, task: int) -> None:
        """Drops what a backward that has ended left over."""
        with self._lock:
            if self._task == task:
                self._drop()
                self._task = _NO_TASK

    def _locate(self, key: Any, error: ReplayMismatchError) -> ReplayMismatchError:
        """Replays once more, comparing every tensor while the operation that saves it runs: that can say where."""
        self._drop()
        if not self._needs_locating():
            return error
        try:
            self._make(key, locating=True)
        except ReplayMismatchError as located:
            return located
        except Exception:
            return error
        finally:
            self._drop()
        return error


def _forget(reference: weakref.ref[Replayable], task: int) -> None:
    found = reference()
    if found is not None:
        found.forget(task)
