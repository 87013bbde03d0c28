"""A second run of a function, which keeps the saved tensors that are still wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from sys import getrefcount, maxsize
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from recoup.checkpointing import mismatch
from recoup.checkpointing.environment import WRITABLE, read_settings, write_settings
from recoup.checkpointing.mismatch import Record, kind_of
from recoup.torch_private import pop_saved_tensor_hooks, push_saved_tensor_hooks, set_grad_enabled

if TYPE_CHECKING:
    from recoup.checkpointing.comparison import Compare
    from recoup.checkpointing.frame import Frame

__all__ = [
    "AS_FAR_AS_NEEDED",
    "OUTPUTS_ONLY",
    "TO_END",
    "Manner",
    "Replayed",
    "depth",
    "is_any_wanted",
    "is_replaying",
    "replay",
    "run_for_output",
]

_get_seed = torch.default_generator.initial_seed


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


def depth() -> int:
    """How many replays on this thread are under way, one inside the other."""
    return _depth.value


class Manner(NamedTuple):
    """How to run a function again."""

    carefully: bool = False
    """Compare each tensor while the operation that saves it runs."""
    to_end: bool = False
    """Do not stop early: the output is needed."""
    outputs_only: bool = False
    """Keep nothing but the output."""


AS_FAR_AS_NEEDED = Manner()
TO_END = Manner(to_end=True)
OUTPUTS_ONLY = Manner(to_end=True, outputs_only=True)

Replayed: TypeAlias = tuple[dict[int, Tensor], dict[int, int], Any]
"""The wanted tensors by position, their version counters where these are not 0, and the output, if it got there."""


class _StopReplay(BaseException):
    """Leaves the function once nothing more is wanted. No Exception, so that functions do not swallow it."""


# What getrefcount gives through map for an object that only its list holds; it differs between Pythons.
_UNWANTED = next(map(getrefcount, [object()]))


def is_any_wanted(records: list[Record]) -> bool:
    """Whether someone besides their list refers to any of the records."""
    return any(count > _UNWANTED for count in map(getrefcount, records))


def replay(
    frame: Frame, args: Sequence[Any], kwargs: dict[str, Any], manner: Manner, compare: Compare | None
) -> Replayed:
    """Runs a frame's function again until every saved tensor that is still wanted exists.

    ``compare`` is called with each tensor that the forward saved too, while the operation that saves it runs.

    Raises:
        ReplayMismatchError: it saved other tensors than the forward.
    """
    fn, records, options = frame.fn, frame.records, frame.options
    replayed, num_saved = run_with_hooks(frame, args, kwargs, compare, manner.to_end)
    if options.check == "none":
        return replayed
    # All at once, after the run: in the hook, between operations, the same costs twice as much.
    values = replayed[0]
    if list(map(kind_of, values.values())) != [records[position][1] for position in values]:
        wrong = next(p for p, tensor in values.items() if kind_of(tensor) != records[p][1])
        raise mismatch.saved_otherwise(fn, records, wrong, values[wrong])
    # Before the forward has ended, the replay may well save more than it did so far.
    if num_saved > len(records) and frame.is_settled and not options.early_stop:
        raise mismatch.saved_too_many(fn, len(records), num_saved)
    return replayed


def run_with_hooks(
    frame: Frame, args: Sequence[Any], kwargs: dict[str, Any], compare: Compare | None, to_end: bool
) -> tuple[Replayed, int]:
    """Runs the function and keeps what it saves and is wanted; also returns how much it saved in all."""
    fn, records, leaves, options = frame.fn, frame.records, frame.leaves, frame.options
    values: dict[int, Tensor] = {}
    versions: dict[int, int] = {}
    output: Any = None
    wanted = [count > _UNWANTED for count in map(getrefcount, records)]
    num_records, num_saved = len(records), 0
    last = num_records - 1
    while last >= 0 and not wanted[last]:
        last -= 1
    stop_at = last if options.early_stop and not to_end else None
    settings: Any = read_settings()[WRITABLE]
    seed, is_changed, has_ended = _get_seed(), True, False
    check = options.check != "none"

    # A closure: it runs for every saved tensor, and local variables are fast.
    def pack(tensor: Tensor) -> int | Tensor:
        nonlocal num_saved
        position = num_saved
        num_saved = position + 1
        if position < num_records and wanted[position]:
            values[position] = tensor
            if version := tensor._version:
                versions[position] = version
            # Not while the function has a setting changed that it will put back itself, other than by a context.
            if position == stop_at and read_settings()[WRITABLE] == settings and _get_seed() == seed:
                raise _StopReplay
            return position
        if check and position in leaves:
            owner = tensor if tensor.is_leaf else tensor._base
            if owner is not leaves[position] and isinstance(owner, Parameter):
                raise mismatch.other_parameter(fn, records, position)
        return tensor.detach()

    def pack_carefully(tensor: Tensor) -> int | Tensor:
        nonlocal num_saved
        if compare is not None and num_saved < num_records:
            num_saved += 1  # if this raises, the replay has come as far as this tensor
            compare(num_saved - 1, tensor)
            num_saved -= 1
        return pack(tensor)

    # Only for a function that runs a backward inside.
    def unpack(packed: int | Tensor) -> Tensor:
        return values[packed].detach() if isinstance(packed, int) else packed

    handing = frame.handing()
    grad_mode = _begin(pack if compare is None else pack_carefully, unpack)
    try:
        output = frame.run_again(args, kwargs, handing)
        has_ended = True
        is_changed = read_settings()[WRITABLE] != settings
    except _StopReplay:
        is_changed = False
    except BaseException as error:
        # TorchScript, or the function itself, may have turned the stop into an exception of its own.
        if stop_at not in values or not isinstance(error, Exception):
            values.clear()
            if handing is not None:
                handing.refuse_unclear(num_saved)  # the cause of what happened here
            raise
    finally:
        _end(grad_mode)
        if is_changed:
            write_settings(settings)
    # NOTE [ How a frame works ], 7: the tensors hold the replay's graph, which holds the hooks: these must drop them.
    result, values = values, {}
    if handing is not None:
        handing.refuse_unclear(maxsize if has_ended else num_saved)
    if last >= 0 and last not in result:
        missing = next(position for position, want in enumerate(wanted) if want and position not in result)
        raise mismatch.saved_too_few(fn, records, missing, num_saved)
    return (result, versions, output), num_saved


def run_for_output(frame: Frame, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs the function for its output alone."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        # A backward inside the function reads what it saves.
        saved.append(tensor.detach())
        return len(saved) - 1

    def refuse(_: None) -> Tensor:
        raise mismatch.ran_backward(frame.fn)

    hooks = (pack, saved.__getitem__) if frame.runs_backward else (_drop, refuse)
    grad_mode = _begin(*hooks)
    handing = frame.handing()
    try:
        output = frame.run_again(args, kwargs, handing)
    finally:
        _end(grad_mode)
        saved.clear()
    if handing is not None:
        handing.refuse_unclear(maxsize)
    return output


def _drop(tensor: Tensor) -> None:
    return None


def _begin(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> bool:
    """Begins a replay, with these hooks on what autograd saves; returns the grad mode around it."""
    _depth.value += 1
    grad_mode = torch.is_grad_enabled()
    set_grad_enabled(True)
    push_saved_tensor_hooks(pack, unpack)
    return grad_mode


def _end(grad_mode: bool) -> None:
    pop_saved_tensor_hooks()
    set_grad_enabled(grad_mode)
    _depth.value -= 1
