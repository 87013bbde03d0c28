"""Results that a replay is given instead of computing them anew: decisions, and what the user keeps by hand.

NOTE [ Decisions are kept, values are recomputed ]

1. A decision is a result of integers or booleans, or a Python number, of an operation that reads floating-point values:
   top-k indices, a comparison, `item`. In the last bit values may differ between two runs. A decision may then fall
   differently, and everything behind it with it: tokens go to other experts. So the forward keeps its decisions, and
   the replay is given them. What follows from decisions alone (counts, one-hot masks, `nonzero` of a mask) is
   computed anew, from the same integers.
2. Operations that select (`SELECTING`) return values beside the indices. Their replay takes the values at the kept
   indices, from its own input: they are those of the forward if the inputs are, and gradients go where the forward's
   choice was.
3. Decisions are recognised by a dispatch mode, which costs about 6 µs for each operation. It is on for the first call
   of a call site and for those that are compared by content; for all of its calls once it has found a decision there.
4. What is kept is numbered. The replay must decide in the same order, by the same operations on the same shapes.
5. A decision that is larger than its share of the call's arguments is a mask over values rather than a choice. It
   is numbered but not kept, and the replay computes it anew.
6. Copies are kept, and copies are handed out: functions may change in place what they get.
7. Not decisions: views, results in place, tensors that take only a shape from what they are given, and integers beside
   floating-point results (indices of pooling, masks of dropout, seeds of attention).
8. A call inside a call has a region of its own. `keep` goes from the outermost region to the innermost, as an operation
   goes through modes from the innermost to the outermost and back: a replay's value counts for all regions inside it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from recoup.checkpointing.guard import is_unguarded
from recoup.tensors import each_tensor
from recoup.torch_private import WatchingMode, local_scalar

__all__ = ["Handing", "Kept", "Recording", "Region", "most_bytes_of", "regions", "run_in"]

_ALWAYS_KEPT_BYTES = 1 << 16
_SHARE = 16
"""A decision may have this part of the bytes of a call's arguments."""

_aten = torch.ops.aten
_SELECTING = frozenset(
    {_aten.topk, _aten.sort, _aten.max, _aten.min, _aten.median, _aten.nanmedian, _aten.mode, _aten.kthvalue}
)
"""They return values and their indices along one dimension."""
_SHAPED_ALIKE = frozenset(
    {_aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.new_empty, _aten.new_zeros}
    | {_aten.new_ones, _aten.new_full, _aten.new_empty_strided}
)

Decided: TypeAlias = "Tensor | bool | int | float"


class Kept(NamedTuple):
    """One result that a forward keeps for its replay.

    Attributes:
        operation: its name, ``keep`` for what the user keeps.
        shapes: of the tensors that the operation was given.
        value: a copy of the result, of a selection the indices; None if it is too large to be kept.
    """

    operation: str
    shapes: tuple[torch.Size, ...]
    value: Decided | None

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


class Region:
    """A call that is recorded or replayed, as `keep` and the dispatch mode see it."""

    __slots__ = ("kept",)
    kept: list[Kept]

    def decide(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation."""
        raise NotImplementedError

    def keep(self, tensor: Tensor, value: Tensor | None) -> Tensor:
        """The value that is kept for a tensor, if regions around this one have ``value`` for it."""
        raise NotImplementedError


class Recording(Region):
    """A forward: what it decides is kept."""

    __slots__ = ("most_bytes", "num_decisions")

    def __init__(self, kept: list[Kept], most_bytes: int) -> None:
        self.kept, self.most_bytes, self.num_decisions = kept, most_bytes, 0

    def decide(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation, and keeps its result if that is a decision."""
        result = func(*args, **kwargs)
        if type(result) is Tensor and result.dtype.is_floating_point:
            return result
        if _is_decision(func, args, kwargs, result):
            decided = result[1] if isinstance(result, tuple) else result
            is_small = not isinstance(decided, Tensor) or decided.nbytes <= self.most_bytes
            self.num_decisions += 1
            self.add(_described(func, args, kwargs, _copied(decided) if is_small else None))
        return result

    def keep(self, tensor: Tensor, value: Tensor | None) -> Tensor:
        """Keeps a copy, unless a region around has one."""
        value = tensor.detach().clone() if value is None else value
        self.add(Kept("keep", (tensor.shape,), value))
        return value

    def add(self, kept: Kept) -> None:
        """Notes what is kept."""
        self.kept.append(kept)


class Handing(Region):
    """A replay: it is given what the forward kept, one after the other.

    Args:
        kept: by the forward.
        refuse: makes the error for a result that the forward did not keep in this place: number, then and now.
        may_go_on: whether the replay may run further than the forward has come.
    """

    __slots__ = ("_may_go_on", "_next", "_refuse")

    def __init__(
        self, kept: list[Kept], refuse: Callable[[int, Kept | None, Kept], Exception], *, may_go_on: bool
    ) -> None:
        self.kept, self._refuse, self._may_go_on, self._next = kept, refuse, may_go_on, 0

    def decide(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation, unless it selects; its result is the forward's if that is a decision."""
        if func.overloadpacket in _SELECTING and _selects(func, args):
            then = self._take(_described(func, args, kwargs, None))
            if isinstance(then, Tensor):
                return _values_at(then, func, args, kwargs), then
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if type(result) is Tensor and result.dtype.is_floating_point:
            return result
        if not _is_decision(func, args, kwargs, result):
            return result
        then = self._take(_described(func, args, kwargs, None))
        return result if then is None else then

    def keep(self, tensor: Tensor, value: Tensor | None) -> Tensor:
        """The forward's value."""
        then = self._take(Kept("keep", (tensor.shape,), None))
        if isinstance(then, Tensor):
            return then
        return tensor.detach() if value is None else value

    def _take(self, now: Kept) -> Decided | None:
        """A copy of what the forward kept in this place; None if it kept nothing."""
        number = self._next
        self._next += 1
        then = self.kept[number] if number < len(self.kept) else None
        if then is None and self._may_go_on:
            return None
        if then is None or then[:2] != now[:2]:
            raise self._refuse(number, then, now)
        return None if then.value is None else _copied(then.value)


class _Watch(WatchingMode):
    """Shows every operation to a region."""

    def __init__(self, region: Region) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._region = region

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs the operation as the region does, unless recoup itself makes a copy."""
        if is_unguarded():
            return func(*args, **(kwargs or {}))
        return self._region.decide(func, args, kwargs or {})


class _Regions(threading.local):
    def __init__(self) -> None:
        self.stack: list[Region] = []


_regions = _Regions()


def regions() -> list[Region]:
    """The regions that this thread is in, from the outermost to the innermost."""
    return _regions.stack


def run_in(
    region: Region, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], *, watches: bool
) -> Any:
    """Runs a function in a region, which sees its operations only if it ``watches``."""
    stack = _regions.stack
    stack.append(region)
    try:
        if not watches:
            return fn(*args, **kwargs)
        with _Watch(region):
            return fn(*args, **kwargs)
    finally:
        stack.pop()


def most_bytes_of(arguments: Any) -> int:
    """Bytes up to which a decision of a call with these arguments is kept."""
    return max(_ALWAYS_KEPT_BYTES, sum(tensor.nbytes for tensor in each_tensor(arguments)) // _SHARE)


def _is_decision(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
    if isinstance(result, tuple):
        return func.overloadpacket in _SELECTING and _selects(func, args)
    if isinstance(result, Tensor):
        decides = not result.dtype.is_floating_point and not result.dtype.is_complex and _may_decide(func)
    else:
        decides = type(result) in (bool, int, float)
    return decides and any(map(_has_values, _given(args, kwargs)))


def _selects(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation of `_SELECTING` returns indices, and selects among floating-point values."""
    return _index_of_dim(func) is not None and _has_values(args[0])


@cache
def _may_decide(func: Any) -> bool:
    return not (func.is_view or func._schema.is_mutable or func.overloadpacket in _SHAPED_ALIKE)


@cache
def _index_of_dim(func: Any) -> int | None:
    """The place of ``dim`` among an operation's arguments, if it returns values and indices."""
    if len(func._schema.returns) != 2 or func._schema.is_mutable:
        return None
    return next((place for place, one in enumerate(func._schema.arguments) if one.name == "dim"), None)


def _values_at(indices: Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The values of an operation's input at indices along its dimension."""
    tensor: Tensor = args[0]
    if tensor.dim() == 0:
        return tensor.clone()
    place = _index_of_dim(func)
    assert place is not None
    dim = args[place] if place < len(args) else kwargs.get("dim", func._schema.arguments[place].default_value)
    if indices.dim() == tensor.dim():
        return tensor.gather(dim, indices)
    return tensor.gather(dim, indices.unsqueeze(dim)).squeeze(dim)


def _described(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Decided | None) -> Kept:
    shapes = tuple(tensor.shape for tensor in _given(args, kwargs))
    return Kept("item" if func is local_scalar else func.overloadpacket.__name__, shapes, value)


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Tensor]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, Tensor))


def _has_values(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _copied(value: Decided) -> Decided:
    return value.clone() if isinstance(value, Tensor) else value
