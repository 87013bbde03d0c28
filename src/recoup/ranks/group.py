"""Ranks: processes of `torch.distributed` that fit one model together.

NOTE [ One plan on all ranks ]
    1. All ranks run the same code. Whatever one of them measures, and a decision depends on, is combined first: the
       largest bytes, the slowest seconds. So all decide alike, and run the same number of steps.
    2. Every exchange of values also exchanges errors: a rank that fails says so at its next exchange, whichever that
       is for the others, and all raise the same error there. An error is exchanged once.
    3. `Ranks.together` is an exchange at the end of a block, for errors that somebody catches: all ranks catch them.
    4. A step that communicates by itself (sharded parameters) can wait for a rank that failed before it communicated:
       ``meetings.py`` ends it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import sha256
from typing import Any, TypeVar
from uuid import uuid4

import torch

from recoup.errors import FitError
from recoup.ranks.meetings import Meetings
from recoup.torch_private import own_store, without_modes

__all__ = ["ALONE", "SAME_STEP", "Ranks", "find_ranks"]

T = TypeVar("T")
SAME_STEP = (
    "Give all ranks the same model, units and budget, and samples of the same structure; a rank that trains another"
    " model is fitted with together=False."
)
"""What to do where ranks that fit a model together run different steps."""
_IS_SHARED = "_recoup_is_shared"


class Ranks:
    """The ranks of one process group, all of which make this object. For a rank alone, values stay as they are.

    Args:
        group: their process group; ``None`` for all ranks.
        size: how many they are.
        rank: this one's number among them.

    >>> ALONE.largest(3), ALONE.gathered("x"), ALONE.from_first(lambda: 1)
    (3, ['x'], 1)
    """

    def __init__(self, group: Any = None, *, size: int = 1, rank: int = 0) -> None:
        self.group, self.size, self.rank = group, size, rank
        self._meetings: Meetings | None = None
        if size > 1:
            name = self._exchange(None, f"recoup/{uuid4()}")[0]
            store = own_store(name)
            self._meetings = None if store is None else Meetings(store, self._members())

    def gathered(self, value: T) -> list[T]:
        """The values of all ranks, in their order.

        Raises:
            Exception: what another rank has raised since the last exchange.
        """
        return [value] if self.size == 1 else self._exchange(None, value)

    def largest(self, value: T) -> T:
        """The largest of all ranks' values."""
        return max(self.gathered(value))  # type: ignore[type-var]

    def smallest(self, value: T) -> T:
        """The smallest of all ranks' values."""
        return min(self.gathered(value))  # type: ignore[type-var]

    def from_first(self, make: Callable[[], T]) -> T:
        """What the first rank makes; all raise what it raises."""
        if self.size == 1:
            return make()
        with self.together():
            made = make() if self.rank == 0 else None
        return self.gathered(made)[0]  # type: ignore[return-value]

    def largest_code(self, code: int) -> int:
        """The largest of all ranks' codes, by one reduction in host memory: cheap enough for every step."""
        if self.size == 1:
            return code
        with without_modes():
            found = torch.tensor([code])
            torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=self.group)
            return int(found)

    def watched(self) -> AbstractContextManager[None]:
        """A block in which a step that communicates runs, and `agree` says how it ended."""
        return nullcontext() if self._meetings is None else self._meetings.watched()

    def agree(self, code: int, *, failed_from: int, failure: str) -> int:
        """How a step that communicates ended: as `largest_code`, but no rank waits for one that failed alone.

        Args:
            code: how it ended on this rank.
            failed_from: the smallest code of a step that failed.
            failure: for such a code, what the rank has done, in words: ``"ran out of memory"``.

        Raises:
            FitError: a rank failed while others were in a step that needed it.
        """
        if self._meetings is None:
            return self.largest_code(code)
        said = f"Rank {self.rank} {failure}" if code >= failed_from else None
        if said is not None:
            self._meetings.report(said)
        try:
            worst = self.largest_code(code)
        except RuntimeError:
            if not self._meetings.is_aborted():
                raise
            worst = failed_from
        if worst >= failed_from:
            self._meetings.meet(said)
        return worst

    def over_host(self) -> Ranks:
        """The same ranks in a group that communicates over the host: nobody waits for a device. All ranks call this."""
        if self.size == 1:
            return self
        group = torch.distributed.new_group(self._members(), backend="gloo", use_local_synchronization=True)
        return Ranks(group, size=self.size, rank=self.rank)

    def _members(self) -> list[int]:
        return torch.distributed.get_process_group_ranks(self.group or torch.distributed.group.WORLD)

    def check_same(self, write: Callable[[], str], what: str) -> None:
        """Compares what each rank writes by its hash; a rank alone writes nothing.

        Raises:
            FitError: some rank has another one.
        """
        if self.size == 1:
            return
        hashes = self.gathered(sha256(write().encode()).hexdigest())
        others = [rank for rank, found in enumerate(hashes) if found != hashes[0]]
        if others:
            raise FitError(f"{what} of rank {others[0]} is not that of rank 0. {SAME_STEP}")

    @contextmanager
    def together(self, *, communicates: bool = False) -> Iterator[None]:
        """A block after which all ranks raise the error of the first of them that failed in it.

        Args:
            communicates: whether steps in the block wait for other ranks by themselves.
        """
        if self.size == 1:
            yield
            return
        with self._meetings.watched() if communicates and self._meetings else nullcontext():
            failed: Exception | None = None
            try:
                yield
            except Exception as error:
                if getattr(error, _IS_SHARED, False):
                    raise
                failed = error
            try:
                self._exchange(failed, None)
            finally:
                failed = None  # else this frame and the error would hold each other

    def _exchange(self, error: Exception | None, value: T) -> list[T]:
        found: list[Any] = [None] * self.size
        packed = None if error is None else _packed(error)
        self._meet(error)
        torch.distributed.all_gather_object(found, (packed, value), group=self.group)
        for rank, (failure, _) in enumerate(found):
            if failure is None:
                continue
            if rank == self.rank and error is not None:
                setattr(error, _IS_SHARED, True)
                raise error
            raise _unpacked(failure) from RuntimeError(f"Raised on rank {rank}.")
        return [value for _, value in found]

    def _meet(self, error: Exception | None) -> None:
        if self._meetings is None:
            return
        failure = None if error is None else f"Rank {self.rank} failed: {type(error).__name__}: {error}"
        try:
            self._meetings.meet(failure)
        except FitError as aborted:
            setattr(aborted, _IS_SHARED, True)
            raise aborted from error


ALONE = Ranks()
"""One process, or one of several that decides for itself."""


def find_ranks(together: Any = True) -> Ranks:
    """The ranks that fit a model together.

    Args:
        together: ``True`` for all processes of `torch.distributed`, if it is initialized; ``False`` for this one
            alone; or a process group.

    Raises:
        FitError: it is none of these, or this process is not in the group.
    """
    if together is None:  # which torch takes for all processes, and a reader for this one alone
        raise FitError(
            "together= is True for all ranks of torch.distributed, False for this rank alone, or a process group; got"
            " None."
        )
    if together is False or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return ALONE
    group = None if together is True else together
    size, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    if rank < 0:
        raise FitError("This process is not in the process group that together= names.")
    return Ranks(group, size=size, rank=rank)


def _packed(error: Exception) -> bytes:
    try:
        # Not the error itself: exceptions with keyword arguments cannot be unpickled.
        return pickle.dumps((type(error), error.args, vars(error)))
    except Exception:
        return pickle.dumps((RuntimeError, (f"{type(error).__name__}: {error}",), {}))


def _unpacked(packed: bytes) -> Exception:
    kind, args, attributes = pickle.loads(packed)
    error: Exception = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(attributes)
    setattr(error, _IS_SHARED, True)
    return error
