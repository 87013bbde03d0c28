"""How much to measure: blocks that are alike are measured thoroughly, many that are not in less detail."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recoup.measuring.stream.structure import SeenCall
from recoup.measuring.unit.recipes import promising_recipes
from recoup.model.recipe import KEEP, RECOMPUTE, Recipe

__all__ = ["Effort"]

# What saves less than this share of all that units save gets only the two usual recipes.
_SMALL_SHARE = 0.04


@dataclass(frozen=True)
class Effort:
    """What to try on units of each kind, so that measuring takes a few steps' time.

    Attributes:
        large: what calls do (`SeenCall.behaviour`) that save a share of the memory worth deciding about in detail.
        num_partial: how many recipes that recompute parts of a unit. The bytes of each are measured for each kind.
        repeats: how often each is timed, for one of all calls that do the same.
        warm_up: how often each runs before that; what measured its bytes was a run, too.
    """

    large: frozenset[Any] = field(repr=False)
    num_partial: int
    repeats: int
    warm_up: int

    @classmethod
    def for_calls(cls, calls: Sequence[SeenCall]) -> Effort:
        """The effort for a step's calls."""
        saved: dict[Any, int] = defaultdict(int)
        for seen in calls:
            saved[seen.behaviour] += sum(seen.saved_inside.values())
        total = sum(saved.values())
        large = frozenset(behaviour for behaviour, size in saved.items() if size > _SMALL_SHARE * total)
        num_kinds = len({seen.kind for seen in calls if seen.behaviour in large})
        num_partial = 4 if num_kinds <= 2 else 2 if num_kinds <= 4 else 1
        if len(large) <= 2:
            return cls(large, num_partial, repeats=3, warm_up=1)
        if len(large) <= 4:
            return cls(large, num_partial, repeats=2, warm_up=1)
        return cls(large, num_partial, repeats=1, warm_up=0)

    def recipes(
        self, seen: SeenCall, inside_s: Mapping[str, float], unsafe: Mapping[str, str]
    ) -> list[Recipe]:
        """What to try on a call."""
        if not seen.gradients or seen.name in unsafe:
            return [KEEP]
        if seen.behaviour not in self.large:
            return [KEEP, RECOMPUTE]
        return promising_recipes(seen.saved_inside, inside_s, num_partial=self.num_partial)
