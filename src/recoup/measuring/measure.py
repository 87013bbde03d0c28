"""``measure``: from a model and a sample to a Profile, one unit at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recoup.devices.meter import Meter, Timing, device_of, make_meter
from recoup.errors import CheckpointError, SampleError, UnitError
from recoup.measuring.estimate import Hardware, check_ranks, faked, find_hardware, sharded
from recoup.measuring.optimizer.cost import OptimizerCost, joint_cost, optimizer_cost, state_bytes_of
from recoup.measuring.problem.costs import CodeSeconds, StepCosts
from recoup.measuring.problem.encode import encode, positions_of
from recoup.measuring.stream.structure import SeenCall, Structure, look
from recoup.measuring.stream.timing import time_code, time_inside
from recoup.measuring.unit.effort import Effort
from recoup.measuring.unit.one_unit import (
    CallBytes,
    CallTiming,
    Gradients,
    measure_bytes,
    rounded,
    time_call,
)
from recoup.measuring.unit.pace import USUAL_PACE, Pace, find_pace, time_plain_step
from recoup.measuring.unit.recipes import useful_recipes
from recoup.model.caches import without_caches
from recoup.model.calls import ModuleCall, class_of_module, module_names, watch_calls
from recoup.model.conditions import Conditions, recording
from recoup.model.optimizers import Optimizers
from recoup.model.recipe import KEEP, InnerForward, Recipe
from recoup.model.slices import unit_names
from recoup.model.stand_in import intercepted, suspended
from recoup.model.step import TrainingStep
from recoup.model.streaming import LeakError, UnitCall
from recoup.model.undo import undone
from recoup.model.units import Units, children_of, choose_units, find_units, split_units
from recoup.plans.profile import Profile, ProfiledUnit, Residents
from recoup.progress import note
from recoup.snapshot.random_state import held_random_state
from recoup.tensors import storages_of

__all__ = ["Measured", "Measurement", "begin_measurement", "measure", "measure_step"]

_NUM_PASSES = 5


def measure(
    model: nn.Module,
    sample: Any = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    optimizer: Optimizers | None = None,
    step: Callable[[], Any] | None = None,
    units: Units | Iterable[Units] | None = None,
    accumulates: bool = False,
    holds_output: bool = True,
    unsafe: Mapping[str, str] | None = None,
    hardware: Hardware | str | Path | None = None,
    ranks: int = 1,
) -> Profile:
    """Measures a model's training step, unit by unit: the plain step need not fit.

    Where the host may be slower than the device, plain steps are timed as well if the device has room for them.

    With ``hardware`` nothing is run and nothing allocated: a copy of the model, which may also be on the meta device
    or made of fake tensors, runs on tensors without memory. Bytes are exact, but for what kernels need inside; seconds
    are estimates by the roofline of each operation.

    Args:
        model: what is trained, in the mode (train or eval) in which it will be.
        sample: a tensor, a tuple of positional arguments, a dict of keyword arguments, or ``(inputs, targets)`` with a
            loss of two arguments.
        loss: from the model's output, and the targets if it takes two arguments, to a scalar; unless given, the
            output's ``loss``, or the output itself.
        optimizer: whose state counts, also before its first step; or several.
        step: a callable that runs a whole training step, instead of sample and loss.
        units: the modules to decide about: name patterns (``"blocks.*"``), modules, or a predicate of name and module.
        accumulates: gradients are there when a step begins, because several backwards add up in them.
        holds_output: whether the training loop holds the model's output through the backward, as
            ``output = model(x); loss_of(output).backward()`` does and ``model(x).loss.backward()`` does not.
        unsafe: by unit name, why it must be kept whatever the budget.
        hardware: a GPU's name such as ``"H200"``, a file written by ``recoup hardware``, or figures of your own.
        ranks: with ``hardware``, over how many of them parameters, gradients and optimizer state are divided. The
            sample is one rank's.

    Raises:
        SampleError: the model does not take the sample, or has nothing to train; or, with ``hardware``, it needs the
            values of its data.
        HardwareError: there is no such hardware.
        LossError: the loss is no scalar.
        UnitError: there are no such units.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> profile = measure(model, torch.zeros(4, 8), loss=lambda output: output.sum())
    >>> [unit.name for unit in profile.units]
    ['[0:2]', '2', 'loss']
    >>> with torch.device("meta"):
    ...     model = torch.nn.Sequential(*(torch.nn.Linear(2**15, 2**15) for _ in range(4)))
    >>> profile = measure(model, torch.empty(64, 2**15), loss=torch.sum, hardware="H200")
    >>> profile.device, profile.residents.parameter_bytes // 2**30, profile.seconds_are_estimates
    ('H200 (estimated)', 16, True)
    """
    training = TrainingStep(model, sample, loss=loss, step=step, optimizer=optimizer)

    check_ranks(ranks)
    if hardware is not None:
        found = find_hardware(hardware)
        measured = _estimate_step(training, found, units, accumulates=accumulates, unsafe=unsafe or {})
        return sharded(measured.profile(holds_output), model, ranks)
    if ranks > 1:
        raise SampleError(
            f"ranks={ranks} goes with hardware=: a measured model is divided already, or not at all."
        )
    measurement = begin_measurement(training, units=units)
    return measure_step(measurement, accumulates=accumulates, unsafe=unsafe or {}).profile(holds_output)


def begin_measurement(step: TrainingStep, *, units: Units | Iterable[Units] | None) -> Measurement:
    """The first pass of `measure`: finds the units and what each of their calls does."""
    meter = make_meter(device_of(step.model, step.given))
    with suspended(step.model), without_caches(step.model), step.preserved():
        cost = joint_cost(map(optimizer_cost, step.optimizers))
        return Measurement(step, cost, meter, units)


def measure_step(measurement: Measurement, *, accumulates: bool, unsafe: Mapping[str, str]) -> Measured:
    """The other passes of `measure`.

    Args:
        measurement: what the first pass found.
        accumulates: gradients are there when a step begins.
        unsafe: by unit name, why it must be kept whatever the budget; it holds for all units that do the same.
    """
    step = measurement.step
    with suspended(step.model), without_caches(step.model), step.preserved():
        return measurement.run(accumulates, unsafe)


def _estimate_step(
    step: TrainingStep,
    hardware: Hardware,
    units: Units | Iterable[Units] | None,
    *,
    accumulates: bool,
    unsafe: Mapping[str, str],
) -> Measured:
    """The same on fake tensors. The model is copied, so nothing needs to be put back."""
    device_type = hardware.device_type if hardware.device_type != "cpu" else None
    cost = joint_cost(optimizer_cost(optimizer, device_type=device_type) for optimizer in step.optimizers)
    with faked(step, hardware) as (fake, meter), suspended(fake.model), without_caches(fake.model):
        wanted = _in_copy(units, step.model, fake.model)
        return Measurement(fake, cost, meter, wanted).run(accumulates, unsafe)


def _in_copy(
    units: Units | Iterable[Units] | None, model: nn.Module, copied: nn.Module
) -> Units | Iterable[Units] | None:
    """Units that are given as modules, as those of the copy."""
    if units is None or isinstance(units, str) or (callable(units) and not isinstance(units, nn.Module)):
        return units
    names = module_names(model)
    entries: list[Units] = [units] if isinstance(units, nn.Module) else list(units)
    return [
        copied.get_submodule(names[entry]) if isinstance(entry, nn.Module) and entry in names else entry
        for entry in entries
    ]


class Measurement:
    """One measurement, pass by pass; the first is made at once.

    Attributes:
        step: that is measured.
        units: the modules to decide about.
    """

    def __init__(
        self,
        step: TrainingStep,
        optimizer: OptimizerCost,
        meter: Meter,
        wanted: Units | Iterable[Units] | None,
    ) -> None:
        self.step, self.optimizer, self.meter = step, optimizer, meter
        # Layers that are left out at random are the same ones in each pass.
        self.put_back_random_state = held_random_state()
        note("measuring", 0, _NUM_PASSES)
        root = watch_calls(self.step)
        self.units = choose_units(root) if wanted is None else find_units(root, wanted)
        self.resident_bytes = self.meter.begin() if self.meter.sees_residents else 0
        self.structure = self._look(root, splits=wanted is None)
        if not self.structure.calls:
            raise UnitError(
                "The step runs no module of the model with gradients, so there is nothing to decide about. Check"
                " step= and torch.no_grad around the model."
            )
        self.called = {index: seen.name for index, seen in enumerate(self.structure.calls)}
        note("measuring", 1, _NUM_PASSES)

    @property
    def distinct_calls(self) -> set[int]:
        """The indices of the calls to audit: one of all those that do the same."""
        return set(_first_indices(seen.behaviour for seen in self.structure.calls).values())

    def run(self, accumulates: bool, unsafe: Mapping[str, str]) -> Measured:
        """Measures the bytes and seconds of one call of each kind."""
        structure = self.structure
        accumulates = accumulates or structure.accumulates
        first = _first_indices(seen.kind for seen in structure.calls)
        unsafe = _spread(structure.calls, unsafe)
        note("measuring", 2, _NUM_PASSES)
        pacers = _pacers(structure.calls, first)
        code_cold, inside_s = self._time_inside(set(pacers.values()))
        effort = Effort.for_calls(structure.calls)
        recipes = {
            kind: effort.recipes(structure.calls[index], inside_s[index], unsafe)
            for kind, index in pacers.items()
        }
        note("measuring", 3, _NUM_PASSES)
        measured_bytes = self._measure_bytes(structure, first, recipes, accumulates)
        note("measuring", 4, _NUM_PASSES)
        for kind, index in first.items():
            # What did not fit there may fit here: then it is timed here.
            if not measured_bytes[kind].keys() <= measured_bytes[structure.calls[pacers[kind]].kind].keys():
                pacers[kind] = index
        code_warm, timings = self._time_calls(structure, pacers, measured_bytes, effort)
        code_s = tuple(map(_faster, code_cold, code_warm))
        pace = self._pace(structure, measured_bytes, timings, code_s)
        note("measuring", 5, _NUM_PASSES)
        useful = {}
        for kind, index in pacers.items():
            timed = timings[kind]
            seconds = {recipe: pace.seconds(timing, timed.get(KEEP)) for recipe, timing in timed.items()}
            sizes = {recipe: measured_bytes[kind][recipe] for recipe in seconds}
            useful[kind] = useful_recipes(sizes, seconds, inside_s.get(index, {}))
        options = [
            [option for option in useful[seen.kind] if option.recipe == KEEP or seen.name not in unsafe]
            for seen in structure.calls
        ]
        costs = StepCosts(
            structure,
            tuple(map(tuple, options)),
            code_s,
            self._residents(self.resident_bytes),
            accumulates,
            frozenset(
                index
                for index, seen in enumerate(structure.calls)
                if seen.name in unsafe or _is_stuck(recipes[seen.kind], measured_bytes[seen.kind])
            ),
        )
        names = unit_names(self.step.model, self.units)
        conditions = self.recorder.conditions
        if conditions is not None:
            conditions = replace(conditions, stale_gradients=structure.has_stale)
        return Measured(self.step.model, self.meter, costs, unsafe, names, conditions)

    # Passes

    def _look(self, root: ModuleCall, *, splits: bool) -> Structure:
        """The first pass with a graph. Units that give tensors away, and all of their class, are split into parts.

        Args:
            root: what the step calls.
            splits: whether that is allowed.
        """
        while True:
            self.inside = {unit: children_of(root, unit) for unit in self.units}
            self.put_back_random_state()
            try:
                return look(self.step, self.units, self.meter, self.inside)
            except LeakError as error:
                kind = class_of_module(error.module)
                alike = [unit for unit in self.units if class_of_module(unit) is kind]
                split = split_units(root, self.units, alike)
                if not splits or not split:
                    raise
                self.units = split

    def _time_inside(self, indices: Collection[int]) -> tuple[list[CodeSeconds], dict[int, dict[str, float]]]:
        """Streams the step and times the code, and the modules inside some of the units."""
        found: dict[int, dict[str, float]] = {}

        def at_call(call: UnitCall) -> None:
            modules = self.inside[call.module]
            time_inside(call, modules, self.meter)
            names = {module: name for name, module in call.module.named_modules()}
            timed = time_inside(call, modules, self.meter)
            found[call.index] = {
                names[module]: seconds for module, seconds in timed.items() if module in names
            }

        with recording(self.step.model) as self.recorder:
            return self._stream(indices, at_call), found

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
            kind = kinds[call.index]
            gradients = Gradients.ACCUMULATED if accumulates else Gradients.NONE
            if structure.calls[call.index].shares:
                gradients = Gradients.SHARED
            wanted = structure.calls[call.index].wanted
            for recipe in recipes[kind]:
                cost = self._try(call, recipe, gradients, wanted)
                if cost is not None:
                    found[kind][recipe] = cost

        with self.meter.watching(), self._inner_forwards():
            self._stream(kinds, at_call)
        for kind, index in first.items():
            if not found[kind]:
                raise torch.OutOfMemoryError(
                    f"Unit {structure.calls[index].name!r} alone does not fit the memory."
                )
        return found

    def _time_calls(
        self,
        structure: Structure,
        pacers: Mapping[Any, int],
        measured_bytes: Mapping[Any, Mapping[Recipe, CallBytes]],
        effort: Effort,
    ) -> tuple[list[CodeSeconds], dict[Any, dict[Recipe, CallTiming]]]:
        found: dict[int, dict[Recipe, CallTiming]] = {index: {} for index in pacers.values()}

        def at_call(call: UnitCall) -> None:
            seen = structure.calls[call.index]
            for recipe in measured_bytes[seen.kind]:
                found[call.index][recipe] = time_call(
                    call,
                    recipe,
                    self.meter,
                    repeats=effort.repeats,
                    warm_up=effort.warm_up,
                    wanted=seen.wanted,
                )

        with self._inner_forwards():
            code_s = self._stream(found, at_call)
        return code_s, {
            kind: {
                recipe: timing for recipe, timing in found[index].items() if recipe in measured_bytes[kind]
            }
            for kind, index in pacers.items()
        }

    def _stream(self, indices: Collection[int], at_call: Callable[[UnitCall], None]) -> list[CodeSeconds]:
        """A pass over the step, with ``at_call`` at some of its calls.

        Raises:
            UnitError: other units are called than in the first pass.
        """
        num_calls = 0

        def check(call: UnitCall) -> None:
            nonlocal num_calls
            num_calls += 1
            if call.name != self.called.get(call.index):
                raise _unsteady(f"{call.name!r} was called in the place of {self.called.get(call.index)!r}")
            if call.index in indices:
                with undone(call) as repeatable:
                    at_call(repeatable)

        self.put_back_random_state()
        seconds = time_code(self.step, self.units, self.meter, check)
        if num_calls < len(self.called):
            raise _unsteady(f"{self.called[num_calls]!r} was not called again")
        return seconds

    def _pace(
        self,
        structure: Structure,
        measured_bytes: Mapping[Any, Mapping[Recipe, CallBytes]],
        timings: Mapping[Any, Mapping[Recipe, CallTiming]],
        code_seconds: Sequence[CodeSeconds],
    ) -> Pace:
        kinds = [seen.kind for seen in structure.calls]
        if not all(KEEP in timings[kind] for kind in kinds):
            return USUAL_PACE
        code_s = sum(code.forward_s + code.backward_s for code in code_seconds)
        calls = [measured_bytes[kind][KEEP] for kind in kinds]
        code = [*(seen.code for seen in structure.calls), structure.tail.code]
        plain_bytes = sum(call.output_bytes + call.held_bytes for call in calls) + self._gradient_bytes()
        plain_bytes += sum(sum(part.saved.values()) for part in code)
        plain_bytes += max(
            *(call.backward_peak_bytes for call in calls), *(part.backward_bytes for part in code)
        )

        def time_step() -> Timing | None:
            self.put_back_random_state()
            return time_plain_step(self.step, self.meter, plain_bytes)

        return find_pace([timings[kind][KEEP] for kind in kinds], code_s, time_step)

    def _inner_forwards(self) -> Any:
        modules = {module for inside in self.inside.values() for module in inside}
        return intercepted({module: InnerForward(module) for module in modules})

    def _try(
        self, call: UnitCall, recipe: Recipe, gradients: Gradients, wanted: Sequence[bool]
    ) -> CallBytes | None:
        """An option that does not even fit by itself, or cannot be replayed, is none."""
        try:
            return measure_bytes(call, recipe, self.meter, gradients=gradients, wanted=wanted)
        except (torch.OutOfMemoryError, CheckpointError):
            pass
        except Exception:
            # Whatever a replay raises that the forward did not: the unit changed something that it reads, such as a
            # cache among its arguments.
            if recipe == KEEP:
                raise
        for parameter in self.step.model.parameters():
            parameter.grad = None
        self.meter.make_room()
        return None

    # Results

    def _residents(self, resident_bytes: int) -> Residents:
        """What lives all the time.

        Args:
            resident_bytes: what lived before the measured pass, where the meter tells.
        """
        model, optimizer = self.step.model, self.optimizer
        parameters = storages_of([*model.parameters(), *model.buffers()])
        parameter_bytes = sum(parameters.values())
        if self.meter.sees_residents:
            # Its state may be there by now, if the user's step has stepped it.
            state_bytes = sum(map(state_bytes_of, self.step.optimizers))
            other_bytes = max(0, resident_bytes - parameter_bytes - state_bytes)
        else:
            others = [
                tensor for one in self.step.reached.modules for tensor in (*one.parameters(), *one.buffers())
            ]
            living = parameters | storages_of((self.step.given, others))
            rounded_bytes = sum(rounded(size, self.meter) for size in living.values())
            other_bytes = rounded_bytes - parameter_bytes + self.meter.workspace_bytes
        return Residents(
            parameter_bytes,
            optimizer.state_bytes + optimizer.missing_bytes,
            other_bytes,
            self._gradient_bytes(),
            optimizer.transient_bytes,
        )

    def _gradient_bytes(self) -> int:
        parameters = set(self.step.model.parameters())
        return sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)


@dataclass(frozen=True)
class Measured:
    """A measured step, from which a profile can be made for either kind of training loop.

    Attributes:
        model: that was measured.
        meter: by which.
        costs: what was found.
        unsafe: by unit name, why it must be kept.
        names: of the units.
        conditions: what the model was called with.
    """

    model: nn.Module
    meter: Meter
    costs: StepCosts
    unsafe: Mapping[str, str]
    names: Mapping[nn.Module, str]
    conditions: Conditions | None

    def profile(self, holds_output: bool) -> Profile:
        """The profile for a loop that holds the model's output through the backward, or does not."""
        costs = replace(self.costs, holds_output=holds_output)
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
                    position.name,
                    self.names[module],
                    number,
                    kind,
                    recipes,
                    self.unsafe.get(position.name, ""),
                    num_parts=len(list(module.children())),
                )
            )
        tail = costs.structure.tail
        largest = sorted(tail.output, key=lambda number: tail.output[number], reverse=True)
        return Profile(
            type(self.model).__name__,
            self.meter.device_name,
            tuple(units),
            encode(costs),
            costs.residents,
            costs.accumulates,
            self.meter.is_estimate,
            device_bytes=self.meter.total_bytes(),
            holds_output=holds_output,
            output_bytes=sum(rounded(size, self.meter) for size in tail.output.values()),
            output_names=", ".join(dict.fromkeys(tail.names[number] for number in largest[:3])),
            conditions=self.conditions,
        )


def _first_indices(values: Iterable[Any]) -> dict[Any, int]:
    first: dict[Any, int] = {}
    for index, value in enumerate(values):
        first.setdefault(value, index)
    return first


def _spread(calls: Sequence[SeenCall], unsafe: Mapping[str, str]) -> dict[str, str]:
    """What holds for one call holds for all that do the same."""
    reasons = {seen.behaviour: unsafe[seen.name] for seen in calls if seen.name in unsafe}
    return {seen.name: reasons[seen.behaviour] for seen in calls if seen.behaviour in reasons}


def _pacers(calls: Sequence[SeenCall], first: Mapping[Any, int]) -> dict[Any, int]:
    """For each kind the call that is timed for it: what does the same takes about as long, however many its bytes."""
    timed: dict[Any, int] = {}
    return {
        kind: timed.setdefault((calls[index].behaviour, calls[index].wanted), index)
        for kind, index in first.items()
    }


def _unsteady(what: str) -> UnitError:
    return UnitError(
        f"The step does not call the same units each time that it runs: {what}. Let it depend on torch's, NumPy's or"
        " Python's own random numbers and on its arguments alone, which are the same each time; or choose units that it"
        " always calls, with units=."
    )


def _is_stuck(tried: Iterable[Recipe], found: Iterable[Recipe]) -> bool:
    """Whether a unit could not be replayed as a whole in any way."""
    return any(recipe.whole for recipe in tried) and not any(recipe.whole for recipe in found)


def _faster(first: CodeSeconds, second: CodeSeconds) -> CodeSeconds:
    return CodeSeconds(min(first.forward_s, second.forward_s), min(first.backward_s, second.backward_s))
