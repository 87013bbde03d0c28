"""Meetings of ranks: no rank begins an exchange while another one is inside a step, or has failed in it.

NOTE [ A rank that fails alone ]
    1. Ranks meet before every exchange, over the store of `torch.distributed`: each says that it has come and waits for
       all others. Its device has no work left then. No collective takes part, so that none of a step's is disturbed.
    2. A rank that fails says so on its way to the next meeting.
    3. A step that communicates by itself (sharded parameters, tensor parallelism) cannot end without that rank, unless
       it needs nothing more of it. So a thread of each rank looks for failures while such a step runs (`watched`), and
       gives the step some seconds to end. If it has not, the thread aborts the process groups: whatever waits in
       one of them raises. All ranks hear of this at the meeting, and raise the same error.
    4. In a training loop ranks do not meet after every step: they agree by one reduction how it ended, and meet only if
       one has failed. So that rank says what failed before it takes part in the reduction.
    5. Nothing is aborted unless a rank has failed: a healthy one may take as long as it likes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from threading import Lock, Thread
from typing import Any
from weakref import ref

import torch

from recoup.errors import FitError
from recoup.torch_private import abort_groups

__all__ = ["Meetings"]

_POLL_S = 0.5
_GRACE_S = 10.0
"""How long a step may still run after another rank has failed."""
_LONGEST = timedelta(minutes=30)
"""How long a rank waits for the others: gloo's own timeout."""
_ALL_CAME, _ABORTED = b"all came", b"aborted"


class Meetings:
    """The meetings of some ranks, by NOTE [ A rank that fails alone ].

    Args:
        store: of `torch.distributed`, in a connection of its own, with keys that nobody else uses.
        members: the ranks, by their global numbers.
    """

    def __init__(self, store: Any, members: Sequence[int]) -> None:
        self._store, self._members = store, members
        store.set_timeout(_LONGEST)
        self._lock = Lock()
        self._number = 0
        self._is_here = self._is_aborted = False
        self._thread: Thread | None = None
        self._num_watched = 0
        self._failed_at: float | None = None

    def meet(self, failure: str | None) -> None:
        """Waits until all ranks have come.

        Args:
            failure: what this rank has failed with, in words.

        Raises:
            FitError: a rank failed while others were in a step that needed it.
        """
        if failure is not None:
            self.report(failure)
        self._finish_work()
        with self._lock:
            self._is_here = True
        if not self._is_aborted:
            self._wait_for_all()
        if self._is_aborted:
            failure = self._store.get(self._key("failure")).decode()
            raise FitError(
                f"{failure}\nOther ranks were in a step that could not end without that rank, so all process groups"
                " were aborted. Nothing can be communicated any more: start the processes anew."
            )
        with self._lock:
            self._number += 1
            self._is_here = False

    def report(self, failure: str) -> None:
        """Says before the next meeting what this rank has failed with; of several ranks, the first counts."""
        self._store.compare_set(self._key("failure"), "", failure)

    def is_aborted(self) -> bool:
        """Whether some rank has aborted the process groups, before this one has come to the next meeting."""
        return self._is_aborted or self._store.check([self._key("outcome")])

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A block whose steps communicate: they end soon after another rank has failed, by an error."""
        if self._thread is None:
            # One for all blocks: beginning and ending it in each would slow steps of a millisecond down.
            self._thread = Thread(target=_watch, args=(ref(self),), name="recoup: other ranks", daemon=True)
            self._thread.start()
        self._num_watched += 1
        try:
            yield
        finally:
            self._num_watched -= 1

    def _finish_work(self) -> None:
        # Collectives on a device run after the code that starts them.
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def _wait_for_all(self) -> None:
        if self._store.add(self._key("number"), 1) == len(self._members):
            self._store.set(self._key("outcome"), _ALL_CAME)
        self._store.wait([self._key("outcome")])
        if self._store.get(self._key("outcome")) == _ABORTED:
            self._is_aborted = True
            abort_groups(self._members)

    def look(self) -> bool:
        """In a watched block, looks for failures of other ranks; whether it is worth looking again."""
        number, is_failed = self._number, False
        if self._num_watched and not self._is_here:
            try:
                is_failed = self._store.check([self._key("failure")])
            except RuntimeError:  # the process that has the store is gone
                return False
        self._failed_at = (self._failed_at or time.monotonic()) if is_failed else None
        is_late = self._failed_at is not None and time.monotonic() - self._failed_at >= _GRACE_S
        return not (is_late and self._abort(number))

    def _abort(self, number: int) -> bool:
        with self._lock:
            if self._is_here or self._number != number or not self._num_watched or self._is_aborted:
                return self._is_aborted
            self._is_aborted = True
            self._store.set(self._key("outcome"), _ABORTED)
        abort_groups(self._members)
        return True

    def _key(self, what: str) -> str:
        return f"{self._number}/{what}"


def _watch(meetings: ref[Meetings]) -> None:
    """Looks for failures as long as somebody has the meetings."""
    while True:
        time.sleep(_POLL_S)
        found = meetings()
        if found is None or not found.look():
            return
        del found
