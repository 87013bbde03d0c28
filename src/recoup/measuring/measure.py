"""``measure``: from a model and a sample to a Profile, one unit at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from recoup.capture.seconds import OperationSeconds
from recoup.devices.meter import Meter, Timing, device_of, make_meter
from recoup.errors import CaptureError, CheckpointError, SampleError
from recoup.measuring.choosing import Choice, Choose, worth_compiling
from recoup.measuring.costs_by_kind import CostsByKind, Kind
from recoup.measuring.estimate import (
    Cluster,
    Hardware,
    faked,
    find_hardware,
    read_ranks,
    sharded,
    units_in_copy,
)
from recoup.measuring.largest import largest_costs, slowest_inside
from recoup.measuring.measured import Measured
from recoup.measuring.optimizer.cost import OptimizerCost, joint_cost
from recoup.measuring.problem.costs import CodeSeconds
from recoup.measuring.residents import find_residents
from recoup.measuring.stream.given_gradients import noting_views
from recoup.measuring.stream.gradient_views import GradientViews, argument_gradients
from recoup.measuring.stream.passes import Passes
from recoup.measuring.stream.seen import SeenCall, Structure
from recoup.measuring.stream.timing import time_inside
from recoup.measuring.unit.captured import captured_recipes, is_further_cut, run_once
from recoup.measuring.unit.one_unit import CallBytes, CallTiming, Gradients, measure_bytes, time_call
from recoup.measuring.unit.pace import ESTIMATED_PACE, USUAL_PACE, Pace, find_pace, time_plain_step
from recoup.measuring.unit.recipes import Effort, large_behaviours
from recoup.model.accumulation import UNREDUCED, Accumulates, read_accumulation
from recoup.model.checks import check_model
from recoup.model.compile_settings import settings_to_take_over
from recoup.model.conditions import recording
from recoup.model.cut_graph import Gradient
from recoup.model.optimizers import Optimizers
from recoup.model.recipe import KEEP, InnerForward, Recipe
from recoup.model.replace_forward import intercepted, suspended
from recoup.model.sharded import adds_in_place
from recoup.model.slices import unit_names
from recoup.model.step import TrainingStep
from recoup.model.streaming import UnitCall
from recoup.model.uncompile import inner_model, uncompiled
from recoup.model.units import Units
from recoup.model.wrappers import buckets_of, unsynchronized, unwrapped_model
from recoup.plans.profile import Profile
from recoup.progress import note

__all__ = ["Measured", "Measurement", "begin_measurement", "measure", "measure_step"]

_T = TypeVar("_T")
_ENGINES = ("eager", "captured", "compiled")


def measure(
    model: nn.Module,
    sample: Any = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    optimizer: Optimizers | None = None,
    step: Callable[[], Any] | None = None,
    units: Units | Iterable[Units] | None = None,
    accumulates: Accumulates = False,
    holds_output: bool = True,
    unsafe: Mapping[str, str] | None = None,
    hardware: Hardware | str | Path | None = None,
    ranks: int | Cluster = 1,
    engine: str = "eager",
) -> Profile:
    """Measures a model's training step, unit by unit: the plain step need not fit.

    Where the host may be slower than the device, plain steps are timed as well, if they fit.

    With ``hardware`` nothing is run and nothing allocated: a copy of the model, which may be on the meta device or made
    of fake tensors, runs on fake tensors. Bytes are exact, except for scratch inside kernels. Seconds are estimated by
    the roofline of each operation.

    Args:
        model: what is trained, in the mode (train or eval) in which it will be.
        sample: a tensor, a tuple of positional arguments, a dict of keyword arguments, or ``(inputs, targets)`` with a
            loss of two arguments.
        loss: from the model's output, and the targets if it takes two arguments, to a scalar; unless given, the
            output's ``loss``, or the output itself.
        optimizer: whose state counts, also before its first step; or several.
        step: a callable that runs a whole training step, instead of sample and loss.
        units: the modules to decide about: name patterns (``"blocks.*"``), modules, classes of modules, or a
            predicate of name and module.
        accumulates: gradients are there when a step begins, because several backwards add up in them; with FSDP2,
            ``"unreduced"`` says that they are there in full, since only the last micro-batch reduces them.
        holds_output: whether the training loop holds the model's output through the backward, as
            ``output = model(x); loss_of(output).backward()`` does and ``model(x).loss.backward()`` does not.
        unsafe: by unit name, why it must be kept whatever the budget.
        hardware: a GPU's name such as ``"H200"``, a file written by ``recoup hardware``, or figures of your own.
        ranks: with ``hardware``, over how many of them parameters, gradients and optimizer state are divided, by FSDP2;
            or a `Cluster` that says how, and how fast its links are. The sample is one rank's. Seconds include the
            communication that computing does not hide.
        engine: ``"eager"``; or ``"captured"`` or ``"compiled"``, where large units run as graphs that torch's compiler
            captures, without or with generated code. What cannot be captured is measured as it runs eagerly.

    Raises:
        SampleError: the model does not take the sample, or has nothing to train; there is no such engine to measure;
            or, with ``hardware``, it needs the values of its data.
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
    check_model(model)
    if engine not in _ENGINES:
        raise SampleError(
            f"engine={engine!r} cannot be measured; it is 'eager', 'captured' or 'compiled'. 'auto' and 'best' choose"
            " among these, for recoup.fit."
        )
    if engine != "eager" and hardware is not None:
        raise SampleError(f"engine={engine!r} is measured, not estimated: leave hardware= out.")
    cluster, unsafe = read_ranks(ranks), unsafe or {}
    if hardware is None and cluster.ranks > 1:
        raise SampleError(
            f"ranks={cluster.ranks} goes with hardware=: a measured model is divided already, or not at all."
        )
    inner, buckets = unwrapped_model(model), buckets_of(model, expected=False)
    settings = settings_to_take_over(model) if engine == "compiled" else ""
    with ExitStack() as stack:
        if engine != "eager":
            stack.enter_context(suspended(model))
            stack.enter_context(uncompiled(model))
            inner = inner_model(inner)
        training = TrainingStep(inner, sample, loss=loss, step=step, optimizer=optimizer, buckets=buckets)
        accumulates = read_accumulation(training, accumulates)
        if hardware is not None:
            found = find_hardware(hardware)
            measured = _estimate_step(training, found, units=units, accumulates=accumulates, unsafe=unsafe)
            return sharded(measured.profile(holds_output), inner, read_ranks(ranks, found))
        stack.enter_context(unsynchronized([model, *training.reached.modules]))
        measurement = begin_measurement(training, units=units, engine=engine, settings=settings)
        return measure_step(measurement, accumulates=accumulates, unsafe=unsafe).profile(holds_output)


def begin_measurement(
    step: TrainingStep, *, units: Units | Iterable[Units] | None, engine: str = "eager", settings: str = ""
) -> Measurement:
    """The first passes of `measure`: finds the units, and what passes between their calls.

    Generated code is compiled with these settings, as a `Cut` has them.
    """
    meter = make_meter(device_of(step.model, step.given))
    meter.waits = step.waits_in_units
    meter.settle()
    with step.plain():
        cost = joint_cost(step.optimizers)
        return Measurement(step, cost, meter, units, engine, settings)


def measure_step(
    measurement: Measurement,
    *,
    accumulates: Accumulates,
    unsafe: Mapping[str, str],
    like: Profile | None = None,
    choose: Choose | None = None,
) -> Measured:
    """The other passes of `measure`.

    Args:
        measurement: that has begun.
        accumulates: gradients are there when a step begins.
        unsafe: by unit name, why it must be kept whatever the budget; it holds for all units of the same behaviour.
        like: the same step with another sample: all of its recipes are measured, and no others.
        choose: says which recipes a plan would use. With it, of the cuts of captured units only those are compiled and
            measured that a plan would use, by what is foreseen of their bytes and seconds.

    Raises:
        SampleError: the step is not like that one.
    """
    measurement.like, measurement.choose = like, choose
    with measurement.step.plain():
        return measurement.run(accumulates, unsafe)


def _estimate_step(
    step: TrainingStep,
    hardware: Hardware,
    *,
    units: Units | Iterable[Units] | None,
    accumulates: Accumulates,
    unsafe: Mapping[str, str],
) -> Measured:
    """Both on fake tensors. The model is copied, so nothing needs to be put back."""
    device_type = hardware.device_type if hardware.device_type != "cpu" else None
    cost = joint_cost(step.optimizers, device_type=device_type)
    with faked(step, hardware) as (fake, meter):
        units = units_in_copy(units, step.model, fake.model)
        return Measurement(fake, cost, meter, units).run(accumulates, unsafe)


class Measurement:
    """One measurement: calls are found and looked at, at once; `run` then measures and times one of each kind.

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
        engine: str = "eager",
        settings: str = "",
    ) -> None:
        self.step, self.optimizer, self.meter = step, optimizer, meter
        self.engine, self.settings = engine, settings
        self.like: Profile | None = None
        self.choose: Choose | None = None
        _progress(0)
        self.passes = Passes(step, meter, wanted)
        self.allocated_bytes = meter.begin() if meter.sees_residents else 0
        self.structure = self.passes.look()
        self.calls, self.units = self.structure.calls, self.passes.units
        _progress(1)

    @property
    def distinct_calls(self) -> set[int]:
        """The indices of the calls to audit: one of each behaviour."""
        return set(_first_indices(seen.behaviour for seen in self.calls).values())

    def run(self, accumulates: Accumulates, unsafe: Mapping[str, str]) -> Measured:
        """Measures the bytes and seconds of one call of each kind."""
        step = self.step
        accumulates = accumulates or self.structure.accumulates
        unsafe = _for_all_alike(self.calls, unsafe)
        _progress(2)
        effort = Effort.for_calls(self.calls)
        with recording(step.model) as recorder:
            cold_s, inside_s = self._visit_first(effort)
        calls = self.calls
        inside_s = slowest_inside(step.ranks, calls, inside_s)
        first = _first_indices(seen.cost_key for seen in calls)
        timed = _timed_indices(calls, first)
        if self.like is not None:
            recipes, uncaptured = _recipes_of(self.like, calls, timed)
            self.passes.visit(set(timed.values()), partial(self._warm_up, recipes))
        else:
            recipes = {
                kind: effort.recipes(calls[index], inside_s.get(index, {}), unsafe)
                for kind, index in timed.items()
            }
            uncaptured = self._capture(timed, recipes) if self.engine != "eager" else {}
        _progress(3)
        found = CostsByKind(
            self.structure, first, timed, effort, accumulates, unsafe, inside_s, uncaptured, recipes
        )
        found.in_order = self.like is not None
        if self.choose is not None:
            found.later = {kind: list(filter(is_further_cut, own)) for kind, own in recipes.items()}
            found.recipes = {
                kind: [recipe for recipe in own if not is_further_cut(recipe)]
                for kind, own in recipes.items()
            }
        warm_s = self._measure_recipes(found, found.recipes)
        found.code_s = tuple(map(_faster, cold_s, warm_s))
        found.residents = find_residents(step, self.optimizer, self.meter, self.allocated_bytes)
        found.pace = self._pace(found)
        found.conditions = recorder.conditions
        _progress(5)
        if self.choose is not None and any(found.later.values()):
            self._measure_chosen(found, self.choose)
        return self._put_together(found)

    def _put_together(self, found: CostsByKind) -> Measured:
        names, groups = unit_names(self.step.model, self.units), self.step.shards.groups()
        conditions = found.conditions
        if conditions is not None:
            conditions = replace(conditions, stale_gradients=self.structure.has_stale)
        return Measured(
            self.step.model,
            self.meter,
            found.costs(),
            found.unsafe,
            names,
            conditions,
            found.uncaptured,
            self.engine,
            groups,
            self.step.loss is not None,
        )

    def _measure_chosen(self, found: CostsByKind, choose: Choose) -> None:
        """Compiles and measures the cuts that are worth it.

        Where nothing fits with those, also all that do not depend on seconds, and so decide about the smallest budget.
        """

        def plan(found: CostsByKind) -> Choice:
            return choose(self._put_together(found))

        self._measure_later(found, worth_compiling(found, plan))
        steady = {recipe for own in found.later.values() for recipe in own if not recipe.by_seconds}
        if steady and not plan(found).fits:
            self._measure_later(found, steady)

    def _measure_later(self, found: CostsByKind, chosen: Collection[Recipe]) -> None:
        """Compiles and measures some of the recipes that were left for later."""
        new: dict[Kind, list[Recipe]] = {}
        for kind, own in found.later.items():
            # Of a unit that does not fit under its own cut nothing is foreseen.
            is_taken = found.own_cut(kind) is None
            if taken := [recipe for recipe in own if is_taken or recipe in chosen]:
                new[kind] = taken
        if not new:
            return
        at_call: dict[int, set[Recipe]] = {}
        for kind, own in new.items():
            at_call.setdefault(found.timed[kind], set()).update(own)

        def compile_at(call: UnitCall) -> None:
            run_once(call, at_call[call.index], self.calls[call.index].wanted)

        self.passes.visit(at_call, compile_at)
        for kind, own in new.items():
            found.recipes[kind] = [*found.recipes[kind], *own]
            found.later[kind] = [recipe for recipe in found.later[kind] if recipe not in own]
        # With those that were measured before: what is compared is timed in turn.
        self._measure_recipes(found, {kind: found.recipes[kind] for kind in new})

    def _measure_recipes(
        self, found: CostsByKind, recipes: Mapping[Kind, Sequence[Recipe]]
    ) -> list[CodeSeconds]:
        """Finds bytes and seconds of some kinds' recipes, for all ranks; returns those of the code between units."""
        accumulates = bool(found.accumulates)
        if self.step.shards:
            # Gathered parameters get gradients of their own, which are added to others afterwards, or in place.
            accumulates = found.accumulates == UNREDUCED and adds_in_place(self.step.shards.groups())
        sizes = self._measure_bytes({kind: found.first[kind] for kind in recipes}, recipes, accumulates)
        _progress(4)
        for kind, own in sizes.items():
            # A recipe that did not fit at the call that is timed, but fits here, is timed here.
            if not own.keys() <= sizes[self.calls[found.timed[kind]].cost_key].keys():
                found.timed[kind] = found.first[kind]
        timed = {kind: found.timed[kind] for kind in recipes}
        code_s, timings = self._time_calls(timed, sizes, found.effort)
        sizes, timings = largest_costs(self.step.ranks, sizes, timings)
        found.sizes |= sizes
        found.timings |= timings
        return code_s

    def _visit_first(self, effort: Effort) -> tuple[list[CodeSeconds], dict[int, dict[str, float]]]:
        """Finds the gradients that calls give as views, and seconds of the modules inside units; and of the code."""
        kinds = _first_indices(seen.kind for seen in self.calls)
        timed = _timed_indices(self.calls, _first_indices(seen.cost_key for seen in self.calls))
        thorough = {index for index in timed.values() if self.calls[index].behaviour in effort.large}
        inside_s: dict[int, dict[str, float]] = {}

        def visit(call: UnitCall) -> list[Gradient | None] | None:
            if call.index in thorough:
                inside_s[call.index] = self._time_inside(call)
            return self._argument_gradients(call) if call.index in kinds.values() else None

        code_s, found = self.passes.visit(thorough | {*kinds.values()}, visit)
        # All ranks have to find the same kinds of calls.
        ran = [
            {index for index, own in one.items() if own is not None}
            for one in self.step.ranks.gathered(found)
        ]
        known = {self.calls[index].kind: found[index] for index in set.intersection(*ran)}
        calls = [
            replace(seen, views=GradientViews.of(seen.numbers, known[seen.kind] or ()))
            if seen.kind in known
            else seen
            for seen in self.calls
        ]
        self.calls = noting_views(calls, self.structure.tail)
        self.structure = replace(self.structure, calls=self.calls)
        return code_s, inside_s

    def _argument_gradients(self, call: UnitCall) -> list[Gradient | None] | None:
        """Those that a call's backward gives; None if it does not fit even by itself."""
        try:
            return argument_gradients(call, self.calls[call.index].wanted)
        except torch.OutOfMemoryError:
            self.meter.make_room()
            return None

    def _time_inside(self, call: UnitCall) -> dict[str, float]:
        modules = self.passes.inside[call.module]
        time_inside(call, modules, self.meter)  # warm-up
        return time_inside(call, modules, self.meter)

    def _capture(self, timed: Mapping[Kind, int], recipes: dict[Kind, list[Recipe]]) -> dict[str, str]:
        """Replaces recipes by those of captured units; returns, by unit name, why units could not be captured."""
        seconds = OperationSeconds(self.meter)

        def see(call: UnitCall) -> list[Recipe] | str:
            wanted = self.calls[call.index].wanted
            try:
                found = captured_recipes(call, self.engine, seconds, wanted, self.settings)
            except CaptureError as error:
                return str(error)
            if self.choose is None:
                run_once(call, filter(is_further_cut, found), wanted)
            return found

        # What its own code saves counts as well: a unit need not call modules to be worth capturing.
        large = large_behaviours((seen.behaviour, seen.saved_bytes) for seen in self.calls)
        wanted = {index for index in timed.values() if self.calls[index].behaviour in large}
        _, found = self.passes.visit(wanted, see)
        reasons: dict[str, str] = {}
        for kind, index in timed.items():
            result = found.get(index)
            if isinstance(result, str):
                reasons |= {seen.name: result for seen in self.calls if seen.cost_key == kind}
            elif result is not None:
                recipes[kind] = result if len(recipes[kind]) > 1 else result[:1]
        return reasons

    def _warm_up(self, recipes: Mapping[Kind, Iterable[Recipe]], call: UnitCall) -> None:
        """Runs captured recipes once: under a meter, nothing can be compiled."""
        seen = self.calls[call.index]
        captured = [recipe for recipe in recipes[seen.cost_key] if recipe.cut is not None]
        run_once(call, captured, seen.wanted)

    def _measure_bytes(
        self, first: Mapping[Kind, int], recipes: Mapping[Kind, Sequence[Recipe]], accumulates: Accumulates
    ) -> dict[Kind, dict[Recipe, CallBytes]]:
        def measure(call: UnitCall) -> dict[Recipe, CallBytes]:
            seen = self.calls[call.index]
            gradients = Gradients.ACCUMULATED if accumulates else Gradients.NONE
            gradients = Gradients.SHARED if seen.shares else gradients
            tried = {recipe: self._try(call, recipe, gradients) for recipe in recipes[seen.cost_key]}
            return {recipe: cost for recipe, cost in tried.items() if cost is not None}

        with self.meter.watching(), self._inner_forwards(recipes):
            self.meter.ignore(self.step.shards.storages())
            _, found = self.passes.visit(first.values(), measure)
        for index, sizes in found.items():
            if not sizes:
                raise torch.OutOfMemoryError(
                    f"Unit {self.calls[index].name!r} alone does not fit the memory."
                )
        return {kind: found[index] for kind, index in first.items()}

    def _try(self, call: UnitCall, recipe: Recipe, gradients: Gradients) -> CallBytes | None:
        """The bytes of a recipe; None if it does not fit even by itself, or cannot be replayed."""
        seen = self.calls[call.index]
        try:
            return measure_bytes(
                call,
                recipe,
                self.meter,
                gradients=gradients,
                wanted=seen.gradients_wanted,
                as_views=seen.wait_as_views,
                begins_with_views=seen.begins_with_views,
                resident=seen.resident_outputs,
            )
        except (torch.OutOfMemoryError, CheckpointError):
            pass
        except Exception:
            # A replay may raise what the forward did not: the unit changed something that it reads, such as a cache
            # among its arguments.
            if recipe.is_kept:
                raise
        for parameter in self.step.model.parameters():
            parameter.grad = None
        self.meter.make_room()
        return None

    def _time_calls(
        self,
        timed: Mapping[Kind, int],
        sizes: Mapping[Kind, Mapping[Recipe, CallBytes]],
        effort: Effort,
    ) -> tuple[list[CodeSeconds], dict[Kind, dict[Recipe, CallTiming]]]:
        def measure(call: UnitCall) -> dict[Recipe, CallTiming]:
            seen = self.calls[call.index]
            recipes, repeats = list(sizes[seen.cost_key]), effort.repeats_of(seen)
            return time_call(
                call, recipes, self.meter, repeats=repeats, warm_up=effort.warm_up, wanted=seen.wanted
            )

        with self._inner_forwards(sizes):
            code_s, found = self.passes.visit(set(timed.values()), measure)
        return code_s, {
            kind: {recipe: timing for recipe, timing in found[index].items() if recipe in sizes[kind]}
            for kind, index in timed.items()
        }

    def _inner_forwards(self, recipes: Mapping[Kind, Iterable[Recipe]]) -> Any:
        # Not in captured units: the compiler would capture these stand-ins too.
        units = {
            seen.module
            for seen in self.calls
            if any(recipe.inner for recipe in recipes.get(seen.cost_key, ()))
        }
        modules = {module for unit in units for module in self.passes.inside[unit]}
        return intercepted({module: InnerForward(module) for module in modules})

    def _pace(self, found: CostsByKind) -> Pace:
        if self.meter.is_estimate:
            return ESTIMATED_PACE
        kinds = [seen.cost_key for seen in self.calls]
        # Units by themselves would be captured, but the plain step is eager.
        if not all(KEEP in found.timings[kind] for kind in kinds):
            return USUAL_PACE
        kept = [found.sizes[kind][KEEP] for kind in kinds]
        plain_bytes = _plain_step_bytes(self.structure, kept) + found.residents.gradient_bytes

        def time_step() -> Timing | None:
            self.passes.put_back_random_state()
            return time_plain_step(self.step, self.meter, plain_bytes)

        code_s = sum(code.forward_s + code.backward_s for code in found.code_s)
        return find_pace([found.timings[kind][KEEP] for kind in kinds], code_s, time_step)


def _progress(num_done: int) -> None:
    note("measuring", num_done, 5)


def _for_all_alike(calls: Sequence[SeenCall], unsafe: Mapping[str, str]) -> dict[str, str]:
    """The reasons by unit name, also for all other calls of the same behaviour."""
    reasons = {seen.behaviour: unsafe[seen.name] for seen in calls if seen.name in unsafe}
    return {seen.name: reasons[seen.behaviour] for seen in calls if seen.behaviour in reasons}


def _plain_step_bytes(structure: Structure, kept: Sequence[CallBytes]) -> int:
    """An upper bound of what the plain step allocates, but for the gradients of parameters."""
    code = [*(seen.code for seen in structure.calls), structure.tail.code]
    held_bytes = sum(call.output_bytes + call.held_bytes for call in kept)
    saved_bytes = sum(sum(part.saved.values()) for part in code)
    peaks = [*(call.backward_peak_bytes for call in kept), *(part.backward_bytes for part in code)]
    return held_bytes + saved_bytes + max(peaks)


def _recipes_of(
    like: Profile, calls: Sequence[SeenCall], timed: Mapping[Kind, int]
) -> tuple[dict[Kind, list[Recipe]], dict[str, str]]:
    """The recipes of a profile for each kind of call; and, by unit name, why units run eagerly."""
    units = {unit.name: unit for unit in like.units if not unit.is_code}
    if [seen.name for seen in calls] != list(units):
        others = sorted({seen.name for seen in calls} ^ units.keys()) or ["in another order"]
        raise SampleError(
            f"With this sample the model calls other units than with the largest one ({', '.join(others[:3])}): fit it"
            " with samples that run the same code."
        )
    recipes = {kind: list(units[calls[index].name].recipes) for kind, index in timed.items()}
    return recipes, {name: unit.uncaptured for name, unit in units.items() if unit.uncaptured}


def _first_indices(values: Iterable[_T]) -> dict[_T, int]:
    first: dict[_T, int] = {}
    for index, value in enumerate(values):
        first.setdefault(value, index)
    return first


def _timed_indices(calls: Sequence[SeenCall], first: Mapping[Kind, int]) -> dict[Kind, int]:
    """For each kind the call that is timed: one for all kinds of the same behaviour, whose bytes alone differ."""
    timed: dict[Any, int] = {}
    return {
        kind: timed.setdefault((calls[index].behaviour, calls[index].wanted), index)
        for kind, index in first.items()
    }


def _faster(first: CodeSeconds, second: CodeSeconds) -> CodeSeconds:
    return CodeSeconds(min(first.forward_s, second.forward_s), min(first.backward_s, second.backward_s))
