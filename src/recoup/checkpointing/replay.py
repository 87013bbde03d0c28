"""A second run of a function, which sets aside the saved tensors that are still wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from sys import getrefcount
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recoup.checkpointing import mismatch
from recoup.checkpointing.digest import digest
from recoup.checkpointing.mismatch import Record

if TYPE_CHECKING:
    from recoup.checkpointing.api import Checkpoint

__all__ = ["is_replaying", "pop_hooks", "push_hooks", "replay"]

# What torch.autograd.graph.saved_tensors_hooks calls; the context manager itself costs four times as much.
push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks


class _Depth(threading.local):
    value = 0


_depth = _Depth()


def is_replaying() -> bool:
    """Tells code that it runs a second time, inside a replay on this thread.

    Use it around side effects that must happen once per step, such as logging or counting.

    >>> is_replaying()
    False
    """
    return not torch.compiler.is_compiling() and _depth.value > 0


class _StopReplay(BaseException):
    """Leaves the function once nothing more is wanted. No Exception, so that functions do not swallow it."""


# What getrefcount gives through map for an object that only its list holds; it differs between Pythons.
_UNWANTED = next(map(getrefcount, [object()]))


def replay(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    options: Checkpoint,
    records: list[Record],
    digests: list[Tensor | None],
    complete: bool,
) -> tuple[dict[int, Tensor], dict[int, int]]:
    """Runs the function again until every saved tensor that is still wanted exists.

    Returns these tensors by position, and their version counters where these are not 0.

    Args:
        fn: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        options: whether to stop early and what to compare.
        records: what the forward noted of each tensor it saved.
        digests: their contents' digests, if the contents are compared.
        complete: whether the forward has ended; if not, the replay may well save more than it did so far.

    Raises:
        ReplayMismatchError: it saved other tensors than the forward.
    """
    values: dict[int, Tensor] = {}
    versions: dict[int, int] = {}
    wanted = [count > _UNWANTED for count in map(getrefcount, records)]
    num_records, num_saved = len(records), 0
    last = num_records - 1
    while not wanted[last]:
        last -= 1
    stop_at = last if options.early_stop else None
    check, check_values = options.check != "none", options.check == "values"

    # A closure: it runs for every saved tensor, and local variables are fast.
    def pack(tensor: Tensor) -> int | Tensor:
        nonlocal num_saved
        position = num_saved
        num_saved += 1
        if position >= num_records:
            return tensor.detach()
        if check and (position, tensor.shape, tensor.dtype, tensor.device) != records[position]:
            raise mismatch.saved_otherwise(fn, records[position], tensor, num_records)
        if check_values:
            _compare_content(fn, records[position], digests[position], tensor, num_records)
        if not wanted[position]:
            return tensor.detach()
        values[position] = tensor
        if version := tensor._version:
            versions[position] = version
        if position == stop_at:
            raise _StopReplay
        return position

    # Only for a function that runs a backward inside.
    def unpack(packed: int | Tensor) -> Tensor:
        return values[packed].detach() if isinstance(packed, int) else packed

    _depth.value += 1
    grad_mode = torch.is_grad_enabled()
    torch._C._set_grad_enabled(True)
    push_hooks(pack, unpack)
    try:
        fn(*args, **kwargs)
    except _StopReplay:
        pass
    finally:
        pop_hooks()
        torch._C._set_grad_enabled(grad_mode)
        _depth.value -= 1
    if last not in values:
        missing = next(position for position in range(num_records) if wanted[position] and position not in values)
        raise mismatch.saved_too_few(fn, records[missing], num_records, num_saved)
    if check and complete and num_saved > num_records:
        raise mismatch.saved_too_many(fn, num_records, num_saved)
    # NOTE [ How a frame works ], 7: the tensors hold the replay's graph, which holds the hooks, which must let go.
    result, values = values, {}
    return result, versions


def _compare_content(
    fn: Callable[..., Any], record: Record, then: Tensor | None, tensor: Tensor, num_saved: int
) -> None:
    now = digest(tensor)
    if then is not None and now is not None and not torch.equal(then, now):
        raise mismatch.values_drifted(fn, record, num_saved)

