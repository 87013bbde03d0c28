"""``apply`` and ``remove``: a plan or a policy on a model, in place, without a visible trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from recoup.engines.by_policy import arrange
from recoup.engines.by_size import Picker
from recoup.engines.stand_ins import Engine, KeptRoot, Root, UnitForward, UnseenForward
from recoup.engines.watching import Watch
from recoup.errors import ApplyError
from recoup.given import check_given
from recoup.model.caches import CachelessForward, cached_models
from recoup.model.calls import class_of_module
from recoup.model.checks import check_model
from recoup.model.conditions import Conditions
from recoup.model.recipe import KEEP, RECOMPUTE, InnerForward, Recipe
from recoup.model.replace_forward import (
    StandIn,
    allow_replicas,
    install,
    installed,
    suspended,
    uninstall_plan,
)
from recoup.model.slices import SlicedForward, find_module, slices_by_sequential
from recoup.model.uncompile import inner_model, is_uncompiled, recompile, uncompile
from recoup.model.units import Units
from recoup.model.wrappers import unwrapped_model
from recoup.planning import Backward
from recoup.plans.by_size.axes import Size
from recoup.plans.by_size.plans import PlansBySize
from recoup.plans.model_plan import ModelPlan
from recoup.plans.profile import Profile
from recoup.plans.tree import Leaf
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
    a model that is traced, exported, compiled or transformed by torch.func. Units that are kept are not touched.

    Decoders that fill a key-value cache by default do not in training, unless the caller passes ``use_cache``. A
    plan that keeps everything switches the cache off too: the step was measured without it. A policy that keeps
    everything changes nothing.

    With a plan, a training call that leaves what was measured gives a `RecoupWarning`, once of each kind: larger
    inputs, other autocast, another mode, more forwards before a backward, more calls of a unit, layers that were
    skipped, more parameters that are trained, checkpoints of the model's own, an output that is held, gradients that
    are there when a forward begins.

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

    >>> import torch
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
        engine = Engine(items, recipes, Watch(None, holds_output=True, gradients_fit=(True, True)))
        modes: dict[nn.Module, bool] = {}
    else:
        _refuse_more(plan, units=units, sample=sample, costs=costs)
        modules = units_by_module(model, plan.profile)
        profile, conditions = plan.profile, plan.profile.conditions
        recipes = {index: unit.recipes for index, unit in enumerate(profile.units)}
        if by_size is not None and conditions is not None:
            conditions = replace(conditions, shapes=())  # the picker compares them
        watch = Watch(conditions, holds_output=profile.holds_output, gradients_fit=_gradients_fit(plan))
        engine = Engine(plan.items, recipes, watch, None if by_size is None else Picker(by_size))
        modes = {module: _mode(model, module, profile.conditions) for module in modules}
    remove(whole)
    if is_captured:
        uncompile(whole)
    keeps_all = not engine.planned()
    _install(model, engine, modules, modes, switches_caches=isinstance(plan, ModelPlan) or not keeps_all)
    if isinstance(plan, ModelPlan) and plan.profile.conditions is not None:
        for module, may_replay in _unseen(model, modules, plan).items():
            install(module, UnseenForward(engine, module, may_replay=may_replay))
    return whole


def planned_model(model: nn.Module, profile: Profile) -> nn.Module:
    """The part of a model that a plan is about: without wrappers, unless these were measured too."""
    if class_of_module(model).__name__ != profile.model:
        model = unwrapped_model(model)
    inner: nn.Module = inner_model(model) if profile.engine != "eager" else model
    return inner


@contextmanager
def kept(model: nn.Module, profile: Profile, made: list[StandIn]) -> Iterator[None]:
    """Runs a model with everything kept for the time of a ``with`` block; captured units stay captured.

    Args:
        model: to run.
        profile: of its step.
        made: the stand-ins of an earlier block, which this one takes again; filled by the first.
    """
    with suspended(model):
        if made:
            for stand_in in reversed(made):
                install(stand_in.module, stand_in)
        else:
            _keep(model, profile)
            made += [stand_in for stand_in in installed(model) if stand_in.is_planned]
        try:
            yield
        finally:
            uninstall_plan(model)


def _keep(model: nn.Module, profile: Profile) -> None:
    modules = units_by_module(model, profile)
    recipes: dict[int, tuple[Recipe, ...]] = {
        index: (unit.recipes[0].uncut,) for index, unit in enumerate(profile.units)
    }
    items = [Leaf(unit, 0) for unit in recipes]
    engine = Engine(items, recipes, Watch(None, holds_output=True, gradients_fit=(True, True)))
    modes = {module: _mode(model, module, profile.conditions) for module in modules}
    _install(model, engine, modules, modes, switches_caches=False)


def _install(
    model: nn.Module,
    engine: Engine,
    modules: dict[nn.Module, list[int]],
    modes: dict[nn.Module, bool],
    *,
    switches_caches: bool,
) -> None:
    planned = engine.planned()
    _install_units(model, engine, modules, modes, planned)
    if switches_caches:
        for cached in cached_models(model):
            install(cached, CachelessForward(cached))
    if planned:
        install(model, Root(engine, model))
    elif engine.watch.conditions is not None:
        install(model, KeptRoot(engine, model))


def _install_units(
    model: nn.Module,
    engine: Engine,
    modules: dict[nn.Module, list[int]],
    modes: dict[nn.Module, bool],
    planned: dict[int, tuple[str, ...]],
) -> None:
    touched = {module: units for module, units in modules.items() if planned.keys() & set(units)}
    for module, units in touched.items():
        install(module, UnitForward(engine, module, units, training=modes.get(module)))
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


def _unseen(model: nn.Module, modules: dict[nn.Module, list[int]], plan: ModelPlan) -> dict[nn.Module, bool]:
    """Layers of a list that the measured step did not call, beside units of their class; whether each may be replayed.

    None if all of them could be kept within the budget.
    """
    profile, inside = plan.profile, {child for unit in modules for child in unit.modules()}
    found: dict[nn.Module, bool] = {}
    num_bytes = 0
    for layers in (module for module in model.modules() if isinstance(module, nn.ModuleList)):
        safe: dict[type[nn.Module], bool] = {}
        held_bytes: dict[type[nn.Module], int] = {}
        for layer in layers:
            kind = class_of_module(layer)
            for index in modules.get(layer, ()):
                unit, options = profile.units[index], profile.problem.units[index].options
                safe[kind] = safe.get(kind, True) and not unit.unsafe and RECOMPUTE in unit.recipes
                held_bytes[kind] = max(held_bytes.get(kind, 0), options[0].held_bytes)
        for layer in layers:
            kind = class_of_module(layer)
            if kind in safe and layer not in inside and modules.keys().isdisjoint(layer.modules()):
                found[layer] = safe[kind]
                num_bytes += held_bytes[kind]
    return found if num_bytes > plan.budget_bytes - plan.predicted_bytes else {}


def remove(model: nn.Module) -> nn.Module:
    """Removes the plan from a model, which is then as before; does nothing to a model without one."""
    check_given(model, nn.Module, "remove takes a model, such as .model of what recoup.fit returns")
    uninstall_plan(model)
    allow_replicas(model)
    recompile(model)
    return model


class Earlier:
    """What is on a model, to be put back: if a fit fails, or when a raced plan has its next turn."""

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
    pickers = [one.engine.picker for one in installed(model) if isinstance(one, Root)]
    return next((picker.size for picker in pickers if picker is not None), None)
