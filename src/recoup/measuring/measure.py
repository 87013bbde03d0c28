"""``measure``: from a model and a sample to a Profile, one unit at a time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recoup.errors import CheckpointError, UnitError
from recoup.measuring.caches import without_caches
from recoup.measuring.calls import watch_calls
from recoup.measuring.costs import CodeSeconds, Residents, StepCosts
from recoup.measuring.effort import Effort
from recoup.measuring.encode import encode, positions_of
from recoup.measuring.intercept import intercepted, suspended
from recoup.measuring.isolate import CallBytes, CallSeconds, Gradients, measure_bytes, measure_seconds
from recoup.measuring.meter import device_of, make_meter
from recoup.measuring.notes import unchanged_attributes
from recoup.measuring.optimizer import optimizer_cost
from recoup.measuring.options import KEEP, InnerForward, Recipe
from recoup.measuring.preserve import preserving
from recoup.measuring.profile import Profile, ProfiledUnit
from recoup.measuring.recipes import useful_recipes
from recoup.measuring.slices import unit_names
from recoup.measuring.steps import TrainingStep
from recoup.measuring.streaming import UnitCall
from recoup.measuring.structure import SeenCall, Structure, look
from recoup.measuring.timing import time_code, time_inside
from recoup.measuring.trees import storages_of
from recoup.measuring.units import Units, children_of, choose_units, find_units

__all__ = ["measure", "measure_step"]


def measure(
    model: nn.Module,
    sample: Any = None,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    step: Callable[[], Any] | None = None,
    units: Units | Iterable[Units] | None = None,
    accumulates: bool = False,
    unsafe: Mapping[str, str] | None = None,
) -> Profile:
    """Measures a model's training step, unit by unit: the plain step need not fit.

    Args:
        model: what is trained, in the mode (train or eval) in which it will be.
        sample: a tensor, a tuple of positional arguments or a dict of keyword arguments.
        loss: from the model's output to a scalar; unless given, the output's ``loss``, or the output itself.
        optimizer: whose state counts, also before its first step.
        step: a callable that runs a whole training step, instead of sample and loss.
        units: the modules to decide about: name patterns (``"blocks.*"``), modules, or a predicate of name and module.
        accumulates: gradients are there when a step begins, because several backwards add up in them.
        unsafe: by unit name, why it must be kept whatever the budget.

    Raises:
        SampleError: the model does not take the sample, or has nothing to train.
        LossError: the loss is no scalar.
        UnitError: there are no such units.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> profile = measure(model, torch.zeros(4, 8), loss=lambda output: output.sum())
    >>> [unit.name for unit in profile.units]
    ['[0:2]', '2', 'loss']
    """
    return measure_step(
        TrainingStep(model, sample, loss=loss, step=step),
        optimizer=optimizer,
        units=units,
        accumulates=accumulates,
        examine=lambda step, units, indices: unsafe or {},
    )


Examine = Callable[[TrainingStep, Sequence[nn.Module], Collection[int]], Mapping[str, str]]
"""Which of the step's unit calls with these indices must be kept whatever the budget, and why, by name."""


def measure_step(
    step: TrainingStep,
    *,
    optimizer: torch.optim.Optimizer | None,
    units: Units | Iterable[Units] | None,
    accumulates: bool,
    examine: Examine,
) -> Profile:
    """`measure` for a step that is already put together."""
    with (
        suspended(step.model),
        without_caches(step.model),
        preserving(step.model, optimizer, everything=step.changes_parameters),
        unchanged_attributes(step.model),
    ):
        return _Measurement(step, optimizer).run(units, accumulates, examine)


class _Measurement:
    """One measurement, pass by pass."""

    def __init__(self, step: TrainingStep, optimizer: torch.optim.Optimizer | None) -> None:
        self.step, self.optimizer = step, optimizer
        self.device = device_of(step.model, step.sample)
        self.meter = make_meter(self.device)

    def run(self, wanted: Units | Iterable[Units] | None, accumulates: bool, examine: Examine) -> Profile:
        root = watch_calls(self.step)
        self.units = choose_units(root) if wanted is None else find_units(root, wanted)
        self.inside = {unit: children_of(root, unit) for unit in self.units}
        resident_bytes = self.meter.live_bytes() if self.device.type == "cuda" else 0
        structure = look(self.step, self.units, self.meter, self.inside)
        if not structure.calls:
            raise UnitError(
                "The step runs no module of the model with gradients, so there is nothing to decide about. Check"
                " step= and torch.no_grad around the model."
            )
        accumulates = accumulates or structure.accumulates
        first = _first_of_kind(structure.calls)
        unsafe = _all_of_kind(examine(self.step, self.units, set(first.values())), structure.calls)
        code_cold, inside_s = self._time_inside(first)
        effort = Effort.for_calls(structure.calls)
        recipes = {
            kind: effort.recipes(structure.calls[index], inside_s[index], unsafe)
            for kind, index in first.items()
        }
        measured_bytes = self._measure_bytes(structure, first, recipes, accumulates)
        code_warm, measured_s = self._measure_seconds(first, measured_bytes, effort)
        useful = {
            kind: useful_recipes(measured_bytes[kind], measured_s[kind], inside_s[index])
            for kind, index in first.items()
        }
        options = [
            [option for option in useful[seen.kind] if option.recipe == KEEP or seen.name not in unsafe]
            for seen in structure.calls
        ]
        costs = StepCosts(
            structure,
            tuple(map(tuple, options)),
            tuple(map(_faster, code_cold, code_warm)),
            self._residents(resident_bytes),
            accumulates,
            frozenset(
                index
                for index, seen in enumerate(structure.calls)
                if seen.name in unsafe or _is_stuck(recipes[seen.kind], measured_bytes[seen.kind])
            ),
        )
        return self._profile(costs, unsafe)

    # Passes

    def _time_inside(self, first: Mapping[Any, int]) -> tuple[list[CodeSeconds], dict[int, dict[str, float]]]:
        """Streams the step and times the code and the modules inside one unit of each kind."""
        found: dict[int, dict[str, float]] = {}
        indices = set(first.values())

        def at_call(call: UnitCall) -> None:
            if call.index in indices:
                modules = self.inside[call.module]
                time_inside(call, modules, self.meter)
                names = {module: name for name, module in call.module.named_modules()}
                timed = time_inside(call, modules, self.meter)
                found[call.index] = {
                    names[module]: seconds for module, seconds in timed.items() if module in names
                }

        return time_code(self.step, self.units, self.meter, at_call), found

    def _measure_bytes(
        self,
        structure: Structure,
        first: Mapping[Any, int],
        recipes: Mapping[Any, Sequence[Recipe]],
        accumulates: bool,
    ) -> dict[Any, dict[Recipe, CallBytes]]:
        found: dict[Any, dict[Recipe, CallBytes]] = {kind: {} for kind in first}
        kinds = {index: kind for kind, index in first.items()}

        def at_call(call: UnitCall) -> None:
            kind = kinds.get(call.index)
            if kind is not None:
                gradients = Gradients.ACCUMULATED if accumulates else Gradients.NONE
                if structure.calls[call.index].shares:
                    gradients = Gradients.SHARED
                for recipe in recipes[kind]:
                    cost = self._try(call, recipe, gradients)
                    if cost is not None:
                        found[kind][recipe] = cost

        with self.meter.watching(), self._inner_forwards():
            time_code(self.step, self.units, self.meter, at_call)
        for kind, index in first.items():
            if not found[kind]:
                raise torch.OutOfMemoryError(
                    f"Unit {structure.calls[index].name!r} alone does not fit the memory."
                )
        return found

    def _measure_seconds(
        self,
        first: Mapping[Any, int],
        measured_bytes: Mapping[Any, Mapping[Recipe, CallBytes]],
        effort: Effort,
    ) -> tuple[list[CodeSeconds], dict[Any, dict[Recipe, CallSeconds]]]:
        found: dict[Any, dict[Recipe, CallSeconds]] = {kind: {} for kind in first}
        kinds = {index: kind for kind, index in first.items()}

        def at_call(call: UnitCall) -> None:
            kind = kinds.get(call.index)
            if kind is not None:
                for recipe in measured_bytes[kind]:
                    found[kind][recipe] = measure_seconds(call, recipe, self.meter, repeats=effort.repeats)

        with self._inner_forwards():
            return time_code(self.step, self.units, self.meter, at_call), found

    def _inner_forwards(self) -> Any:
        modules = {module for inside in self.inside.values() for module in inside}
        return intercepted({module: InnerForward(module) for module in modules})

    def _try(self, call: UnitCall, recipe: Recipe, gradients: Gradients) -> CallBytes | None:
        """An option that does not even fit by itself, or cannot be replayed, is none."""
        try:
            return measure_bytes(call, recipe, self.meter, gradients=gradients)
        except (torch.OutOfMemoryError, CheckpointError):
            pass
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    # Results

    def _residents(self, resident_bytes: int) -> Residents:
        model = self.step.model
        parameters = storages_of([*model.parameters(), *model.buffers()])
        sample = storages_of((self.step.args, self.step.kwargs))
        gradients = [p.numel() * p.element_size() for p in set(model.parameters()) if p.requires_grad]
        state_bytes, missing_bytes, transient_bytes = 0, 0, 0
        if self.optimizer is not None:
            cost = optimizer_cost(self.optimizer)
            state_bytes, missing_bytes = cost.state_bytes, cost.missing_bytes
            transient_bytes = cost.transient_bytes
        parameter_bytes = sum(parameters.values())
        other_bytes = sum(size for key, size in sample.items() if key not in parameters)
        if self.device.type == "cuda":
            other_bytes = max(0, resident_bytes - parameter_bytes - state_bytes)
        return Residents(
            parameter_bytes, state_bytes + missing_bytes, other_bytes, sum(gradients), transient_bytes
        )

    def _profile(self, costs: StepCosts, unsafe: Mapping[str, str]) -> Profile:
        names = unit_names(self.step.model, self.units)
        kinds: dict[Any, int] = {}
        calls_of: dict[nn.Module, int] = {}
        units = []
        for position in positions_of(costs):
            if position.call is None or position.seen is None:
                units.append(ProfiledUnit(position.name, None, 0, -1, (KEEP,)))
                continue
            module = position.seen.module
            number = calls_of[module] = calls_of.get(module, -1) + 1
            kind = kinds.setdefault(position.seen.kind, len(kinds))
            recipes = tuple(option.recipe for option in costs.options[position.call])
            units.append(
                ProfiledUnit(
                    position.name, names[module], number, kind, recipes, unsafe.get(position.name, "")
                )
            )
        return Profile(
            type(self.step.model).__name__,
            _device_name(self.device),
            tuple(units),
            encode(costs),
            costs.residents,
            costs.accumulates,
        )


def _first_of_kind(calls: Sequence[SeenCall]) -> dict[Any, int]:
    first: dict[Any, int] = {}
    for index, seen in enumerate(calls):
        first.setdefault(seen.kind, index)
    return first


def _all_of_kind(unsafe: Mapping[str, str], calls: Sequence[SeenCall]) -> dict[str, str]:
    """What holds for one unit holds for all of its kind."""
    reasons = {seen.kind: unsafe[seen.name] for seen in calls if seen.name in unsafe}
    return {seen.name: reasons[seen.kind] for seen in calls if seen.kind in reasons}


def _is_stuck(tried: Iterable[Recipe], found: Iterable[Recipe]) -> bool:
    """Whether a unit could not be replayed as a whole in any way."""
    return any(recipe.whole for recipe in tried) and not any(recipe.whole for recipe in found)


def _faster(first: CodeSeconds, second: CodeSeconds) -> CodeSeconds:
    return CodeSeconds(min(first.forward_s, second.forward_s), min(first.backward_s, second.backward_s))


def _device_name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
