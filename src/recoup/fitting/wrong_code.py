"""Generated code that is wrong: which cut it was generated for, and the profile without that.

torch's compiler generates wrong code at times: with torch 2.13 on a CPU with several threads, some cuts of a T5's
attention gave a wrong gradient of its table of positions. Gradients under a plan are compared with those of the code
with everything kept, so that it shows.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import nn

from recoup.engines import ModelPlan
from recoup.errors import VerificationError
from recoup.model.recipe import Recipe
from recoup.model.slices import find_module
from recoup.planning.problem import with_numbered_options
from recoup.plans.profile import Profile
from recoup.plans.tree import leaves_of

__all__ = ["WrongCodeError", "without", "wrong_cut"]


class WrongCodeError(VerificationError):
    """Gradients under a plan are wrong, and the code of one of its cuts may be why.

    Attributes:
        original: the error that says which gradients.
        recipe: with that cut.
        reason: for the report.
    """

    def __init__(self, original: VerificationError, recipe: Recipe, unit: str) -> None:
        super().__init__(str(original))
        self.original, self.recipe = original, recipe
        self.reason = (
            f"torch's compiler generated wrong code for {unit!r} ({recipe.name}; gradients differ:"
            f" {', '.join(original.gradients[:3])}): that cut was left out."
        )


def wrong_cut(model: nn.Module, plan: ModelPlan, wrong: Collection[str]) -> tuple[Recipe, str] | None:
    """The recipe that may be why gradients are wrong, and the name of a unit that runs under it.

    It is that of the last unit with a wrong gradient, or of the next one with a further cut: a backward hands what is
    wrong on to the units before it. Parameters of several units, such as tied weights, tell little; where no others are
    wrong, the first unit counts. ``None`` if there is no such unit.

    Args:
        model: that runs under the plan.
        plan: some of whose gradients are wrong.
        wrong: the names of the parameters whose gradients they are.
    """
    units = plan.profile.units
    owners: dict[int, list[int]] = {}
    for index, unit in enumerate(units):
        for parameter in [] if unit.module is None else find_module(model, unit.module).parameters():
            owners.setdefault(id(parameter), []).append(index)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found = [owners.get(id(parameters[name]), []) for name in wrong if name in parameters]
    firsts = [own[0] for own in found if len(own) == 1] or [own[0] for own in found if own]
    for leaf in sorted(leaves_of(plan.items), key=lambda leaf: leaf.unit):
        recipe = plan.recipe(leaf)
        if firsts and leaf.unit >= max(firsts) and recipe.cut is not None and recipe.cut.saves is not None:
            return recipe, units[leaf.unit].name
    return None


def without(profile: Profile, recipe: Recipe) -> Profile:
    """The profile without a recipe, in all of its units."""
    kept = [[i for i, own in enumerate(unit.recipes) if own != recipe] for unit in profile.units]
    units = [
        replace(
            unit,
            recipes=tuple(unit.recipes[index] for index in indices),
            num_stored=tuple(unit.num_stored[index] for index in indices if unit.num_stored),
        )
        for unit, indices in zip(profile.units, kept, strict=True)
    ]
    return replace(profile, units=tuple(units), problem=with_numbered_options(profile.problem, kept))
