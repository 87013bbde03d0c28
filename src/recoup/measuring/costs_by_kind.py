"""Bytes and seconds by kinds of calls, as the passes of one measurement find them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from recoup.measuring.problem.costs import CodeSeconds, RecipeCosts, StepCosts
from recoup.measuring.stream.seen import Structure
from recoup.measuring.unit.foreseen import foresee_bytes, foresee_timing
from recoup.measuring.unit.one_unit import CallBytes, CallTiming
from recoup.measuring.unit.pace import USUAL_PACE, Pace
from recoup.measuring.unit.recipes import Effort, useful_recipes
from recoup.model.accumulation import Accumulates
from recoup.model.conditions import Conditions
from recoup.model.recipe import Recipe
from recoup.plans.profile import Residents

__all__ = ["CostsByKind", "Kind", "with_foreseen"]

Kind = Any
"""`SeenCall.cost_key`: calls with the same one share all measurements."""


@dataclass
class CostsByKind:
    """What was found so far.

    Attributes:
        structure: the step's calls and what passes between them.
        first: by kind, the call whose bytes are measured.
        timed: by kind, the call that is timed.
        effort: how thoroughly to measure.
        accumulates: whether gradients are there when a step begins.
        unsafe: by unit name, why it must be kept.
        inside_s: by call, seconds of the modules inside it.
        uncaptured: by unit name, why a unit runs eagerly beside captured ones.
        recipes: by kind, those that are measured.
        later: by kind, those that wait until a plan would use them.
        in_order: whether all recipes are options, in their order.
        sizes: by kind and recipe, bytes.
        timings: by kind and recipe, seconds.
        code_s: of the code before each call, and of the tail last.
        residents: what lives all the time.
        pace: of the step.
        conditions: what the model was called with.
    """

    structure: Structure
    first: Mapping[Kind, int]
    timed: dict[Kind, int]
    effort: Effort
    accumulates: Accumulates
    unsafe: Mapping[str, str]
    inside_s: Mapping[int, Mapping[str, float]]
    uncaptured: Mapping[str, str]
    recipes: dict[Kind, list[Recipe]]
    later: dict[Kind, list[Recipe]] = field(default_factory=dict)
    in_order: bool = False
    sizes: dict[Kind, dict[Recipe, CallBytes]] = field(default_factory=dict)
    timings: dict[Kind, dict[Recipe, CallTiming]] = field(default_factory=dict)
    code_s: tuple[CodeSeconds, ...] = ()
    residents: Residents = field(default_factory=lambda: Residents(0, 0, 0, 0, 0))
    pace: Pace = USUAL_PACE
    conditions: Conditions | None = None

    def own_cut(self, kind: Kind) -> Recipe | None:
        """How a call of a kind is kept; ``None`` if that does not fit the memory."""
        return next((recipe for recipe in self.timings[kind] if recipe.is_kept), None)

    def costs(self) -> StepCosts:
        """All of it as the costs of a step."""
        calls = self.structure.calls
        useful = {kind: self._useful(kind, index) for kind, index in self.timed.items()}
        options = tuple(
            tuple(
                option
                for option in useful[seen.cost_key]
                if option.recipe.is_kept or seen.name not in self.unsafe
            )
            for seen in calls
        )
        once = frozenset(
            index
            for index, seen in enumerate(calls)
            if seen.name in self.unsafe or self._cannot_replay(seen.cost_key)
        )
        copied_bytes = tuple(
            {recipe: size.held_bytes for recipe, size in self.sizes[seen.cost_key].items() if recipe.whole}
            for seen in calls
        )
        return StepCosts(
            self.structure, options, self.code_s, self.residents, self.accumulates, once, copied_bytes
        )

    def _useful(self, kind: Kind, index: int) -> list[RecipeCosts]:
        timings, keep = self.timings[kind], self.own_cut(kind)
        kept = None if keep is None else timings[keep]
        seconds = {recipe: self.pace.seconds(timing, kept) for recipe, timing in timings.items()}
        sizes = {recipe: self.sizes[kind][recipe] for recipe in seconds}
        in_order: Sequence[Recipe] | None = self.recipes[kind] if self.in_order else None
        return useful_recipes(sizes, seconds, self.inside_s.get(index, {}), in_order)

    def _cannot_replay(self, kind: Kind) -> bool:
        """Whether replays of the whole unit were tried, and all failed."""
        found = self.sizes[kind]
        return any(recipe.whole for recipe in self.recipes[kind]) and not any(
            recipe.whole for recipe in found
        )


def with_foreseen(found: CostsByKind) -> CostsByKind:
    """The same, with what is foreseen of the recipes that wait."""
    sizes, timings = dict(found.sizes), dict(found.timings)
    for kind, recipes in found.later.items():
        own = found.own_cut(kind)
        for recipe in recipes if own is not None else ():
            assert own is not None
            assert recipe.cut is not None, "only cuts wait"
            sizes[kind] = {**sizes[kind], recipe: foresee_bytes(recipe.cut, sizes[kind][own])}
            timings[kind] = {**timings[kind], recipe: foresee_timing(recipe.cut, timings[kind][own])}
    return replace(found, sizes=sizes, timings=timings)
