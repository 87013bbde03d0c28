"""Which recipes are worth measuring for a unit, how thoroughly, and which of them are worth planning with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from recoup.measuring.problem.costs import RecipeCosts
from recoup.measuring.stream.seen import SeenCall
from recoup.measuring.unit.one_unit import CallBytes, CallSeconds
from recoup.model.recipe import KEEP, RECOMPUTE, Recipe

__all__ = ["Effort", "large_behaviours", "promising_recipes", "useful_recipes"]

# Units that save less than this share of what all units save get only the two usual recipes,
_SMALL_SHARE = 0.04
# unless one of their calls saves at least this share of what the largest call saves, as the first of many blocks does,
_LARGE_CALL = 0.5
# and there are no more kinds than these: each takes time to measure, and seconds to compile.
_MOST_LARGE = 8
# Modules that save less than this share of their unit are not recomputed by themselves.
_WORTH_SHARE = 0.02
# A replay may stop early, but not before this share of its forward.
_LEAST_REPLAY = 0.25
# Replay seconds beyond this share of the forward are overhead. A little less than all of it, since between equals
# planners may choose either.
_WHOLE_REPLAY = 0.999


@dataclass(frozen=True)
class Effort:
    """How much to measure, so that it takes a few steps' time: few kinds of units thoroughly, many in less detail.

    Attributes:
        large: behaviours (`SeenCall.behaviour`) that save enough memory to be worth several recipes.
        num_partial: number of recipes that recompute parts of a unit. Each one's bytes are measured for each kind.
        repeats: number of timed runs of each recipe, for one call of each large behaviour; others run once.
        warm_up: number of runs before these, beside the one that measured its bytes.
    """

    large: frozenset[Any] = field(repr=False)
    num_partial: int
    repeats: int
    warm_up: int

    @classmethod
    def for_calls(cls, calls: Sequence[SeenCall]) -> Effort:
        """The effort for a step's calls."""
        saved_bytes = [(seen.behaviour, sum(seen.saved_inside.values())) for seen in calls]
        # A single call more is no reason to look at what there is most of in less detail.
        decisive = _much_in_all(saved_bytes)
        num_kinds = len({seen.kind for seen in calls if seen.behaviour in decisive})
        num_partial = 4 if num_kinds <= 2 else 2 if num_kinds <= 4 else 1
        repeats = 3 if len(decisive) <= 2 else 2 if len(decisive) <= 4 else 1
        return cls(large_behaviours(saved_bytes), num_partial, repeats, warm_up=int(repeats > 1))

    def repeats_of(self, seen: SeenCall) -> int:
        """How often each recipe of a call is timed."""
        return self.repeats if seen.behaviour in self.large or not self.large else 1

    def recipes(
        self, seen: SeenCall, inside_s: Mapping[str, float], unsafe: Mapping[str, str]
    ) -> list[Recipe]:
        """The recipes to measure for a call."""
        if not seen.gradients or seen.name in unsafe:
            return [KEEP]
        if seen.behaviour not in self.large:
            return [KEEP, RECOMPUTE]
        return promising_recipes(seen.saved_inside, inside_s, num_partial=self.num_partial)


def large_behaviours(saved_bytes: Iterable[tuple[Any, int]]) -> frozenset[Any]:
    """The behaviours that save more than a small share of what all calls save; and a few that do so call by call.

    >>> calls = [("first", 20), *[("block", 30)] * 30, ("norm", 9), ("norm", 9)]
    >>> sorted(large_behaviours(calls))
    ['block', 'first']
    """
    calls = list(saved_bytes)
    found = _much_in_all(calls)
    most: dict[Any, int] = {}
    for behaviour, size in calls:
        most[behaviour] = max(size, most.get(behaviour, 0))
    least_bytes = max(1.0, _LARGE_CALL * max(most.values(), default=0))
    others = [one for one, size in most.items() if one not in found and size >= least_bytes]
    others.sort(key=lambda one: -most[one])
    return found | frozenset(others[: max(0, _MOST_LARGE - len(found))])


def _much_in_all(saved_bytes: Iterable[tuple[Any, int]]) -> frozenset[Any]:
    saved: dict[Any, int] = defaultdict(int)
    for behaviour, size in saved_bytes:
        saved[behaviour] += size
    total = sum(saved.values())
    return frozenset(behaviour for behaviour, size in saved.items() if size > _SMALL_SHARE * total)


def promising_recipes(
    saved_bytes: Mapping[str, int], forward_s: Mapping[str, float], *, num_partial: int = 4
) -> list[Recipe]:
    """Recipes for a unit, given the saved bytes and the forward seconds of the modules inside it.

    In order of bytes freed for each second of replay, each next recipe recomputes one module more. The last one
    recomputes the whole unit and, inside its replay, each of them again: the least memory of all.

    >>> [recipe.name for recipe in promising_recipes({"norm": 80, "mlp": 90}, {"norm": 1.0, "mlp": 9.0})]
    ['keep', 'recompute', 'recompute norm', 'recompute norm, mlp', 'recompute, then again norm, mlp']
    """
    total_bytes = sum(saved_bytes.values())
    worth = [name for name, size in saved_bytes.items() if size > _WORTH_SHARE * total_bytes]
    worth.sort(key=lambda name: -saved_bytes[name] / max(forward_s.get(name, 0.0), 1e-9))
    prefixes = [tuple(worth[:count]) for count in range(1, len(worth) + 1)]
    if len(prefixes) > num_partial:
        # Evenly spread; a single one is the middle one.
        step = (len(prefixes) - 1) / max(num_partial - 1, 1)
        offset = len(prefixes) // 2 if num_partial == 1 else 0
        prefixes = [prefixes[offset + round(index * step)] for index in range(num_partial)]
    partial = [Recipe(inner=prefix) for prefix in prefixes]
    nested = [Recipe(whole=True, inner=tuple(worth))] if len(worth) > 1 else []
    return [KEEP, RECOMPUTE, *partial, *nested]


def useful_recipes(
    sizes: Mapping[Recipe, CallBytes],
    seconds: Mapping[Recipe, CallSeconds],
    inside_s: Mapping[str, float],
    in_order: Sequence[Recipe] | None = None,
) -> list[RecipeCosts]:
    """The measured recipes, fastest first, without dominated ones: those that need no fewer bytes than a faster one.

    Given an order, all of them in this order.
    """
    plausible = _plausible_seconds(seconds, inside_s)
    overheads = _replay_overheads(plausible)
    options = [
        RecipeCosts(
            recipe, sizes[recipe], replace(plausible[recipe], replay_overhead_s=overheads.get(recipe, 0.0))
        )
        for recipe in sizes
    ]
    if in_order is not None:
        return sorted(options, key=lambda option: in_order.index(option.recipe))
    options.sort(key=lambda o: (not o.recipe.is_kept, o.seconds.forward_s + o.seconds.backward_s))
    useful: list[RecipeCosts] = []
    for option in options:
        # What another measurement may not have dominates nothing that every one has.
        others = [other for other in useful if option.recipe.by_seconds or not other.recipe.by_seconds]
        if not any(_needs_no_more(other.bytes, option.bytes) for other in others):
            useful.append(option)
    return useful


def _plausible_seconds(
    seconds: Mapping[Recipe, CallSeconds], inside_s: Mapping[str, float]
) -> dict[Recipe, CallSeconds]:
    """Seconds without noise: a recipe that was measured to replay in no time gets a part of what it repeats."""
    keep_s = next((found for recipe, found in seconds.items() if recipe.is_kept), CallSeconds(0.0, 0.0))
    # All recipes of whole units have the same forward.
    whole_s = min((found.forward_s for recipe, found in seconds.items() if recipe.whole), default=0.0)
    plausible: dict[Recipe, CallSeconds] = {}
    for recipe in sorted(seconds, key=lambda recipe: (not recipe.is_kept, len(recipe.inner))):
        # What this recipe repeats beyond a simpler one: a nested recompute beyond the plain one.
        simpler_s = plausible.get(RECOMPUTE, keep_s) if recipe.whole and recipe.inner else keep_s
        repeated_s = sum(inside_s.get(name, 0.0) for name in recipe.inner)
        repeated_s += keep_s.forward_s if recipe.whole and simpler_s is keep_s else 0.0
        plausible[recipe] = CallSeconds(
            max(whole_s if recipe.whole else seconds[recipe].forward_s, keep_s.forward_s),
            max(seconds[recipe].backward_s, simpler_s.backward_s + _LEAST_REPLAY * repeated_s),
        )
    return plausible


def _replay_overheads(seconds: Mapping[Recipe, CallSeconds]) -> dict[Recipe, float]:
    """Extra seconds of recipes inside the replay of a whole unit, or of a segment.

    Where the nested recipe was measured, the planner never finds it faster to nest the two itself, whose bytes would be
    less exact. Where it was not, the overhead is that of keeping.
    """
    found: dict[Recipe, float] = {}
    for recipe in sorted(seconds, key=lambda recipe: len(recipe.inner)):
        if recipe.whole:
            continue
        whole = seconds.get(replace(recipe, whole=True))
        if whole is None:
            found[recipe] = found.get(KEEP, 0.0)
        else:
            replay_s = whole.backward_s - seconds[recipe].backward_s
            found[recipe] = max(0.0, replay_s - _WHOLE_REPLAY * seconds[recipe].forward_s)
    return found


def _needs_no_more(first: CallBytes, second: CallBytes) -> bool:
    arguments = zip(first.holds_arguments, second.holds_arguments, strict=True)
    return (
        first.held_bytes + first.holds_output * first.output_bytes
        <= second.held_bytes + second.holds_output * second.output_bytes
        and all(ours <= theirs for ours, theirs in arguments)
        and first.forward_peak_bytes <= second.forward_peak_bytes
        and first.held_bytes + first.backward_peak_bytes <= second.held_bytes + second.backward_peak_bytes
    )
