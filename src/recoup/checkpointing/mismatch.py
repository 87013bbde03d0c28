"""The words for what went wrong in a replay: which function, which module, which tensor, and what to do."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module

from recoup.errors import InputChangedError, ReplayMismatchError

__all__ = [
    "Decision",
    "Kind",
    "Record",
    "changed_argument",
    "changed_saved",
    "changed_state",
    "decided_less",
    "decided_otherwise",
    "describe_function",
    "describe_shape",
    "kind_of",
    "other_parameter",
    "raised_in_replay",
    "ran_backward",
    "returned_drifted",
    "returned_otherwise",
    "saved_otherwise",
    "saved_too_few",
    "saved_too_many",
    "values_drifted",
]

Decision: TypeAlias = tuple[str, tuple[torch.Size, ...]]
"""An operation, and the shapes of the tensors that it was given."""
Kind: TypeAlias = tuple[torch.Size, torch.dtype, torch.device]
Record: TypeAlias = tuple[int, Kind]
"""What the forward notes of a saved tensor: its position among all of its segment, and its kind."""

kind_of: Callable[[Tensor], Kind] = attrgetter("shape", "dtype", "device")

_REPLAY = "run_with_hooks"
"""The function of replay.py below which the user's own frames lie."""
_CALLS = ("__call__", "_call_impl", "_wrapped_call_impl", "forward")

_CAUSES = """\
Likely causes:
  - the function depends on something outside its arguments: Python or NumPy random numbers, a global, a cache;
  - its control flow depends on values that differ in the last bit between two runs (routing in a mixture of experts):
    decisions are kept unless that is switched off or they are large, and recoup.keep keeps any tensor;
  - a mode or setting changed between forward and backward;
  - a call before it, whose result it is given, does not repeat itself.
What to do: pass what the function depends on as an argument, branch on recoup.is_replaying() where it has a side
effect, or leave this function out of checkpointing."""


def describe_function(fn: Any) -> str:
    """Names a callable and where it is defined: ``Block.forward (model.py:31)``."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if isinstance(fn, Module):
        return f"module {type(fn).__name__}{_place(fn.forward)}"
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, Module):
        if fn.__name__ in _CALLS:
            return describe_function(owner)
        return f"{type(owner).__name__}.{fn.__name__}{_place(fn)}"
    name = getattr(fn, "__qualname__", type(fn).__qualname__).replace("<locals>.", "")
    return f"{name}{_place(fn)}"


def changed_argument(fn: Any, path: str, *, by_function: bool) -> InputChangedError:
    """An argument was changed in place before the replay."""
    who = "by the function itself" if by_function else "between its forward and its backward"
    fix = (
        "Let the function work on a copy (x = x.clone()) or use an operation that is not in place."
        if by_function
        else "Change it after the backward, or pass a copy (x.clone()) to the checkpointed call."
    )
    return InputChangedError(
        f"{describe_function(fn)}: argument {path} was changed in place {who}. A replay from the changed"
        f" value would give wrong gradients. {fix}"
    )


def changed_state(fn: Any, name: str, *, by_function: bool) -> InputChangedError:
    """A parameter, buffer or captured tensor was changed in place before the replay, which reads it."""
    if by_function:
        return InputChangedError(
            f"{describe_function(fn)}: {name} was changed in place by the function itself, so its replay would start"
            " from the changed value and change it again. Make it a buffer of a module, or leave the change out of"
            " the checkpointed function."
        )
    return InputChangedError(
        f"{describe_function(fn)}: {name} was changed in place between forward and backward, for example by an"
        " optimizer step. A replay with the changed value would give wrong gradients. Run the backward before"
        " the step, or make the change after it."
    )


def changed_saved(fn: Any, what: str) -> InputChangedError:
    """A tensor that the backward needs was changed in place after it was saved."""
    return InputChangedError(
        f"{describe_function(fn)}: {what} is needed for the backward but was changed in place after it was saved."
        " The plain function would fail too. Replace the in-place operation, or clone the tensor before it."
    )


def saved_otherwise(fn: Any, records: list[Record], position: int, tensor: Tensor) -> ReplayMismatchError:
    """The replay saved a tensor of another kind at a position."""
    return _not_repeated(
        fn,
        f"Saved tensor {position + 1} of {len(records)} was {_describe(records[position][1])} in the forward and is"
        f" {_describe(kind_of(tensor))} in the replay{_operation()}.",
    )


def saved_too_few(fn: Any, records: list[Record], position: int, num_replayed: int) -> ReplayMismatchError:
    """The replay ended before it saved a tensor that the backward needs."""
    return _not_repeated(
        fn,
        f"The forward saved {len(records)} tensors, the replay only {num_replayed}; tensor {position + 1},"
        f" {_describe(records[position][1])}, is missing.",
    )


def saved_too_many(fn: Any, num_saved: int, num_replayed: int) -> ReplayMismatchError:
    """The replay, run to its end, saved more tensors than the forward."""
    return _not_repeated(fn, f"The forward saved {num_saved} tensors, the replay {num_replayed}.")


def other_parameter(fn: Any, records: list[Record], position: int) -> ReplayMismatchError:
    """The replay used another parameter than the forward."""
    return _not_repeated(
        fn,
        f"{_saved(records, position)} is another parameter than in the forward{_operation()}: a choice between modules"
        " fell differently.",
    )


def values_drifted(fn: Any, records: list[Record], position: int) -> ReplayMismatchError:
    """The replay saved a tensor of the right kind with other content."""
    return _not_repeated(
        fn,
        f"{_saved(records, position)} has other values than in the forward{_operation()}.",
        "\nOperations that are not deterministic on this device show up too: torch.use_deterministic_algorithms(True).",
    )


def returned_otherwise(fn: Any, place: int, kind: Kind, tensor: Tensor | None) -> ReplayMismatchError:
    """The replay of a call returned, for a later call of its span, a tensor of another kind or none."""
    now = "missing" if tensor is None else _describe(kind_of(tensor))
    return _not_repeated(
        fn,
        f"Returned tensor {place + 1}, which a later call of the span reads, was {_describe(kind)} in the forward"
        f" and is {now} in the replay.",
    )


def returned_drifted(fn: Any, place: int, kind: Kind) -> ReplayMismatchError:
    """The replay of a call returned, for a later call of its span, a tensor with other content."""
    return _not_repeated(
        fn,
        f"Returned tensor {place + 1}, {_describe(kind)}, which a later call of the span reads, has other values than"
        " in the forward.",
    )


def decided_otherwise(fn: Any, number: int, then: Decision | None, now: Decision) -> ReplayMismatchError:
    """The replay makes another decision, or keeps another tensor, than the forward did in this place."""
    was = (
        "the forward made none there" if then is None else f"it was {_describe_decision(then)} in the forward"
    )
    return _not_repeated(
        fn,
        f"Decision {number + 1} is {_describe_decision(now)} in the replay{_operation()}; {was}: control flow fell"
        " differently.",
    )


def decided_less(fn: Any, decision: Decision, num_then: int, num_now: int) -> ReplayMismatchError:
    """The replay makes only some of several decisions that look the same."""
    return _not_repeated(
        fn,
        f"The forward made {num_then} decisions {_describe_decision(decision)}, the replay only {num_now}, and nothing"
        " tells which: the forward has filled a cache, or logged what the replay does not. Fill a cache before, or keep"
        " it in an attribute of the module, which the replay sees as it was; log outside of the function, or in replays"
        " too; Checkpoint(keep_decisions=False) computes decisions anew.",
    )


def ran_backward(fn: Any) -> ReplayMismatchError:
    """The replay runs a backward inside, where the forward ran none."""
    return _not_repeated(fn, "It runs a backward inside, and the forward ran none.")


def _not_repeated(fn: Any, what: str, more: str = "") -> ReplayMismatchError:
    return ReplayMismatchError(
        f"{describe_function(fn)}: the replay does not repeat the forward. {what}\n{_CAUSES}{more}"
    )


def raised_in_replay(fn: Any) -> str:
    """A note for an exception in a replay, where the forward raised none."""
    return f"{describe_function(fn)} raised this in its replay, in the backward, and not in its forward. {_CAUSES}"


def _saved(records: list[Record], position: int) -> str:
    return f"Saved tensor {position + 1} of {len(records)}, {_describe(records[position][1])},"


def _describe(kind: Kind) -> str:
    return f"{describe_shape(kind)} on {kind[2]}"


def describe_shape(kind: Kind) -> str:
    """A tensor's dtype and shape."""
    return f"{str(kind[1]).removeprefix('torch.')}{list(kind[0])}"


def _describe_decision(decision: Decision) -> str:
    operation, shapes = decision
    return f"{operation} of {', '.join(str(list(shape)) for shape in shapes)}" if shapes else operation


def _place(fn: Any) -> str:
    code = getattr(inspect.unwrap(fn) if callable(fn) else fn, "__code__", None)
    return "" if code is None else f" ({Path(code.co_filename).name}:{code.co_firstlineno})"


def _operation() -> str:
    """Says where the running operation of a replay stands: the user's line, and the innermost module around it."""
    frame: FrameType | None = sys._getframe(2)
    line = ""
    modules: list[Module] = []
    while frame is not None and frame.f_code.co_name != _REPLAY:
        if not line and not _is_internal(frame):
            line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        owner = frame.f_locals.get("self")
        if isinstance(owner, Module) and (not modules or modules[-1] is not owner):
            modules.append(owner)
        frame = frame.f_back
    if frame is None:  # no operation is running
        return ""
    inside = f", in {_qualified(modules)}" if modules else ""
    return f" (at {line}{inside})" if line else inside


def _qualified(modules: list[Module]) -> str:
    inner, outer = modules[0], modules[-1]
    for name, module in outer.named_modules():
        if module is inner and name:
            return f"{type(inner).__name__} {name!r} of {type(outer).__name__}"
    return type(inner).__name__


def _is_internal(frame: FrameType) -> bool:
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    return package in ("torch", "recoup")
