"""Which recipes are worth measuring for a unit, and which of those are worth planning with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from recoup.measuring.problem.costs import RecipeCosts
from recoup.measuring.unit.one_unit import CallBytes, CallSeconds
from recoup.model.recipe import KEEP, RECOMPUTE, Recipe

__all__ = ["promising_recipes", "useful_recipes"]

_WORTH_SHARE = 0.02
# A replay may stop early, but not before this share of its forward.
_LEAST_REPLAY = 0.25
# What a replay takes beyond this share of its forward, it takes to set aside what it saves. A little less than all of
# it, since between equals planners may choose either.
_WHOLE_REPLAY = 0.999


def promising_recipes(
    saved_bytes: Mapping[str, int], forward_s: Mapping[str, float], *, num_partial: int = 4
) -> list[Recipe]:
    """Recipes for a unit, given what the modules inside it save and how long they take.

    In order of bytes freed for each second of replay, each next recipe recomputes one module more. The last
    one recomputes the whole unit and, inside its replay, each of them again: the least memory of all.

    >>> [recipe.name for recipe in promising_recipes({"norm": 80, "mlp": 90}, {"norm": 1.0, "mlp": 9.0})]
    ['keep', 'recompute', 'recompute norm', 'recompute norm, mlp', 'recompute, then again norm, mlp']
    """
    total_bytes = sum(saved_bytes.values())
    worth = [name for name, size in saved_bytes.items() if size > _WORTH_SHARE * total_bytes]
    worth.sort(key=lambda name: -saved_bytes[name] / max(forward_s.get(name, 0.0), 1e-9))
    prefixes = [tuple(worth[:count]) for count in range(1, len(worth) + 1)]
    if len(prefixes) > num_partial:
        # Spread over all of them; a single one lies in the middle.
        step = (len(prefixes) - 1) / max(num_partial - 1, 1)
        offset = len(prefixes) // 2 if num_partial == 1 else 0
        prefixes = [prefixes[offset + round(index * step)] for index in range(num_partial)]
    partial = [Recipe(inner=prefix) for prefix in prefixes]
    nested = [Recipe(whole=True, inner=tuple(worth))] if len(worth) > 1 else []
    return [KEEP, RECOMPUTE, *partial, *nested]


def useful_recipes(
    sizes: Mapping[Recipe, CallBytes], seconds: Mapping[Recipe, CallSeconds], inside_s: Mapping[str, float]
) -> list[RecipeCosts]:
    """The measured recipes, fastest first, without those that need no fewer bytes than a faster one.

    To recompute takes time; where it was measured to take none, that is noise, and a part of what it repeats is added.
    What a whole unit's replay takes beyond its forward is what it costs to replay it in a segment, too.
    """
    keep_s = seconds.get(KEEP, CallSeconds(0.0, 0.0))
    # Whole units are forgotten in the same way, whatever their replays do.
    whole_s = min((seconds[recipe].forward_s for recipe in sizes if recipe.whole), default=0.0)
    least: dict[Recipe, CallSeconds] = {}
    for recipe in sorted(sizes, key=lambda recipe: (recipe != KEEP, len(recipe.inner))):
        # What this recipe repeats beyond a simpler one: a nested recompute beyond the plain one.
        simpler_s = least.get(RECOMPUTE, keep_s) if recipe.whole and recipe.inner else keep_s
        repeated_s = sum(inside_s.get(name, 0.0) for name in recipe.inner)
        repeated_s += keep_s.forward_s if recipe.whole and simpler_s is keep_s else 0.0
        least[recipe] = CallSeconds(
            max(whole_s if recipe.whole else seconds[recipe].forward_s, keep_s.forward_s),
            max(seconds[recipe].backward_s, simpler_s.backward_s + _LEAST_REPLAY * repeated_s),
        )
    again = _again_s(least)
    options = [
        RecipeCosts(recipe, sizes[recipe], replace(least[recipe], again_s=again.get(recipe, 0.0)))
        for recipe in sizes
    ]
    options.sort(key=lambda o: (o.recipe != KEEP, o.seconds.forward_s + o.seconds.backward_s))
    useful: list[RecipeCosts] = []
    for option in options:
        if not any(_needs_no_more(other.bytes, option.bytes) for other in useful):
            useful.append(option)
    return useful


def _again_s(seconds: Mapping[Recipe, CallSeconds]) -> dict[Recipe, float]:
    """What recipes take longer in the replay of a whole unit, or of more than that.

    Where this was measured, the planner then never finds it faster to put the two together itself, whose bytes are less
    exact. Where it was not, it takes as much longer as keeping does.
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
