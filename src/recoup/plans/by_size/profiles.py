"""A step that was measured at several sizes: its profile at any size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any

from recoup.errors import SampleError
from recoup.planning.documents import encode
from recoup.plans.by_size.axes import Axis, Size, find_axes, size_of, volume
from recoup.plans.by_size.growth import Growth
from recoup.plans.combined import combined
from recoup.plans.profile import Profile
from recoup.plans.profile_json import decode_profile

__all__ = ["SizedProfiles", "in_order", "sized_profiles"]


@dataclass(frozen=True)
class SizedProfiles:
    """Profiles of the same step with batches of several sizes.

    Attributes:
        axes: along which they differ.
        sizes: one for each profile, in order of volume.
        profiles: with the same units and recipes.
    """

    axes: tuple[Axis, ...]
    sizes: tuple[Size, ...]
    profiles: tuple[Profile, ...]

    @property
    def limits(self) -> Size:
        """The largest number along each axis."""
        return tuple(map(max, zip(*self.sizes, strict=True)))

    @property
    def largest(self) -> Profile:
        """Of the largest batch."""
        return self.profiles[-1]

    def is_measured(self, size: Size) -> bool:
        """Whether a size is no larger than what was measured."""
        within = all(value <= limit for value, limit in zip(size, self.limits, strict=True))
        return within and volume(size) <= volume(self.sizes[-1])

    def at(self, size: Size) -> Profile:
        """The profile for a size: as measured or, between measured sizes and beyond them, worked out."""
        if size in self.sizes:
            return self.profiles[self.sizes.index(size)]

        def number(found: Sequence[Any]) -> Any:
            value = self._growth.at(size, tuple(found))
            return ceil(value - 1e-6) if all(isinstance(one, int) for one in found) else value

        return decode_profile(combined(self._documents, number, _refuse))

    def size_of(self, profile: Profile) -> Size:
        """The size of the batch that a profile was measured with."""
        return _size(self.axes, profile)

    def with_resident(self, more_bytes: int) -> SizedProfiles:
        """The same with more bytes that are there for the whole step."""
        return replace(self, profiles=tuple(_with_resident(one, more_bytes) for one in self.profiles))

    @cached_property
    def _growth(self) -> Growth:
        return Growth(self.sizes)

    @cached_property
    def _documents(self) -> list[Any]:
        return _aligned([encode(profile) for profile in self.profiles])


def sized_profiles(profiles: Sequence[Profile]) -> SizedProfiles:
    """Puts profiles of several samples in order.

    Raises:
        SampleError: they are not of the same step; or of one size.
    """
    shapes = [dict(profile.conditions.shapes) if profile.conditions else {} for profile in profiles]
    if not all(shapes):
        raise SampleError(
            "The step never calls the model itself, so the size of a batch cannot be read from its arguments: let the"
            " step call the model, or fit one sample."
        )
    return in_order(find_axes(shapes), profiles)


def in_order(axes: tuple[Axis, ...], profiles: Sequence[Profile]) -> SizedProfiles:
    """Puts profiles that differ along some axes in order.

    Raises:
        SampleError: they are not of the same step.
    """
    pairs = {_size(axes, profile): profile for profile in reversed(profiles)}
    ordered = sorted(pairs, key=volume)
    found = SizedProfiles(axes, tuple(ordered), tuple(pairs[size] for size in ordered))
    combined(found._documents, max, _refuse)
    return found


def _size(axes: Sequence[Axis], profile: Profile) -> Size:
    found = size_of(axes, dict(profile.conditions.shapes)) if profile.conditions else None
    assert found is not None, "axes are found in what all profiles have"
    return found


def _with_resident(profile: Profile, more_bytes: int) -> Profile:
    problem = profile.problem
    return replace(profile, problem=problem.with_resident(problem.resident_bytes + more_bytes))


def _aligned(documents: list[Any]) -> list[Any]:
    """The same with the same values in each; where one has none of it, with no bytes."""
    keyed = [
        {json.dumps({**value, "num_bytes": 0}, sort_keys=True): value for value in one["problem"]["values"]}
        for one in documents
    ]
    keys = list(dict.fromkeys(key for values in keyed for key in values))
    return [
        {
            **one,
            "problem": {
                **one["problem"],
                "values": [values.get(key, json.loads(key)) for key in keys],
            },
        }
        for one, values in zip(documents, keyed, strict=True)
    ]


def _refuse(where: str) -> SampleError:
    return SampleError(
        f"The steps of the samples differ in more than their numbers ({where}): fit the model with samples that run the"
        " same code, or with the largest one alone."
    )
