"""A step that was measured at several sizes: its profile at any size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from operator import le
from typing import Any

from recoup.errors import SampleError
from recoup.planning.documents import encode
from recoup.plans.by_size.axes import Axis, Shapes, Size, find_axes, size_of, volume
from recoup.plans.by_size.growth import ENOUGH_FOR_TWO, Growth
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
        """Whether a batch that was measured is at least as large along every axis."""
        return self.bound_of(size) is not None

    def bound_of(self, size: Size) -> Size | None:
        """The smallest measured size that is at least as large along every axis."""
        found = (one for one in self.sizes if all(map(le, size, one)))
        return next(found, None)

    @property
    def are_enough(self) -> bool:
        """Whether they tell how bytes grow along every axis."""
        return len(self.axes) == 1 or len(self.sizes) >= ENOUGH_FOR_TWO

    @cached_property
    def shapes(self) -> Shapes:
        """For each input of the model, the largest along every dimension."""
        found: dict[str, tuple[int, ...]] = {}
        for profile in self.profiles:
            for name, shape in profile.conditions.shapes if profile.conditions else ():
                found[name] = tuple(map(max, shape, found.get(name, shape)))
        return found

    def larger_elsewhere(self, shapes: Shapes) -> str | None:
        """The name of an input that is larger than any measured one along a dimension that belongs to no axis."""
        known, belongs = self.shapes, {(one.name, one.dim) for axis in self.axes for one in axis.members}
        for name, shape in shapes.items():
            pairs = enumerate(zip(shape, known.get(name, ()), strict=False))
            if any(now > most and (name, dim) not in belongs for dim, (now, most) in pairs):
                return name
        return None

    def at(self, size: Size) -> Profile:
        """The profile for a size: as measured or, between measured sizes and beyond them, worked out."""
        if size in self.sizes:
            return self.profiles[self.sizes.index(size)]

        def number(found: Sequence[Any]) -> Any:
            value = self._growth.at(size, tuple(found))
            return ceil(value - 1e-6) if all(isinstance(one, int) for one in found) else value

        return decode_profile(combined(self._documents, number, _refuse, own=-1))

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
    return in_order(find_axes(shapes), profiles)


def in_order(axes: tuple[Axis, ...], profiles: Sequence[Profile]) -> SizedProfiles:
    """Puts profiles that differ along some axes in order.

    Raises:
        SampleError: they are not of the same step.
    """
    pairs = {_size(axes, profile): profile for profile in reversed(profiles)}
    ordered = sorted(pairs, key=volume)
    found = SizedProfiles(axes, tuple(ordered), tuple(pairs[size] for size in ordered))
    combined(found._documents, max, _refuse, own=-1)
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
