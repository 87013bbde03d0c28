"""Which cuts of captured units are worth compiling: compiling one takes longer than all of its measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from recoup.measuring.costs_by_kind import CostsByKind, with_foreseen
from recoup.measuring.measured import Measured
from recoup.model.recipe import Recipe

__all__ = ["Choice", "Choose", "worth_compiling"]

_HARDLY_SLOWER = 1.01
"""A cut without which a plan takes no more than this many times its seconds is left out."""


class Choice(NamedTuple):
    """What a plan would use.

    Attributes:
        seconds: that it is predicted to take.
        num_calls: of units, by the recipe that they run under.
        fits: whether it fits the budget; one that does not needs the least memory of all.
    """

    seconds: float
    num_calls: Mapping[Recipe, int]
    fits: bool = True


Choose = Callable[[Measured], Choice]
"""From a measured step to what a plan for it would use."""


def worth_compiling(found: CostsByKind, plan: Callable[[CostsByKind], Choice]) -> set[Recipe]:
    """Of the recipes that wait, those that a plan would use, by what is foreseen of them.

    Those that few calls would run under are tried first to be left out.
    """
    best = plan(with_foreseen(found))
    waiting = {recipe for own in found.later.values() for recipe in own}
    needed = {recipe for recipe in best.num_calls if recipe in waiting}
    if not best.fits:
        return needed
    for recipe in sorted(needed, key=lambda one: (best.num_calls[one], one.name)):
        fewer = needed - {recipe}
        later = {kind: [one for one in own if one in fewer] for kind, own in found.later.items()}
        without = plan(with_foreseen(replace(found, later=later)))
        if without.fits and without.seconds <= _HARDLY_SLOWER * best.seconds:
            needed = {one for one in fewer if one in without.num_calls}
    return needed
