"""One lock for the process: one checkpointed forward, or one replay that puts state back, at a time.

NOTE [ Threads ]

1. Modules, globals and random generators belong to the process. While a replay shows them as they were, no other thread
   may run a checkpointed forward, which would read the old state, or lose what it changes. Nor may two forwards draw
   from one generator alternately, which no replay could repeat.
2. Autograd runs the backward of an accelerator on threads of its own. A forward that runs a backward inside waits for
   these: they share its lock.
3. A model may run its parts on threads of its own: these share the lock of the thread that runs the model.
4. Threads may wait for each other: a forward for what another thread's forward sends it. A thread that waits for long
   while nobody releases the lock says so, and takes no locks from then on.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

from recoup.checkpointing.replay import depth
from recoup.errors import RecoupWarning

__all__ = ["acquire", "holder", "locked", "release", "shared"]

_PATIENCE_S = 20.0

# The lock itself costs a tenth of what entering the condition does.
_lock = threading.Lock()
_changed = threading.Condition(_lock)


class _Owner:
    thread: int | None = None
    depth = 0
    num_released = 0
    is_waited_for = False
    """Whether any thread has ever had to wait."""


class _Shared(threading.local):
    thread: int | None = None


_owner = _Owner()
_shared = _Shared()
_impatient: set[int] = set()
"""Threads that take no locks any more."""


def acquire(maker: int | None = None) -> bool:
    """Waits until no other thread has the lock; returns whether there is a lock to release.

    Args:
        maker: for a replay, the thread on which the forward ran.
    """
    if depth():
        return False  # what a replay calls is part of it
    me = get_ident()
    with _lock:
        is_free = _owner.thread in (None, me, _shared.thread) or _is_inside(maker)
        if not is_free and (me in _impatient or not _wait()):
            return False
        _owner.thread = _owner.thread or me
        _owner.depth += 1
    return True


def _wait() -> bool:
    """Waits for the lock; gives up if nobody releases it for long."""
    _owner.is_waited_for = True
    num_released = -1
    while num_released != _owner.num_released:
        num_released = _owner.num_released
        if _changed.wait_for(lambda: _owner.thread is None, _PATIENCE_S):
            return True
    _impatient.add(get_ident())
    warnings.warn(
        f"A checkpointed call waited {_PATIENCE_S:g} s for one on another thread, which may be waiting for it. From"
        " here on this thread does not wait: give each thread modules of its own, and keep random operations out of"
        " checkpointed calls.",
        RecoupWarning,
        stacklevel=5,
    )
    return False


def release() -> None:
    """Releases what `acquire` acquired."""
    with _lock:
        _owner.depth -= 1
        if not _owner.depth:
            _owner.thread = None
            _owner.num_released += 1
            if _owner.is_waited_for:
                _changed.notify_all()


@contextmanager
def locked(maker: int) -> Iterator[None]:
    """A replay that puts state back."""
    taken = acquire(maker)
    try:
        yield
    finally:
        if taken:
            release()


@contextmanager
def shared(thread: int | None) -> Iterator[None]:
    """A block that shares another thread's lock, if it has one."""
    before, _shared.thread = _shared.thread, thread
    try:
        yield
    finally:
        _shared.thread = before


def holder() -> int:
    """The thread for which this code runs: another one than this if it is a replay's, on a thread of autograd's."""
    return (_owner.thread if depth() else None) or get_ident()


def _is_inside(maker: int | None) -> bool:
    """Whether this is a thread of autograd's that works for the forward that has the lock."""
    return maker == _owner.thread and isinstance(threading.current_thread(), threading._DummyThread)
