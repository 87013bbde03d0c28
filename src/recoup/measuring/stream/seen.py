"""The step as one pass over it finds it: its calls, the code between them, and what passes from one to the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from recoup.measuring.stream.gradient_views import GradientViews
from recoup.model.accumulation import Accumulates
from recoup.model.cut_graph import Gradient

__all__ = ["Code", "SeenCall", "Storages", "Structure", "Tail"]

Storages = dict[int, int]
"""Bytes by a storage's number."""


@dataclass(frozen=True)
class Code:
    """What ran between two units (before the first, after the last).

    Attributes:
        saved: storages that autograd saved there.
        transient_bytes: the most that lived at once of what it made, and of the output of the unit before, beyond this
            output.
        backward_bytes: the most that lived in its backward, beyond what lived before.
        gives_gradients: storages made earlier that its backward gives a gradient, saved or not, and its bytes.
        views: the storages that these gradients are views of.
        gives_code: by the calls before which earlier code ran, bytes of the gradients of what only that code knows.
        parameters: bytes of the gradients that its backward gives parameters, by their identity.
        alive: storages that live when its first operation runs.
        sums_in_code: by the same calls, the most that lives in the backward of that code beside such a gradient that is
            a view, when the sum with it is made.
    """

    saved: Storages
    transient_bytes: int
    backward_bytes: int = 0
    gives_gradients: Storages = field(default_factory=dict)
    views: GradientViews = field(default_factory=GradientViews)
    gives_code: dict[int, int] = field(default_factory=dict)
    parameters: dict[int, int] = field(default_factory=dict)
    alive: Storages = field(default_factory=dict)
    sums_in_code: dict[int, int] = field(default_factory=dict)

    @property
    def has_bytes(self) -> bool:
        """Whether it made or saved anything."""
        return bool(self.saved or self.transient_bytes)


@dataclass(frozen=True)
class SeenCall:
    """A unit's call as it passes by.

    Attributes:
        name: of the call.
        module: the unit.
        behaviour: equal for calls that do the same, as far as can be told, though its cost may depend on the data.
        kind: equal for calls that cost the same but for gradients that are views.
        arguments: storages that it is given.
        numbers: of the storages of all tensors among its arguments, in their order; None for what is resident.
        remade: storages among its arguments that it is given as other tensors than units handed on: as views of them.
        outputs: storages that it hands on.
        output_numbers: of the storages of all tensors among its outputs, in their order; None for what is resident and
            gets no gradient.
        output_shapes: of the same tensors.
        saved_arguments: those of its arguments that its own graph saves.
        saved_bytes: that its own graph saves, but for its arguments.
        saved_inside: by modules directly inside it, bytes that their graphs save.
        num_saved: by the same modules, how many tensors their graphs save; by ``""``, those of the whole call.
        gradients: of its outputs, by storage.
        argument_gradients: of its arguments, by storage.
        views: the storages that these gradients are views of; none are known before its backward has run once.
        given_parameters: bytes of the gradients of parameters among its arguments, by their identity.
        alive: storages that live when it is called.
        code: what ran before it.
        shares: whether another part of the step, after it, gives its parameters gradients too.
        wanted: for each tensor among its outputs, whether anything after it gives that a gradient.
        wait_as_views: for each tensor among its arguments, whether the gradient to which the call's backward adds is a
            view of a storage that outlives the sum.
        begins_with_views: for each tensor among its outputs, whether its gradient is a contiguous view of a storage
            that outlives the call's backward.
        begins_as: for each tensor among its outputs, its gradient, if that is a view of a storage that the call's
            backward is the last to read; else None.
    """

    name: str
    module: nn.Module = field(repr=False)
    behaviour: tuple[Any, ...] = field(repr=False)
    kind: tuple[Any, ...] = field(repr=False)
    arguments: Storages
    numbers: tuple[int | None, ...]
    remade: frozenset[int]
    outputs: Storages
    output_numbers: tuple[int | None, ...]
    output_shapes: tuple[torch.Size, ...]
    saved_arguments: frozenset[int]
    saved_bytes: int
    saved_inside: dict[str, int]
    num_saved: dict[str, int]
    gradients: Storages
    argument_gradients: Storages
    given_parameters: dict[int, int]
    alive: Storages
    code: Code
    views: GradientViews = field(default_factory=GradientViews)
    shares: bool = False
    wanted: tuple[bool, ...] = ()
    wait_as_views: tuple[bool, ...] = ()
    begins_with_views: tuple[bool, ...] = ()
    begins_as: tuple[Gradient | None, ...] = ()

    @property
    def gradients_wanted(self) -> tuple[bool | Gradient, ...]:
        """For each tensor among its outputs, whether the step gives it a gradient, or which view."""
        return tuple(like or is_wanted for like, is_wanted in zip(self.begins_as, self.wanted, strict=True))

    @property
    def cost_key(self) -> tuple[Any, ...]:
        """Equal for calls that cost the same."""
        return (self.kind, self.wait_as_views, self.begins_with_views, self.begins_as)

    @property
    def resident_outputs(self) -> tuple[bool, ...]:
        """For each tensor among its outputs, whether its storage lived before the step, as a parameter's did."""
        return tuple(number is None or not self.outputs[number] for number in self.output_numbers)


@dataclass(frozen=True)
class Tail:
    """What runs after the last unit: the rest of the model, and the loss.

    Attributes:
        code: what it runs.
        loss: storages of the loss, of its gradient, of other models' gradients, and of what the step made before a
            further forward: they live through the backward.
        output: storages of the model's output: all of a sample's, or what a step of the user's still holds.
        names: of the parts of that output, by storage.
    """

    code: Code
    loss: Storages
    output: Storages
    names: dict[int, str]


@dataclass(frozen=True)
class Structure:
    """A step as `look` saw it.

    Attributes:
        calls: of units.
        tail: the code behind them.
        accumulates: whether gradients are there when a backward begins.
        has_stale: whether those of the step before are there in the forward, and gone when the backward begins.
        copies: whether gradients were copied for parameters that had none.
    """

    calls: tuple[SeenCall, ...]
    tail: Tail
    accumulates: Accumulates
    has_stale: bool = False
    copies: bool = False
