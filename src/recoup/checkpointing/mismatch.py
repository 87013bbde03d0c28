"""The words for what went wrong in a replay: which function, which module, which tensor, and what to do."""

from __future__ import annotations

import functools
import inspect
import sys
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module

from recoup.errors import InputChangedError, ReplayMismatchError

__all__ = ["Record", "changed_argument", "changed_saved", "changed_state", "describe_function", "parameter_names"]
__all__ += ["saved_otherwise", "saved_too_few", "saved_too_many", "values_drifted"]

Record: TypeAlias = tuple[int, torch.Size, torch.dtype, torch.device]
"""What the forward notes of a saved tensor: its position, shape, dtype and device."""

_CAUSES = """\
Likely causes:
  - the function depends on something outside its arguments: Python or NumPy random numbers, a global, a cache;
  - its control flow depends on values that differ in the last bit between two runs (routing in a mixture of experts);
  - a mode or setting changed between forward and backward.
What to do: pass what the function depends on as an argument, branch on recoup.is_replaying() where it has a side
effect, or leave this function out of checkpointing."""


def describe_function(fn: Any) -> str:
    """Names a callable and where it is defined: ``Block.forward (model.py:31)``."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if isinstance(fn, Module):
        return f"module {type(fn).__name__}{_place(type(fn).forward)}"
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, Module):
        return f"{type(owner).__name__}.{fn.__name__}{_place(type(owner).forward)}"
    name = getattr(fn, "__qualname__", type(fn).__qualname__).replace("<locals>.", "")
    return f"{name}{_place(fn)}"


def parameter_names(fn: Any) -> list[str]:
    """The names of a callable's positional parameters, as far as they can be known."""
    try:
        signature = inspect.signature(fn.forward if isinstance(fn, Module) else fn)
    except (TypeError, ValueError):
        return []
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [repr(name) for name, parameter in signature.parameters.items() if parameter.kind in named]


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


def changed_state(fn: Any, name: str) -> InputChangedError:
    """A parameter, buffer or captured tensor was changed in place before the replay."""
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


def saved_otherwise(fn: Any, record: Record, tensor: Tensor, num_saved: int) -> ReplayMismatchError:
    """The replay saved a tensor of another kind at a position. Call it while the operation runs."""
    position, shape, dtype, device = record
    return ReplayMismatchError(
        f"{describe_function(fn)}: the replay does not repeat the forward. Saved tensor {position + 1} of {num_saved}"
        f" was {_describe(shape, dtype, device)} in the forward and is"
        f" {_describe(tensor.shape, tensor.dtype, tensor.device)} in the replay{_operation(fn)}.\n{_CAUSES}"
    )


def saved_too_few(fn: Any, record: Record, num_saved: int, num_replayed: int) -> ReplayMismatchError:
    """The replay ended before it saved a tensor that the backward needs."""
    position, shape, dtype, device = record
    return ReplayMismatchError(
        f"{describe_function(fn)}: the replay does not repeat the forward. The forward saved {num_saved} tensors, the"
        f" replay only {num_replayed}; tensor {position + 1}, {_describe(shape, dtype, device)}, is missing.\n{_CAUSES}"
    )


def saved_too_many(fn: Any, num_saved: int, num_replayed: int) -> ReplayMismatchError:
    """The replay, run to its end, saved more tensors than the forward."""
    return ReplayMismatchError(
        f"{describe_function(fn)}: the replay does not repeat the forward. The forward saved {num_saved} tensors, the"
        f" replay {num_replayed}.\n{_CAUSES}"
    )


def values_drifted(fn: Any, record: Record, num_saved: int) -> ReplayMismatchError:
    """The replay saved a tensor of the right kind with other content. Call it while the operation runs."""
    position, shape, dtype, device = record
    return ReplayMismatchError(
        f"{describe_function(fn)}: the replay does not repeat the forward. Saved tensor {position + 1} of {num_saved},"
        f" {_describe(shape, dtype, device)}, has other values than in the forward{_operation(fn)}.\n{_CAUSES}\n"
        "Operations that are not deterministic on this device also show up here: see torch.use_deterministic_algorithms."
    )


def _describe(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"


def _place(fn: Any) -> str:
    code = getattr(inspect.unwrap(fn) if callable(fn) else fn, "__code__", None)
    return "" if code is None else f" ({Path(code.co_filename).name}:{code.co_firstlineno})"


def _operation(fn: Any) -> str:
    """Says where the running operation stands: the user's line, and the innermost module around it."""
    frame: FrameType | None = sys._getframe(2)
    line, modules = "", []
    while frame is not None:
        if not line and not _is_internal(frame):
            line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        owner = frame.f_locals.get("self")
        if isinstance(owner, Module) and (not modules or modules[-1] is not owner):
            modules.append(owner)
        if owner is fn or owner is getattr(fn, "__self__", fn):
            break
        frame = frame.f_back
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
