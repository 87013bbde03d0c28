"""A call's arguments by name."""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from recoup.model.streaming import UnitCall
from recoup.tensors import argument_paths, positional_names, take_apart

__all__ = ["named_objects", "named_tensors"]

_NO_OBJECTS = (type, nn.Module, torch.Generator, FunctionType, MethodType, BuiltinFunctionType)


def named_tensors(call: UnitCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """The tensors among arguments for a call, as its signature names them: ``'x'``, ``'batch'['mask']``."""
    tensors: list[Tensor] = []
    node = take_apart((args, kwargs), tensors, [])
    return [(path, tensors[index]) for index, path in argument_paths(node, positional_names(call.fn))]


def named_objects(call: UnitCall) -> list[tuple[str, Any]]:
    """The objects among a call's arguments that are neither tensors, containers nor modules: a cache, a collector."""
    names = positional_names(call.fn)
    named = [
        (repr(names[i]) if i < len(names) else f"argument {i}", value) for i, value in enumerate(call.args)
    ]
    named += [(repr(key), value) for key, value in call.kwargs.items()]
    found: list[tuple[str, Any]] = []
    for name, value in named:
        others: list[Any] = []
        take_apart(value, [], others)
        found += [(name, other) for other in others if not isinstance(other, _NO_OBJECTS)]
    return found
