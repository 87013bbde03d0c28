"""``apply`` and ``remove``: a plan or a policy on a model, in place, without a visible trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import get_ident
from typing import Any

import torch
from torch import nn

from recoup.checkpointing import process_lock
from recoup.engines.by_policy import arrange
from recoup.engines.by_size import Picker
from recoup.engines.running import Gathering, Nesting, PlannedCall, Run
from recoup.engines.waiting import Waiting
from recoup.engines.watching import Watch
from recoup.errors import ApplyError
from recoup.model.caches import CachelessForward, cached_models
from recoup.model.calls import class_of_module
from recoup.model.checks import check_model
from recoup.model.conditions import Conditions
from recoup.model.recipe import KEEP, InnerForward, Recipe
from recoup.model.replace_forward import StandIn, install, installed, suspended, uninstall_plan
from recoup.model.slices import SlicedForward, find_module, slices_by_sequential
from recoup.model.uncompile import inner_model, is_uncompiled, recompile, uncompile
from recoup.model.units import Units
from recoup.model.wrappers import unwrapped_model
from recoup.planning import Backward
from recoup.plans.by_size.axes import Size
from recoup.plans.by_size.plans import PlansBySize
from recoup.plans.model_plan import ModelPlan
from recoup.plans.profile import Profile
from recoup.plans.tree import Item, Leaf, Segment, leaves_of
from recoup.policies import Policy

__all__ = [
    "Earlier",
    "apply",
    "is_applied",
    "kept",
    "picked_size",
    "planned_model",
    "remove",
    "units_by_module",
]


class _Engine(Nesting):
    """What the stand-ins of one model share: the plan, and the state of the step that this thread runs."""

    def __init__(
        self,
        items: Sequence[Item],
        recipes: dict[int, tuple[Recipe, ...]],
        watch: Watch,
        picker: Picker | None = None,
    ) -> None:
        self.items, self.recipes, self.watch, self.picker = tuple(items), recipes, watch, picker
        self.gathering = Gathering()
        self.depth = 0
        self.reset()

    def reset(self) -> None:
        """Drops the state of a step, before the next begins and after it has ended."""
        self.run = Run(self.items, self.recipes)
        self.num_calls: dict[nn.Module, int] = {}
        self.waiting = Waiting()
        self.last_unit = -1

    @property
    def goes_on(self) -> bool:
        """Whether the step has not ended with the model's call: the plan has more, and no backward has begun."""
        has_more = self.picker is None and self.last_unit < self.items[-1].last
        return has_more and bool(self.waiting)

    def begin(self, root: _Root, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call of the model begins: under the plan for the size of its batch, if plans differ by it."""
        if self.picker is not None:
            self.items = self.picker.items_for(root.original, args, kwargs)
        if not self.goes_on:
            self.reset()
        self.gathering.begin(root.module)
        if self.depth == 0:
            self.watch.before(root.module, root.original, args, kwargs)

    def __reduce__(self) -> Any:
        return _Engine, (self.items, self.recipes, self.watch, self.picker)


class _Planned(StandIn):
    """Stands in for a forward by the plan."""

    def __init__(self, engine: _Engine, module: nn.Module) -> None:
        super().__init__(module)
        self.engine = engine

    def run_traced(self, *args: Any, **kwargs: Any) -> Any:
        """Warns that the plan is not in force where the model is compiled."""
        if torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting():
            self.engine.watch.at_compiling()
        return self.original(*args, **kwargs)


class _Root(_Planned):
    """Stands in for the model's forward: each call is a step of its own, unless the plan is for several."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        engine = self.engine
        items = engine.items
        engine.begin(self, args, kwargs)
        taken = process_lock.acquire()  # units that are kept draw from the same generators
        engine.depth += 1
        before, engine.watch.thread = engine.watch.thread, get_ident() if taken else engine.watch.thread
        has_returned = False
        try:
            output = self.original(*args, **kwargs)
            has_returned = True
        finally:
            engine.watch.thread = before
            engine.depth -= 1
            engine.items = items
            if not (has_returned and engine.goes_on):
                engine.reset()
            if taken:
                process_lock.release()
        if engine.depth == 0:
            engine.watch.after(output)
        return output


class _UnitForward(_Planned):
    """Stands in for a unit's forward: runs each of its calls as the plan says."""

    def __init__(
        self, engine: _Engine, module: nn.Module, units: Sequence[int], *, training: bool | None
    ) -> None:
        super().__init__(engine, module)
        self.training = training
        """The mode that the plan is for; None for both."""
        self.units = tuple(units)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        engine = self.engine
        if engine.is_inside or not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        if self.training is not None and self.module.training != self.training:
            engine.watch.at_unit_in_other_mode(self.training)
            return self.original(*args, **kwargs)
        if engine.watch.is_recomputed_by_others(self.module):
            return self.original(*args, **kwargs)
        unit = engine.last_unit = self._unit()
        call = PlannedCall(unit, self.module, self.original, engine, engine.gathering)
        if engine.depth or engine.watch.thread is None:
            output = engine.run(call, *args, **kwargs)
        else:
            # A thread of the model's own, beside the one that runs the model.
            with process_lock.shared(engine.watch.thread):
                output = engine.run(call, *args, **kwargs)
        if len(self.units) > 1:
            engine.waiting.add(output)
        return output

    def _unit(self) -> int:
        if len(self.units) == 1:
            return self.units[0]
        engine = self.engine
        if engine.depth == 0 and not engine.waiting:
            # A step of the user's calls parts of the model, and never the model itself: a new step has begun.
            engine.num_calls.clear()
        number = engine.num_calls.get(self.module, 0)
        engine.num_calls[self.module] = number + 1
        return self.units[min(number, len(self.units) - 1)]


def apply(
    model: nn.Module,
    plan: ModelPlan | PlansBySize | Policy,
    *,
    units: Units | Iterable[Units] | None = None,
    sample: Any = None,
    costs: Sequence[float] | None = None,
) -> nn.Module:
    """Lets a model run as a plan or a policy says, in place; what was there before is replaced.

    The model keeps its class, names, ``state_dict`` and hooks; it can be copied and pickled with its plan. Calls
    without gradients run plainly, and with a plan those in another mode (train or eval) than the measured one. So does
    a model that is traced, exported, compiled or transformed by torch.func. What is kept is not touched.

    Decoders that fill a key-value cache by default do not in training, unless the caller passes ``use_cache``. A
    plan that keeps everything switches the cache off too: the step was measured without it. A policy that keeps
    everything changes nothing.

    With a plan, a training call that leaves what was measured gives a `RecoupWarning`, once of each kind: larger
    inputs, other autocast, another mode, more forwards before a backward, checkpoints of the model's own, an output
    that is held, gradients that are there when a forward begins.

    With a policy nothing is measured, and no budget is promised. It decides about the units that `measure` would find,
    in the order in which the model registers them; what runs between them is kept.

    Args:
        model: in any state; a policy holds in train mode and in eval mode.
        plan: what `recoup.plan` made, or one of `recoup.policies`, such as ``UniformSegments(4)``; or what `fit` found
            for batches of several sizes, of which each call of the model takes the one for its batch.
        units: with a policy: the modules that it is about, as for `measure`.
        sample: with a policy: what the model takes (a tensor, a tuple of arguments, a dict of keyword arguments). It is
            run once, without a trace, and units are counted in the order of their calls.
        costs: with a policy that decides by them: one for each unit.

    Raises:
        ApplyError: the plan was made for another model; or no plan can be for this one.
        PolicyError: the policy does not suit the model's units.
        UnitError: there are no such units.

    >>> from recoup.policies import UniformSegments
    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)))
    >>> loss = apply(model, UniformSegments(2))(torch.zeros(4, 8)).sum()
    >>> loss.backward()
    """
    check_model(model, ApplyError)
    by_size, plan = (plan, plan.plan) if isinstance(plan, PlansBySize) else (None, plan)
    is_captured = isinstance(plan, ModelPlan) and plan.profile.engine != "eager"
    whole, model = model, planned_model(model, plan.profile) if isinstance(plan, ModelPlan) else model
    if isinstance(plan, Policy):
        found, items = arrange(model, plan, units=units, sample=sample, costs=costs)
        modules = {module: [index] for index, module in enumerate(found)}
        recipes: dict[int, tuple[Recipe, ...]] = dict.fromkeys(range(len(found)), (KEEP,))
        engine = _Engine(items, recipes, Watch(None, holds_output=True, gradients_fit=(True, True)))
        modes: dict[nn.Module, bool] = {}
    else:
        _refuse_more(plan, units=units, sample=sample, costs=costs)
        modules = units_by_module(model, plan.profile)
        profile, conditions = plan.profile, plan.profile.conditions
        recipes = {index: unit.recipes for index, unit in enumerate(profile.units)}
        if by_size is not None and conditions is not None:
            conditions = replace(conditions, shapes=())  # the picker compares them
        watch = Watch(conditions, holds_output=profile.holds_output, gradients_fit=_gradients_fit(plan))
        engine = _Engine(plan.items, recipes, watch, None if by_size is None else Picker(by_size))
        modes = {module: _mode(model, module, profile.conditions) for module in modules}
    remove(whole)
    if is_captured:
        uncompile(whole)
    keeps_all = not _planned_units(engine)
    _install(model, engine, modules, modes, switches_caches=isinstance(plan, ModelPlan) or not keeps_all)
    return whole


def planned_model(model: nn.Module, profile: Profile) -> nn.Module:
    """The part of a model that a plan is about: without wrappers, unless these were measured too."""
    if class_of_module(model).__name__ != profile.model:
        model = unwrapped_model(model)
    inner: nn.Module = inner_model(model) if profile.engine != "eager" else model
    return inner


@contextmanager
def kept(model: nn.Module, profile: Profile) -> Iterator[None]:
    """Runs a model with everything kept for the time of a ``with`` block, on the kernels that a plan would use."""
    modules = units_by_module(model, profile)
    recipes: dict[int, tuple[Recipe, ...]] = {
        index: (unit.recipes[0].kept,) for index, unit in enumerate(profile.units)
    }
    items = [Leaf(unit, 0) for unit in recipes]
    engine = _Engine(items, recipes, Watch(None, holds_output=True, gradients_fit=(True, True)))
    with suspended(model):
        modes = {module: _mode(model, module, profile.conditions) for module in modules}
        _install(model, engine, modules, modes, switches_caches=False)
        try:
            yield
        finally:
            uninstall_plan(model)


def _install(
    model: nn.Module,
    engine: _Engine,
    modules: dict[nn.Module, list[int]],
    modes: dict[nn.Module, bool],
    *,
    switches_caches: bool,
) -> None:
    planned = _planned_units(engine)
    _install_units(model, engine, modules, modes, planned)
    if switches_caches:
        for cached in cached_models(model):
            install(cached, CachelessForward(cached))
    if planned:
        install(model, _Root(engine, model))


def _install_units(
    model: nn.Module,
    engine: _Engine,
    modules: dict[nn.Module, list[int]],
    modes: dict[nn.Module, bool],
    planned: dict[int, tuple[str, ...]],
) -> None:
    touched = {module: units for module, units in modules.items() if planned.keys() & set(units)}
    for module, units in touched.items():
        install(module, _UnitForward(engine, module, units, training=modes.get(module)))
        for name in {name for unit in units for name in planned.get(unit, ())}:
            inner = module.get_submodule(name)
            if not isinstance(vars(inner).get("forward"), InnerForward):
                install(inner, InnerForward(inner))
    for sequential, slices in slices_by_sequential(model, touched).items():
        install(sequential, SlicedForward(sequential, slices))


def _refuse_more(plan: Any, **given: Any) -> None:
    if not isinstance(plan, ModelPlan):
        raise ApplyError(
            f"apply takes a plan, or a policy such as recoup.policies.EveryN(2); got a {type(plan).__name__}. Of what"
            " recoup.fit returns, take .plan."
        )
    for name, value in given.items():
        if value is not None:
            raise ApplyError(f"{name}= goes with a policy; a plan has its own. Leave it out.")


def _gradients_fit(plan: ModelPlan) -> tuple[bool, bool]:
    """Whether gradients of the step before fit the budget beside a plan's forward, and beside its backward."""
    profile = plan.profile
    if profile.accumulates:
        return True, True
    actions, timeline = plan.schedule.schedule.actions, plan.schedule.predicted.timeline
    first = next(index for index, action in enumerate(actions) if isinstance(action, Backward))
    spare_bytes = plan.budget_bytes - profile.residents.gradient_bytes
    forward_bytes = max(moment.num_bytes for moment in timeline if moment.action < first)
    is_known = profile.conditions is not None and profile.conditions.stale_gradients
    return is_known or forward_bytes <= spare_bytes, plan.predicted_bytes <= spare_bytes


def _mode(model: nn.Module, unit: nn.Module, conditions: Conditions | None) -> bool:
    """Whether a unit's plan is for training mode: the unit's own mode, unless the whole model has changed since."""
    if conditions is None or model.training == conditions.training:
        return unit.training
    return conditions.training


def units_by_module(model: nn.Module, profile: Profile) -> dict[nn.Module, list[int]]:
    """The indices of a plan's units, by the modules of a model.

    Raises:
        ApplyError: the plan was made for another model.
    """
    name = class_of_module(model).__name__
    if name != profile.model:
        raise ApplyError(
            f"The plan was made for a {profile.model}, and this model is a {name}."
            " Measure and plan this model."
        )
    modules: dict[str, nn.Module] = {}
    found: dict[nn.Module, list[int]] = {}
    for index, unit in enumerate(profile.units):
        if unit.module is None:
            continue
        what = repr(unit.module)
        try:
            if unit.module not in modules:
                modules[unit.module] = find_module(model, unit.module)
            for name in sorted({name for recipe in unit.recipes for name in recipe.inner}):
                what = f"{name!r} inside {unit.module!r}"
                modules[unit.module].get_submodule(name)
        except AttributeError:
            raise ApplyError(
                f"The plan decides about {what}, which this model does not have. Measure and plan this model."
            ) from None
        found.setdefault(modules[unit.module], []).append(index)
    return found


def _planned_units(engine: _Engine) -> dict[int, tuple[str, ...]]:
    """Units that are not simply kept, each with the modules inside that any of its recipes checkpoints."""
    planned: dict[int, tuple[str, ...]] = {}
    for item in engine.items if engine.picker is None else engine.picker.all_items():
        for leaf in leaves_of([item]):
            recipe = engine.recipes[leaf.unit][leaf.option]
            if isinstance(item, Segment) or recipe != KEEP:
                planned[leaf.unit] = (*planned.get(leaf.unit, ()), *recipe.inner)
    return planned


def remove(model: nn.Module) -> nn.Module:
    """Removes the plan from a model, which is then as before; does nothing to a model without one."""
    uninstall_plan(model)
    recompile(model)
    return model


class Earlier:
    """What is on a model, to be put back if a fit fails."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._stand_ins, self._runs_eagerly = model, installed(model), is_uncompiled(model)

    def put_back(self) -> None:
        """Puts it back."""
        remove(self._model)
        for stand_in in reversed(self._stand_ins):
            install(stand_in.module, stand_in)
        if self._runs_eagerly:
            uncompile(self._model)


def is_applied(model: nn.Module) -> bool:
    """Whether a plan is on the model."""
    return bool(installed(model))


def picked_size(model: nn.Module) -> Size | None:
    """The size of the batch that a model under plans by size was last called with; ``None`` before the first."""
    pickers = [one.engine.picker for one in installed(model) if isinstance(one, _Root)]
    return next((picker.size for picker in pickers if picker is not None), None)
