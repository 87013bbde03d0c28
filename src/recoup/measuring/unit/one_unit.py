"""One call of a unit by itself, under one recipe: bytes that it holds, bytes at its peaks, and seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import backward as run_backward

from recoup.devices.meter import Meter, Timing, gc_disabled
from recoup.model.cut_graph import Gradient, copied_as_accumulated, gradients_from, seeded, seeded_as
from recoup.model.recipe import Recipe, run_recipe
from recoup.model.streaming import UnitCall
from recoup.model.undo import made_attributes
from recoup.tensors import needing_gradient, num_bytes_of, num_owners, storage_of, storages_of, tensors_in

__all__ = [
    "CallBytes",
    "CallSeconds",
    "CallTiming",
    "Gradients",
    "forward_and_backward",
    "measure_bytes",
    "time_call",
]


@dataclass(frozen=True, slots=True)
class CallBytes:
    """Bytes of one call under one recipe, beyond what was allocated before it.

    Attributes:
        forward_peak_bytes: peak of its forward, with its output.
        output_bytes: its output, without what its arguments hold already, or is resident.
        held_bytes: between forward and backward, without its outputs.
        holds_outputs: for each tensor among its outputs, whether its graph holds that too.
        backward_peak_bytes: peak of its backward beyond what it held, with the gradients of its output, its arguments
            and its parameters.
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
        """Whether its graph holds any of its outputs."""
        return any(self.holds_outputs)


@dataclass(frozen=True, slots=True)
class CallSeconds:
    """Seconds of one call under one recipe in a step.

    Attributes:
        forward_s: of the forward.
        backward_s: of the backward, with the recipe's own replay.
        replay_overhead_s: extra forward seconds if the call is part of a larger replay, which stores saved tensors.
    """

    forward_s: float
    backward_s: float
    replay_overhead_s: float = 0.0


class CallTiming(NamedTuple):
    """Times of one call under one recipe by itself; the backward includes the recipe's replay."""

    forward: Timing
    backward: Timing


class Gradients(Enum):
    """Gradients that a unit's parameters have when its backward runs. They decide what new ones need beside them."""

    NONE = "none"
    """None: new gradients stay."""
    SHARED = "shared"
    """Another call's, from the same backward: autograd makes the sum."""
    ACCUMULATED = "accumulated"
    """An earlier backward's: new ones are added in place."""


@gc_disabled()
def measure_bytes(
    call: UnitCall,
    recipe: Recipe,
    meter: Meter,
    *,
    gradients: Gradients = Gradients.NONE,
    wanted: Sequence[bool | Gradient] | None = None,
    as_views: Sequence[bool] = (),
    begins_with_views: Sequence[bool] = (),
    resident: Sequence[bool] = (),
) -> CallBytes:
    """Runs a call forward and backward inside ``meter.watching()``.

    Args:
        call: to run.
        recipe: under which.
        meter: of the device.
        gradients: that its parameters have already.
        wanted: for each tensor among its outputs, whether the step gives it a gradient, or how that lies in memory; by
            default all get one.
        as_views: for each tensor among its arguments, whether it has a gradient already, as a view of others' storage;
            by default none has. The view's bytes are not counted.
        begins_with_views: for each tensor among its outputs, whether its gradient is a view of others' storage, which
            outlives the backward; by default none is. The view's bytes are not counted.
        resident: for each tensor among its outputs, whether its storage lived before the step, such as a parameter's;
            by default none did. Its bytes are not counted.
    """
    owners, earlier_gradients = _ArgumentOwners(call), _EarlierGradients(call, as_views, gradients)
    attributes = made_attributes(call.module)
    args, kwargs, start = call.fresh()
    parameters = needing_gradient(list(call.module.parameters()))
    if gradients is Gradients.ACCUMULATED:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
    before = meter.begin()
    output = run_recipe(recipe, call.module, call.fn, args, kwargs)
    forward_peak = meter.peak_bytes() - before
    given = storages_of((args, kwargs, list(compress(tensors_in(output), resident))))
    made = storages_of(output)
    output_bytes = sum(meter.rounded(size) for key, size in made.items() if key not in given)
    storages = [storage_of(tensor) for tensor in tensors_in(output)]
    owners_of = {id(t): torch.zeros_like(t) for t in compress(tensors_in(output), begins_with_views)}
    owned_bytes = sum(meter.rounded(owner.nbytes) for owner in owners_of.values())
    seed = seeded(output, wanted, owners_of)
    # The newest node runs first: autograd then has these gradients, and adds the unit's own.
    earlier = earlier_gradients.seed(args, kwargs, parameters)
    del output, args, kwargs
    # A further owner, beside this list, is the graph.
    holds_outputs = tuple(storage._cdata not in given and num_owners(storage) > 1 for storage in storages)
    held = {storage._cdata: storage.nbytes() for storage in compress(storages, holds_outputs)}
    del storages
    held_bytes = meter.live_bytes() - before - owned_bytes - sum(map(meter.rounded, held.values()))
    holds_arguments = owners.have_grown()
    if seed is None:
        return CallBytes(forward_peak, output_bytes, 0, (False,) * len(holds_outputs), 0, holds_arguments)
    seeds = [seed] if earlier is None else [seed, earlier]
    backward_peak = _backward_peak(seeds, [start, *attributes], parameters, meter, gradients)
    return CallBytes(forward_peak, output_bytes, held_bytes, holds_outputs, backward_peak, holds_arguments)


class _ArgumentOwners:
    """Counts who holds the storages of a call's arguments, before and after it."""

    def __init__(self, call: UnitCall) -> None:
        given = tensors_in((call.args, call.kwargs))
        is_any_fresh = any(tensor.requires_grad for tensor in given)
        # Arguments that are not made anew for a run are held anyway: whether the graph holds them cannot be told.
        self._storages = [
            storage_of(tensor)
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


class _EarlierGradients:
    """Gradients that are there when the backward of a call begins: of its arguments, and of shared parameters."""

    def __init__(self, call: UnitCall, as_views: Sequence[bool], gradients: Gradients) -> None:
        self._shares = gradients is Gradients.SHARED
        # Made before anything is counted.
        viewed = compress(enumerate(tensors_in((call.args, call.kwargs))), as_views)
        self._owners = {index: tensor.new_zeros(()) for index, tensor in viewed if tensor.requires_grad}

    def seed(self, args: Any, kwargs: Any, parameters: list[Tensor]) -> Tensor | None:
        """A tensor whose backward makes them; None if there are none."""
        tensors = tensors_in((args, kwargs))
        pairs: list[tuple[Tensor, Tensor | None]] = [(tensors[i], owner) for i, owner in self._owners.items()]
        pairs += [(parameter, None) for parameter in parameters if self._shares]
        return seeded_as(pairs) if pairs else None


def _backward_peak(
    seeds: list[Tensor], starts: list[Tensor], parameters: list[Tensor], meter: Meter, gradients: Gradients
) -> int:
    inputs = [*starts, *parameters]
    before = meter.begin()
    if gradients is Gradients.ACCUMULATED:
        # Imported by name: inside a step of the user's, torch.autograd.backward is replaced.
        run_backward(seeds, [torch.empty(0) for _ in seeds], inputs=inputs)
        for tensor in inputs:
            tensor.grad = None
        return meter.peak_bytes() - before
    with copied_as_accumulated(parameters):
        gradients_from(seeds, inputs)
    shared = parameters if gradients is Gradients.SHARED else []
    return meter.peak_bytes() - before - sum(meter.rounded(num_bytes_of(parameter)) for parameter in shared)


def forward_and_backward(
    call: UnitCall, recipe: Recipe, wanted: Sequence[bool] | None = None
) -> tuple[Callable[[], None], Callable[[], None]]:
    """The call's forward and its backward as two functions, to be run in this order."""
    attributes = made_attributes(call.module)
    args, kwargs, start = call.fresh()
    parameters = needing_gradient(list(call.module.parameters()))
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
    recipes: Sequence[Recipe],
    meter: Meter,
    *,
    repeats: int,
    warm_up: int,
    wanted: Sequence[bool] | None = None,
) -> dict[Recipe, CallTiming]:
    """Times a call under several recipes, in turn, outside ``meter.watching()``."""
    runs = [partial(forward_and_backward, call, recipe, wanted) for recipe in recipes]
    timings = meter.time_in_turn(runs, repeats=repeats, warm_up=warm_up)
    return {recipe: CallTiming(*timing) for recipe, timing in zip(recipes, timings, strict=True)}
