"""A call's arguments by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from recoup.checkpointing.mismatch import parameter_names
from recoup.model.streaming import UnitCall
from recoup.tensors import paths, take_apart

__all__ = ["named_objects", "named_tensors"]

_NO_OBJECTS = (type, nn.Module, torch.Generator, FunctionType, MethodType, BuiltinFunctionType)


def named_tensors(call: UnitCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """The tensors among arguments for a call, as its signature names them: ``'x'``, ``'batch'['mask']``."""
    found: list[tuple[str, Tensor]] = []
    for name, value in _named(call.fn, args, kwargs):
        tensors: list[Tensor] = []
        node = take_apart(value, tensors, [])
        found += [(path, tensors[index]) for index, path in paths(node, name)]
    return found


def named_objects(call: UnitCall) -> list[tuple[str, Any]]:
    """The objects among a call's arguments that are neither tensors, containers nor modules: a cache, a collector."""
    found: list[tuple[str, Any]] = []
    for name, value in _named(call.fn, call.args, call.kwargs):
        others: list[Any] = []
        take_apart(value, [], others)
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
