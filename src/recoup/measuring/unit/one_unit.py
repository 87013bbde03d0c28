"""Measuring one unit's call by itself, under one recipe: what it holds, what it needs, and how long it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import compress

import torch
from torch import Tensor, nn
from torch.autograd import backward as run_backward

from recoup.devices.meter import Meter, Timing, without_collections
from recoup.model.cut_graph import gradients_from, seeded
from recoup.model.recipe import Recipe, run_recipe
from recoup.model.streaming import UnitCall
from recoup.model.undo import made_attributes
from recoup.tensors import num_owners, storages_of, tensors_in

__all__ = [
    "CallBytes",
    "CallSeconds",
    "CallTiming",
    "Gradients",
    "forward_and_backward",
    "measure_bytes",
    "rounded",
    "time_call",
]


@dataclass(frozen=True, slots=True)
class CallBytes:
    """Bytes of one call under one recipe, all beyond what lived before it.

    Attributes:
        forward_peak_bytes: the most in its forward, with its output.
        output_bytes: of its output, as far as its arguments do not hold it already.
        held_bytes: between forward and backward, without its outputs.
        holds_outputs: for each tensor among its outputs, whether its graph holds that too.
        backward_peak_bytes: the most in its backward beyond what it held, with the gradients of its output, its
            arguments and its parameters.
        holds_arguments: for each tensor among its arguments, whether its graph holds that.
    """

    forward_peak_bytes: int
    output_bytes: int
    held_bytes: int
    holds_outputs: tuple[bool, ...]
    backward_peak_bytes: int
    holds_arguments: tuple[bool, ...]

    @property
    def holds_output(self) -> bool:
        """Whether its graph holds anything of its outputs."""
        return any(self.holds_outputs)


@dataclass(frozen=True, slots=True)
class CallSeconds:
    """Seconds of one call under one recipe; the backward includes its replay.

    Attributes:
        forward_s: of the forward.
        backward_s: of the backward.
        again_s: further seconds if the call is a part of a larger one that is replayed: all that it saves is set aside.
    """

    forward_s: float
    backward_s: float
    again_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CallTiming:
    """How long one call under one recipe takes by itself; the backward includes its replay."""

    forward: Timing
    backward: Timing


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


class Gradients(Enum):
    """What a unit's parameters have when its backward runs: this decides what new gradients need beside them."""

    NONE = "none"
    """New gradients stay."""
    SHARED = "shared"
    """Another call gave them some in the same backward, which autograd adds up."""
    ACCUMULATED = "accumulated"
    """An earlier backward left them, and new ones are added in place."""


@without_collections()
def measure_bytes(
    call: UnitCall,
    recipe: Recipe,
    meter: Meter,
    *,
    gradients: Gradients = Gradients.NONE,
    wanted: Sequence[bool] | None = None,
) -> CallBytes:
    """Runs a call forward and backward inside ``meter.watching()``.

    Args:
        call: to run.
        recipe: under which.
        meter: of the device.
        gradients: what its parameters have already.
        wanted: for each tensor among its outputs, whether the step gives it a gradient; unless given, all get one.
    """
    owners = _Owners(call)
    attributes = made_attributes(call.module)
    args, kwargs, start = call.fresh()
    parameters = _trained(call.module)
    if gradients is Gradients.ACCUMULATED:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
    before = meter.begin()
    output = run_recipe(recipe, call.module, call.fn, args, kwargs)
    forward_peak = meter.peak_bytes() - before
    given, made = storages_of((args, kwargs)), storages_of(output)
    output_bytes = sum(rounded(size, meter) for key, size in made.items() if key not in given)
    storages = [tensor.untyped_storage() for tensor in tensors_in(output)]
    seed = seeded(output, wanted)
    del output, args, kwargs
    # Whoever still has one of them, beside this list, is the graph.
    holds_outputs = tuple(storage._cdata not in given and num_owners(storage) > 1 for storage in storages)
    held = {storage._cdata: storage.nbytes() for storage in compress(storages, holds_outputs)}
    del storages
    held_bytes = meter.live_bytes() - before - sum(rounded(size, meter) for size in held.values())
    holds_arguments = owners.have_grown()
    if seed is None:
        return CallBytes(forward_peak, output_bytes, 0, (False,) * len(holds_outputs), 0, holds_arguments)
    backward_peak = _backward_peak(seed, [start, *attributes], parameters, meter, gradients)
    return CallBytes(forward_peak, output_bytes, held_bytes, holds_outputs, backward_peak, holds_arguments)


class _Owners:
    """Who holds a call's arguments, to be asked before and after: their storages live meanwhile whoever holds them."""

    def __init__(self, call: UnitCall) -> None:
        given = tensors_in((call.args, call.kwargs))
        is_any_fresh = any(tensor.requires_grad for tensor in given)
        # Of what is not made anew for a run, it cannot be told whether the run's graph holds it.
        self._storages = [
            tensor.untyped_storage()
            if tensor.layout is torch.strided and (tensor.requires_grad or not is_any_fresh)
            else None
            for tensor in given
        ]
        self._before = self._counts()

    def _counts(self) -> list[int]:
        return [0 if storage is None else num_owners(storage) for storage in self._storages]

    def have_grown(self) -> tuple[bool, ...]:
        """For each tensor, whether someone holds it who did not before."""
        pairs = zip(self._storages, self._before, self._counts(), strict=True)
        return tuple(storage is None or after > before for storage, before, after in pairs)


def _backward_peak(
    seed: Tensor, starts: list[Tensor], parameters: list[nn.Parameter], meter: Meter, gradients: Gradients
) -> int:
    before = meter.begin()
    if gradients is Gradients.ACCUMULATED:
        # Not torch.autograd.backward by that name: inside a step of the user's, it is replaced.
        run_backward(seed, torch.empty(0), inputs=[*starts, *parameters])
        for tensor in (*starts, *parameters):
            tensor.grad = None
        return meter.peak_bytes() - before
    earlier = seeded(parameters) if gradients is Gradients.SHARED else None
    if earlier is None:
        gradients_from([seed], [*starts, *parameters])
        return meter.peak_bytes() - before
    # Made last, it runs first: autograd then has these gradients, and adds the unit's own.
    gradients_from([seed, earlier], [*starts, *parameters])
    there = sum(rounded(p.numel() * p.element_size(), meter) for p in parameters)
    return meter.peak_bytes() - before - there


def rounded(num_bytes: int, meter: Meter) -> int:
    """What a size takes of a device's memory."""
    return -(-num_bytes // meter.rounding_bytes) * meter.rounding_bytes


def forward_and_backward(
    call: UnitCall, recipe: Recipe, wanted: Sequence[bool] | None = None
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Two functions to be run one after the other: the call's forward and its backward."""
    attributes = made_attributes(call.module)
    args, kwargs, start = call.fresh()
    parameters = _trained(call.module)
    seeds: list[Tensor | None] = []

    def forward() -> None:
        seeds.append(seeded(run_recipe(recipe, call.module, call.fn, args, kwargs), wanted))

    def backward() -> None:
        seed = seeds.pop()
        if seed is not None:
            gradients_from([seed], [start, *attributes, *parameters])

    return forward, backward


def time_call(
    call: UnitCall,
    recipe: Recipe,
    meter: Meter,
    *,
    repeats: int,
    warm_up: int,
    wanted: Sequence[bool] | None = None,
) -> CallTiming:
    """Times a call outside ``meter.watching()``: medians of several runs, one behind the other."""
    forward, backward = meter.time(
        lambda: forward_and_backward(call, recipe, wanted), repeats=repeats, warm_up=warm_up
    )
    return CallTiming(forward, backward)
