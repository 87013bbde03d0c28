"""Threads take turns: one checkpointed forward, or one replay that puts state back, at a time.

NOTE [ Threads ]

1. Modules, globals and random generators belong to the process. While a replay shows them as they were, no other thread
   may run a checkpointed forward, which would read the old state, or lose what it changes. Nor may two forwards draw
   from one generator in turns, which no replay could repeat.
2. Autograd runs the backward of an accelerator on threads of its own. A forward that runs a backward inside waits for
   these: its turn is theirs.
3. A model may run its parts on threads of its own: these join the turn of the thread that runs the model.
4. Threads may wait for each other: a forward for what another thread's forward sends it. A thread that waits for long
   while nobody's turn ends says so, and takes no turns from then on.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

from recoup.checkpointing.replay import depth
from recoup.errors import RecoupWarning

__all__ = ["begin_turn", "end_turn", "joined", "turn", "turn_holder"]

_PATIENCE_S = 20.0

# The lock itself costs a tenth of what entering the condition does.
_lock = threading.Lock()
_changed = threading.Condition(_lock)


class _Turns:
    thread: int | None = None
    """Whose turn it is."""
    depth = 0
    num_ended = 0
    are_waited_for = False
    """Whether any thread has ever had to wait."""


class _Joined(threading.local):
    thread: int | None = None


_turns = _Turns()
_joined = _Joined()
_impatient: set[int] = set()
"""Threads that take no turns any more."""


def begin_turn(maker: int | None = None) -> bool:
    """Waits until no other thread has its turn; returns whether there is a turn to end.

    Args:
        maker: for a replay, the thread on which the forward ran.
    """
    if depth():
        return False  # what a replay calls belongs to its turn
    me = get_ident()
    with _lock:
        is_free = _turns.thread in (None, me, _joined.thread) or _is_inside(maker)
        if not is_free and (me in _impatient or not _wait()):
            return False
        _turns.thread = _turns.thread or me
        _turns.depth += 1
    return True


def _wait() -> bool:
    """Waits for a turn; gives up if nobody's ends for long."""
    _turns.are_waited_for = True
    num_ended = -1
    while num_ended != _turns.num_ended:
        num_ended = _turns.num_ended
        if _changed.wait_for(lambda: _turns.thread is None, _PATIENCE_S):
            return True
    _impatient.add(get_ident())
    warnings.warn(
        f"A checkpointed call waited {_PATIENCE_S:g} s for one on another thread, which may be waiting for it. From"
        " here on this thread does not wait: give each thread modules of its own, and keep random operations out of"
        " checkpointed calls.",
        RecoupWarning,
        stacklevel=4,
    )
    return False


@contextmanager
def joined(thread: int | None) -> Iterator[None]:
    """A block that belongs to another thread's turn, if it has one."""
    before, _joined.thread = _joined.thread, thread
    try:
        yield
    finally:
        _joined.thread = before


def end_turn() -> None:
    """Ends a turn that `begin_turn` began."""
    with _lock:
        _turns.depth -= 1
        if not _turns.depth:
            _turns.thread = None
            _turns.num_ended += 1
            if _turns.are_waited_for:
                _changed.notify_all()


@contextmanager
def turn(maker: int) -> Iterator[None]:
    """A turn for a replay that puts state back."""
    taken = begin_turn(maker)
    try:
        yield
    finally:
        if taken:
            end_turn()


def turn_holder() -> int:
    """The thread in whose turn this code runs: another one than this if it is a replay's, on a thread of autograd's."""
    return (_turns.thread if depth() else None) or get_ident()


def _is_inside(maker: int | None) -> bool:
    """Whether this is a thread of autograd's that works for the forward whose turn it is."""
    return maker == _turns.thread and isinstance(threading.current_thread(), threading._DummyThread)
