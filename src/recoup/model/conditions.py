"""The conditions of a measurement: sizes of the model's inputs, autocast, mode, and number of calls of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from recoup.model.sharded import is_sharding
from recoup.tensors import contents, positional_names, working_device

__all__ = ["Conditions", "Recorder", "autocast_of", "input_shapes", "recording", "trained_bytes_of"]


@dataclass(frozen=True, slots=True)
class Conditions:
    """The conditions of a measured step, as seen at the calls of the model itself.

    Attributes:
        shapes: of the model's inputs, by the name of the argument: for each, the largest.
        autocast: the dtype of autocast around the model, such as ``"bfloat16"``; empty if autocast was off.
        forwards: number of calls of the model with gradients in a step.
        training: whether the model was in training mode.
        stale_gradients: whether gradients of the step before were there in the forward, and gone in the backward.
        trained_bytes: of parameters that need gradients; 0 if that is not known, or FSDP2 divides them.

    >>> Conditions((("x", (8, 64)),)).largest
    {'x': 512}
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    autocast: str = ""
    forwards: int = 1
    training: bool = True
    stale_gradients: bool = False
    trained_bytes: int = 0

    @property
    def largest(self) -> dict[str, int]:
        """The number of elements of each input."""
        return {name: prod(shape) for name, shape in self.shapes}


def input_shapes(
    names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Size]]:
    """The shapes of all tensors among some arguments, with their names.

    >>> dict(input_shapes(["x"], [torch.zeros(2)], {"more": [torch.zeros(3, 4)]}))
    {'x': torch.Size([2]), 'more[0]': torch.Size([3, 4])}
    """
    for index, value in enumerate(args):
        yield from _shapes_in(names[index] if index < len(names) else f"argument {index}", value)
    for name, value in kwargs.items():
        yield from _shapes_in(name, value)


def _shapes_in(name: str, value: Any) -> Iterator[tuple[str, torch.Size]]:
    if isinstance(value, Tensor):
        yield name, value.shape
    elif (found := contents(value)) is not None:
        for key, item in zip(*found, strict=True):
            yield from _shapes_in(f"{name}[{key!r}]", item)


def trained_bytes_of(model: nn.Module) -> int:
    """The bytes of a model's parameters that need gradients; 0 if `fully_shard` was called on it."""
    if is_sharding(model):
        return 0
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)


def autocast_of(parameter: Tensor | None) -> str:
    """The name of autocast's dtype where a parameter is computed with; empty if that is off, or without a parameter.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     autocast_of(torch.zeros(1)), autocast_of(None)
    ('bfloat16', '')
    """
    if parameter is None:
        return ""
    device_type = working_device(parameter).type
    try:
        if not torch.is_autocast_enabled(device_type):
            return ""
    except RuntimeError:  # a device that has no autocast
        return ""
    return str(torch.get_autocast_dtype(device_type)).removeprefix("torch.")


class Recorder:
    """Records the conditions of a model's calls.

    Attributes:
        conditions: so far; ``None`` if the model itself was never called.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = positional_names(model.forward)
        self.conditions: Conditions | None = None

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pre-hook."""
        if not torch.is_grad_enabled():
            return
        autocast = autocast_of(next(model.parameters(), None))
        found = self.conditions or Conditions(
            autocast=autocast, forwards=0, training=model.training, trained_bytes=trained_bytes_of(model)
        )
        shapes = dict(found.shapes)
        for name, shape in input_shapes(self._names, args, kwargs):
            if name not in shapes or shape.numel() > prod(shapes[name]):
                shapes[name] = tuple(map(int, shape))
        self.conditions = replace(found, shapes=tuple(shapes.items()), forwards=found.forwards + 1)


@contextmanager
def recording(model: nn.Module) -> Iterator[Recorder]:
    """Records the conditions of a model's calls in a ``with`` block.

    >>> model = nn.Linear(3, 2)
    >>> with recording(model) as recorder:
    ...     output = model(torch.zeros(5, 3))
    >>> recorder.conditions.shapes, recorder.conditions.forwards, recorder.conditions.trained_bytes
    ((('input', (5, 3)),), 1, 32)
    """
    recorder = Recorder(model)
    handle = model.register_forward_pre_hook(recorder, with_kwargs=True)
    try:
        yield recorder
    finally:
        handle.remove()
