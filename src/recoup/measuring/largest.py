"""What several ranks have measured of the same calls: the largest bytes, the slowest seconds.

Which recipes are measured, and which are worth planning with, depends on these numbers: all ranks find the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any, TypeVar

from recoup.errors import FitError
from recoup.measuring.stream.seen import SeenCall
from recoup.measuring.unit.one_unit import CallBytes, CallTiming
from recoup.model.recipe import Recipe
from recoup.ranks import SAME_STEP, Ranks

__all__ = ["largest_costs", "slowest_inside"]

Kind = TypeVar("Kind")
Sizes = Mapping[Kind, Mapping[Recipe, CallBytes]]
Timings = Mapping[Kind, Mapping[Recipe, CallTiming]]


def slowest_inside(
    ranks: Ranks, calls: Sequence[SeenCall], seconds: dict[int, dict[str, float]]
) -> dict[int, dict[str, float]]:
    """Seconds of modules inside units, by the call's index, of the slowest rank.

    Raises:
        FitError: the ranks do not call the same units, or other ones are alike.
    """
    kinds: dict[Any, int] = {}
    names = [(seen.name, kinds.setdefault(seen.cost_key, len(kinds))) for seen in calls]
    found = ranks.gathered((names, seconds))
    for rank, (others, _) in enumerate(found):
        if others != found[0][0]:
            pairs = zip([*others, (None, 0)], [*found[0][0], (None, 0)], strict=False)
            theirs, ours = next((one, other) for one, other in pairs if one != other)
            raise FitError(
                f"Rank {rank} calls {theirs[0]!r} where rank 0 calls {ours[0]!r}, or in another way. {SAME_STEP}"
            )
    return {
        index: {name: max(one.get(index, {}).get(name, 0.0) for _, one in found) for name in inside}
        for index, inside in seconds.items()
    }


def largest_costs(
    ranks: Ranks, sizes: Sizes[Kind], timings: Timings[Kind]
) -> tuple[dict[Kind, dict[Recipe, CallBytes]], dict[Kind, dict[Recipe, CallTiming]]]:
    """Bytes and seconds of the recipes that every rank could run."""
    all_sizes = ranks.gathered([dict(found) for found in sizes.values()])
    all_timings = ranks.gathered([dict(timings[kind]) for kind in sizes])
    bytes_of: dict[Kind, dict[Recipe, CallBytes]] = {}
    seconds_of: dict[Kind, dict[Recipe, CallTiming]] = {}
    for index, (kind, own) in enumerate(sizes.items()):
        every = [recipe for recipe in own if all(recipe in found[index] for found in all_sizes)]
        bytes_of[kind] = {recipe: _largest([found[index][recipe] for found in all_sizes]) for recipe in every}
        seconds_of[kind] = {
            recipe: _slowest([found[index][recipe] for found in all_timings])
            for recipe in every
            if all(recipe in found[index] for found in all_timings)
        }
    return bytes_of, seconds_of


def _largest(found: Sequence[CallBytes]) -> CallBytes:
    return CallBytes(*(_most(column) for column in zip(*map(astuple, found), strict=True)))


def _most(column: Sequence[Any]) -> Any:
    """The largest number; of truth values for each tensor, whether any is true."""
    if isinstance(column[0], tuple):
        return tuple(map(max, zip(*column, strict=True)))
    return max(column)


def _slowest(found: Sequence[CallTiming]) -> CallTiming:
    return CallTiming(max(one.forward for one in found), max(one.backward for one in found))
