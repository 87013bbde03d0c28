"""Comparing gradients unit by unit, where the plain step does not fit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from recoup.checkpointing.fingerprints import on_host
from recoup.engines.drift import Drift, Results, deterministically, drift_between, list_drifts, too_far
from recoup.engines.eager import units_by_module
from recoup.errors import VerificationError
from recoup.model.cut_graph import gradients_from, seeded
from recoup.model.preserve import preserving
from recoup.model.recipe import KEEP, InnerForward, Recipe, run_recipe
from recoup.model.replace_forward import intercepted
from recoup.model.step import TrainingStep
from recoup.model.streaming import UnitCall, Visitor, stream
from recoup.model.undo import undone
from recoup.plans.model_plan import ModelPlan
from recoup.plans.tree import leaves_of
from recoup.tensors import needing_gradient

__all__ = ["Compared", "compare_units"]


@dataclass
class Compared:
    """What a comparison unit by unit found.

    Attributes:
        num_units: how many units there were to compare.
        skipped: units for which the memory did not suffice.
        drifting: results that are not bit-equal, of units whose plain runs are not either.
    """

    num_units: int = 0
    skipped: list[str] = field(default_factory=list)
    drifting: list[Drift] = field(default_factory=list)


def compare_units(step: TrainingStep, plan: ModelPlan) -> Compared:
    """Streams the step and compares each unit's outputs and gradients, kept and as the plan says.

    Raises:
        VerificationError: something differs; it names unit and parameter.
    """
    recipes = {plan.profile.units[leaf.unit].name: plan.recipe(leaf) for leaf in leaves_of(plan.items)}
    modules = units_by_module(step.model, plan.profile)
    inner = {
        module.get_submodule(name)
        for module, units in modules.items()
        for unit in units
        for recipe in plan.profile.units[unit].recipes
        for name in recipe.inner
    }
    comparer = _Comparer(recipes)
    with step.plain(), intercepted({module: InnerForward(module) for module in inner}):
        stream(step, list(modules), comparer)
    return comparer.compared


class _Comparer(Visitor):
    """The visitor of `compare_units`."""

    def __init__(self, recipes: dict[str, Recipe]) -> None:
        self.recipes = recipes
        self.compared = Compared()

    def enter(self, call: UnitCall) -> None:
        with undone(call) as repeatable:
            self._compare(repeatable)

    def _compare(self, call: UnitCall) -> None:
        recipe = self.recipes.get(call.name, KEEP)
        # A unit inside a segment is replayed under a recipe that may keep: then the segment's own replay is the same.
        recipe, kept = replace(recipe, whole=True), recipe.kept
        self.compared.num_units += 1
        try:
            plain = deterministically(lambda: _results(call, kept))
            replayed = deterministically(lambda: _results(call, recipe))
            found = drift_between(plain, replayed)
            if not found:
                return
            own = drift_between(plain, deterministically(lambda: _results(call, kept)))
        except torch.OutOfMemoryError:
            self.compared.skipped.append(call.name)
            return
        if wrong := too_far(found) if own else found:
            raise VerificationError(
                f"Replayed, unit {call.name!r} does not give what it gives when it is kept: {list_drifts(wrong)}."
                " Run recoup.audit on the model."
            )
        self.compared.drifting += [drift._replace(name=f"{call.name}: {drift.name}") for drift in found]

    def restart(self) -> None:
        self.compared = Compared()


def _results(call: UnitCall, recipe: Recipe) -> Results:
    """A unit's outputs and the gradients of its parameters, from the same state each time."""
    named = {name: p for name, p in call.module.named_parameters() if p.requires_grad}
    with preserving(call.module):
        args, kwargs, start = call.fresh()
        output = run_recipe(recipe, call.module, call.fn, args, kwargs)
        # Units without parameters have nothing else, and within a segment the next unit starts from it.
        results = {f"output {i}": on_host(t) for i, t in enumerate(needing_gradient(output))}
        seed = seeded(output)
        del output
        gradients = (None,) if seed is None else gradients_from([seed], [start, *named.values()])
    found = zip(["its input", *named], gradients, strict=False)
    return results | {f"gradient of {name}": on_host(g) for name, g in found if g is not None}
