"""Results that a replay is given instead of computing them anew: decisions, and what the user keeps by hand.

NOTE [ Decisions are kept, values are recomputed ]

1. A decision is a result of integers or booleans, or a Python number, of an operation that reads floating-point values:
   top-k indices, a comparison, `item`. In the last bit values may differ between two runs. A decision may then fall
   differently, and everything behind it with it: tokens go to other experts. So the forward keeps its decisions, and
   the replay is given them. What follows from decisions alone (counts, one-hot masks, `nonzero` of a mask) is
   computed anew, from the same integers.
2. Operations that select return values beside the indices. Their replay takes the values at the kept
   indices, from its own input: they are those of the forward if the inputs are, and gradients go where the forward's
   choice was.
3. Decisions are recognised by a dispatch mode, which costs microseconds for each operation. It is on for the first
   eight calls of a call site, the 16th, 32nd, …, and finds out which operations decide there. In all other calls
   torch's dispatcher intercepts these operations, and others cost nothing (benchmarks/host_costs.py). The mode is on
   inside those whose results may need a gradient: values beside their indices, and what the user keeps.
4. What is kept is numbered. The replay must decide in the same order, by the same operations on the same shapes; it may
   leave some out, which a cache has by now. Of those with the same operation and shapes it must make all or none: if it
   makes some, nothing tells which, and that is an error. Decisions behind the tensor that a replay stops at do not
   count: for each decision it is noted how many tensors were saved before it.
5. A decision that is larger than its share of the call's arguments is a mask over values rather than a choice. It
   is numbered but not kept, and the replay computes it anew.
6. Copies are kept, and copies are handed out: functions may change in place what they get.
7. Not decisions: views, results in place, tensors that take only a shape from what they are given, and integers beside
   floating-point results (indices of pooling, masks of dropout, seeds of attention).
8. A call inside a call has a region of its own. `keep` goes from the outermost region to the innermost, as a result
   goes back through modes: a replay's value counts for all regions inside it. A replay sees no region around it: a
   backward inside a function may run on another thread than the function.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from recoup.checkpointing import mismatch
from recoup.checkpointing.deciding_operations import (
    ALWAYS_KEPT_BYTES,
    KEEP,
    SHARE,
    decides,
    may_select,
    selects,
    values_at,
)
from recoup.checkpointing.guard import is_unguarded
from recoup.checkpointing.mismatch import Decision
from recoup.tensors import each_tensor
from recoup.torch_private import (
    OpOverload,
    WatchingMode,
    current_transform,
    intercept,
    intercepting,
    is_inside_kernel,
    local_scalar,
    tracing_context,
)

__all__ = [
    "ALL",
    "NONE",
    "Handing",
    "Kept",
    "Operations",
    "Recording",
    "Region",
    "intercept_all",
    "most_bytes_of",
    "regions",
    "run_in",
]

Decided: TypeAlias = "Tensor | bool | int | float"
Operations: TypeAlias = frozenset[Any]
"""Operations of torch, as a dispatch mode is shown them."""


class _All(Operations):
    def __contains__(self, operation: object) -> bool:
        return True


ALL: Operations = _All(["all"])
"""Stands for every operation."""
NONE: Operations = frozenset()
Run: TypeAlias = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class Kept(NamedTuple):
    """One result that a forward keeps for its replay.

    Attributes:
        operation: its name, ``keep`` for what the user keeps.
        shapes: of the tensors that the operation was given.
        value: a copy of the result, of a selection the indices; None if it is too large to be kept.
        num_saved: how many tensors autograd had saved before.
    """

    operation: str
    shapes: tuple[torch.Size, ...]
    value: Decided | None
    num_saved: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes."""
        return self.value.nbytes if isinstance(self.value, Tensor) else 0

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.operation} too large"
        if not isinstance(self.value, Tensor):
            return f"{self.operation} {self.value}"
        return f"{self.operation} {str(self.value.dtype).removeprefix('torch.')}{list(self.value.shape)}"


class Region(ABC):
    """A call that is recorded or replayed, as `keep` and the dispatch mode see it.

    Attributes:
        kept: what a replay is given instead of computing it anew.
        watched: the operations that are shown to it.
    """

    __slots__ = ("kept", "watched")
    kept: list[Kept]
    watched: Operations
    is_inside = True
    """Whether it belongs to the regions around it."""

    @abstractmethod
    def decide(self, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operation, which ``run`` runs in the regions around this one."""

    @abstractmethod
    def keep(self, tensor: Tensor, value: Tensor | None) -> Tensor:
        """The value that is kept for a tensor, if regions around this one have ``value`` for it."""


class Recording(Region):
    """A forward: what it decides is kept.

    Attributes:
        most_bytes: decisions up to this size are kept.
        deciding: the operations that have decided.
    """

    __slots__ = ("deciding", "most_bytes")

    def __init__(self, most_bytes: int, watched: Operations) -> None:
        self.kept, self.most_bytes, self.watched, self.deciding = [], most_bytes, watched, NONE

    def decide(self, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation, and keeps its result if that is a decision."""
        result = run(func, args, kwargs)
        if type(result) is Tensor and result.dtype.is_floating_point and func is not KEEP:
            return result
        if decides(func, given := _given(args, kwargs), result):
            decided = result[1] if isinstance(result, tuple) else result
            is_small = not isinstance(decided, Tensor) or decided.nbytes <= self.most_bytes or func is KEEP
            self.deciding |= {func}
            value = _copied(decided) if is_small else None
            self.add(Kept(*_decision(func, given), value, self.num_saved()))
        return result

    def keep(self, tensor: Tensor, value: Tensor | None) -> Tensor:
        """Keeps a copy, unless a region around has one."""
        value = tensor.detach().clone() if value is None else value
        self.add(Kept("keep", (tensor.shape,), value, self.num_saved()))
        return value

    def num_saved(self) -> int:
        """How many tensors autograd has saved so far, if someone replays the call."""
        return 0

    def add(self, kept: Kept) -> None:
        """Notes what is kept."""
        self.kept.append(kept)


class Handing(Region):
    """A replay: it is given what the forward kept, one after the other.

    Args:
        fn: what is replayed.
        kept: by the forward.
        watched: in the forward.
        may_go_on: whether the replay may run further than the forward has come.
    """

    __slots__ = ("_fn", "_may_go_on", "_next", "_taken")
    is_inside = False

    def __init__(self, fn: Any, kept: list[Kept], watched: Operations, *, may_go_on: bool) -> None:
        self.kept, self.watched, self._fn, self._may_go_on, self._next = kept, watched, fn, may_go_on, 0
        self._taken: list[Decision] = []

    def decide(self, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation, unless it selects; its result is the forward's if that is a decision."""
        given = _given(args, kwargs)
        if selects(func, given[0] if given else None):
            then = self._take(_decision(func, given))
            return run(func, args, kwargs) if then is None else (values_at(then, func, args, kwargs), then)
        result = run(func, args, kwargs)
        if type(result) is Tensor and result.dtype.is_floating_point and func is not KEEP:
            return result
        if not decides(func, given, result):
            return result
        then = self._take(_decision(func, given))
        return result if then is None else then

    def keep(self, tensor: Tensor, value: Tensor | None) -> Tensor:
        """The forward's value."""
        then: Tensor | None = self._take(("keep", (tensor.shape,)))
        if then is not None:
            return then
        return tensor.detach() if value is None else value

    def _take(self, now: Decision) -> Any:
        """A copy of what the forward kept in this place; None if it kept nothing."""
        number = self._next
        then = self.kept[number] if number < len(self.kept) else None
        if then is None and self._may_go_on:
            return None
        # What the forward alone has done, such as filling a cache, is passed over.
        alike = (index for index in range(number, len(self.kept)) if self.kept[index][:2] == now)
        found = next(alike, None)
        if found is None:
            raise mismatch.decided_otherwise(self._fn, number, None if then is None else then[:2], now)
        self._next = found + 1
        self._taken.append(now)
        value = self.kept[found].value
        return None if value is None else _copied(value)

    def refuse_unclear(self, num_saved: int) -> None:
        """Raises if it cannot be told which decisions the replay was given, since it has left some out.

        Args:
            num_saved: how many tensors the replay has saved; it has come to all decisions before the last of these.
        """
        num_met = bisect_left(self.kept, num_saved, key=lambda kept: kept.num_saved)
        if len(self._taken) >= num_met:
            return
        made = Counter(kept[:2] for kept in self.kept[:num_met] if kept.value is not None)
        for kind, num_taken in Counter(self._taken).items():
            if num_taken < made[kind]:
                raise mismatch.decided_less(self._fn, kind, made[kind], num_taken)


class _Here(threading.local):
    """The regions that this thread is in, and whether an operation is being shown to them."""

    regions: tuple[Region, ...] = ()
    is_showing = False


_here = _Here()


def regions() -> tuple[Region, ...]:
    """The regions that this thread is in, from the outermost to the innermost."""
    return _here.regions


class _Watch(WatchingMode):
    """Shows operations to the regions that watch them."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs an operation as the regions do."""
        return _show(_watching(func), func, args, kwargs or {})


def _watching(operation: Any) -> list[Region]:
    return [region for region in _here.regions if operation in region.watched]


def _run_in_each(around: list[Region], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operation in regions, so that its result goes from the outermost to the innermost."""
    if not around:
        return func(*args, **kwargs)
    return around[-1].decide(partial(_run_in_each, around[:-1]), func, args, kwargs)


def intercept_all(operations: Operations) -> None:
    """Has torch's dispatcher intercept operations, where a region watches these alone."""
    for operation in operations:
        intercept(operation, partial(_run_watched, operation))


def _run_watched(operation: Any, *args: Any, **kwargs: Any) -> Any:
    # A dispatch mode is not shown what a kernel of another operation runs: nor is a region here.
    if is_inside_kernel() or tracing_context() or not (around := _watching(operation)):
        return operation(*args, **kwargs)
    # Below autograd, where a result needs a gradient, and below transforms, whose tensors have other sizes.
    if operation is KEEP or may_select(operation) or current_transform() is not None:
        with _Watch():  # type: ignore[no-untyped-call]
            return operation(*args, **kwargs)
    return _show(around, operation, args, kwargs)


def _show(around: list[Region], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operation as the regions do.

    Not if recoup itself makes a copy, if the operation runs functions, or if it is shown already, as by another mode.
    """
    if is_unguarded() or _here.is_showing or not isinstance(func, OpOverload):
        return func(*args, **kwargs)
    _here.is_showing = True
    try:
        return _run_in_each(around, func, args, kwargs)
    finally:
        _here.is_showing = False


def run_in(region: Region, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs a function in a region, which is shown the operations that it watches."""
    before, was_showing = _here.regions, _here.is_showing
    _here.regions = (*before, region) if region.is_inside else (region,)
    _here.is_showing = (
        was_showing and region.is_inside
    )  # a replay may run in a kernel of an operation that is shown
    try:
        if not region.watched:
            return fn(*args, **kwargs)
        with _Watch() if region.watched is ALL else intercepting():  # type: ignore[no-untyped-call]
            return fn(*args, **kwargs)
    finally:
        _here.regions, _here.is_showing = before, was_showing


def most_bytes_of(arguments: Any) -> int:
    """Bytes up to which a decision of a call with these arguments is kept."""
    strided = (tensor for tensor in each_tensor(arguments) if tensor.layout is torch.strided)
    return max(ALWAYS_KEPT_BYTES, sum(tensor.nbytes for tensor in strided) // SHARE)


def _decision(func: Any, given: list[Tensor]) -> Decision:
    name = "item" if func is local_scalar else func.overloadpacket.__name__
    return name, tuple(tensor.shape for tensor in given if not tensor.is_nested)


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, Tensor)]
    return found


def _copied(value: Decided) -> Decided:
    return value.clone() if isinstance(value, Tensor) else value
