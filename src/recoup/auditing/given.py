"""A call's arguments by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from recoup.checkpointing.arguments import _paths, _take_apart
from recoup.checkpointing.mismatch import parameter_names
from recoup.measuring.streaming import UnitCall
from recoup.measuring.trees import map_tensors

__all__ = ["copied", "named_objects", "named_tensors", "with_other_values"]

_NO_OBJECTS = (type, nn.Module, torch.Generator, FunctionType, MethodType, BuiltinFunctionType)


def named_tensors(call: UnitCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """The tensors among arguments for a call, as its signature names them: ``'x'``, ``'batch'['mask']``."""
    found: list[tuple[str, Tensor]] = []
    for name, value in _named(call.fn, args, kwargs):
        tensors: list[Tensor] = []
        node = _take_apart(value, tensors, [])
        found += [(path, tensors[index]) for index, path in _paths(node, name)]
    return found


def named_objects(call: UnitCall) -> list[tuple[str, Any]]:
    """The objects among a call's arguments that are neither tensors, containers nor modules: a cache, a collector."""
    found: list[tuple[str, Any]] = []
    for name, value in _named(call.fn, call.args, call.kwargs):
        others: list[Any] = []
        _take_apart(value, [], others)
        found += [(name, other) for other in others if not isinstance(other, _NO_OBJECTS)]
    return found


def _named(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    names = parameter_names(fn)
    for position, value in enumerate(args):
        yield names[position] if position < len(names) else f"argument {position}", value
    for key, value in kwargs.items():
        yield repr(key), value


def copied(call: UnitCall) -> UnitCall:
    """The same call on copies of its tensors, which it may change."""
    return _on(call, Tensor.clone)


def with_other_values(call: UnitCall) -> UnitCall | None:
    """The same call on other values of its floating-point tensors; None if there are none to change.

    The values are the same in another order, so what is positive, or small, stays so. Integers are left alone: as
    indices they must fit together, and a device that is given a wrong one is lost. So are tensors that are not
    finite, which are masks.
    """
    is_changed = False

    def change(tensor: Tensor) -> Tensor:
        nonlocal is_changed
        if (
            not tensor.is_floating_point()
            or tensor.layout is not torch.strided
            or not tensor.isfinite().all()
        ):
            return tensor.clone()
        is_changed = True
        return _reordered(tensor)

    changed = _on(call, change)
    return changed if is_changed else None


def _reordered(tensor: Tensor) -> Tensor:
    """The values in another order, or moved at random if that is no other.

    >>> _reordered(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[3., 2.],
            [1., 4.]])
    """
    # By one more than half: rows are not only exchanged, but made anew.
    values = tensor.flatten().flip(0).roll(tensor.numel() // 2 + 1).view(tensor.shape)
    return values + torch.randn_like(values) if torch.equal(values, tensor) else values


def _on(call: UnitCall, change: Callable[[Tensor], Tensor]) -> UnitCall:
    def changed(tensor: Tensor) -> Tensor:
        return change(tensor.detach()).requires_grad_(tensor.requires_grad)

    args, kwargs = map_tensors(changed, (call.args, call.kwargs))
    return replace(call, args=args, kwargs=kwargs)
