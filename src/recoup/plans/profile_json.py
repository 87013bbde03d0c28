"""Profiles as versioned JSON: exact both ways, strict about what it reads."""

from __future__ import annotations

from typing import Any

from recoup.errors import EncodingError
from recoup.planning.documents import decode, encode, read_document, write_document
from recoup.plans.profile import Profile

__all__ = ["FORMAT_VERSION", "decode_profile", "profile_from_json", "profile_to_json"]

FORMAT_VERSION = 1
_FORMAT = "recoup.measuring"


def profile_to_json(profile: Profile, *, indent: int | None = None) -> str:
    """Writes a profile."""
    return write_document(_FORMAT, FORMAT_VERSION, "profile", encode(profile), indent=indent)


def profile_from_json(text: str) -> Profile:
    """Reads what `profile_to_json` wrote.

    Raises:
        EncodingError: the text is not JSON, not a profile, of another version, incomplete or damaged.
    """
    return read_document(text, _FORMAT, FORMAT_VERSION, {"profile": decode_profile})


def decode_profile(body: Any) -> Profile:
    """A profile from what `encode` made of it."""
    profile = decode(Profile, body)
    problem = profile.problem
    if len(profile.units) != problem.num_units:
        raise EncodingError(
            f"The profile names {len(profile.units)} units, and its problem has {problem.num_units}."
        )
    for unit, numbers in zip(profile.units, problem.units, strict=True):
        if len(unit.recipes) != len(numbers.options):
            raise EncodingError(
                f"Unit {unit.name!r} has {len(unit.recipes)} recipes, and {len(numbers.options)} options in the"
                " problem."
            )
    return profile
