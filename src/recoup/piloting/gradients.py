"""Gradients that are there when a step begins: kept in host memory, and put back if the step fails."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recoup.piloting.copies import Copies
from recoup.tensors import plain_tensors
from recoup.torch_private import without_modes

__all__ = ["HeldGradients"]


class _Held(NamedTuple):
    parameter: Tensor
    gradient: Callable[[], Tensor | None]
    stride: tuple[int, ...]
    values: list[Tensor]


class HeldGradients:
    """The gradients of some parameters, as a step finds them.

    A backward adds to them in place, so their values are copied: into host memory, which costs the device none.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self._copies = Copies(on_host=True)
        self._held: list[_Held] = []

    def hold(self) -> None:
        """Keeps the gradients that are there now."""
        owners = [parameter for parameter in self._parameters if parameter.grad is not None]
        parts = [list(plain_tensors(_gradient_of(owner))) for owner in owners]
        self._copies.hold([part for own in parts for part in own])
        values = iter(self._copies.values)
        self._held = [
            _Held(owner, _reference(_gradient_of(owner)), _stride_of(owner), [next(values) for _ in own])
            for owner, own in zip(owners, parts, strict=True)
        ]
        # The step may free gradients before it makes others.
        self._copies.drop()

    def free(self) -> None:
        """Drops the gradients of a step that failed."""
        before = {id(held.parameter): held.gradient() for held in self._held}
        for parameter in self._parameters:
            if parameter.grad is not None and parameter.grad is not before.get(id(parameter)):
                parameter.grad = None

    def put_back(self) -> None:
        """Gives the parameters the gradients that the step found."""
        kept = {id(held.parameter): held for held in self._held}
        for parameter in self._parameters:
            held = kept.get(id(parameter))
            parameter.grad = None if held is None else _restored(held)
        self._held = []

    def free_copies(self) -> None:
        """Frees the memory of copies."""
        self._copies.free()

    def forget(self) -> None:
        """After a step that ended."""
        self._held = []


def _gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _reference(gradient: Tensor) -> Callable[[], Tensor | None]:
    if type(gradient) is Tensor and gradient.layout is torch.strided:
        return weakref.ref(gradient)
    return lambda: gradient  # no other can be made of its parts


def _stride_of(parameter: Tensor) -> tuple[int, ...]:
    gradient = _gradient_of(parameter)
    return gradient.stride() if gradient.layout is torch.strided else ()


def _restored(held: _Held) -> Tensor:
    gradient = held.gradient()
    with without_modes(), torch.no_grad():
        if gradient is None:
            value = held.values[0]
            gradient = torch.empty_strided(
                value.shape, held.stride, dtype=value.dtype, device=held.parameter.device
            )
        for part, value in zip(plain_tensors(gradient), held.values, strict=True):
            part.copy_(value)
    return gradient
