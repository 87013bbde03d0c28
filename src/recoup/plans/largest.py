"""One profile from those of several ranks: the largest bytes, the slowest seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recoup.errors import FitError
from recoup.planning.documents import encode
from recoup.plans.profile import Profile
from recoup.plans.profile_json import decode_profile
from recoup.ranks import SAME_STEP

__all__ = ["largest_profile"]

_MEASURED = {"scratch", "shapes", "num_stored"}
"""Further fields of numbers that may differ, beside bytes and seconds."""
_OWN = {"device", "output_names", "unsafe", "uncaptured"}
"""Words of each rank's own."""


def largest_profile(profiles: Sequence[Profile]) -> Profile:
    """The profile with the largest of each number.

    Raises:
        FitError: they are not profiles of the same step.
    """
    first, *others = profiles
    if all(other == first for other in others):
        return first
    return decode_profile(_largest([encode(profile) for profile in profiles], "profile"))


def _largest(parts: Sequence[Any], where: str, *, is_measured: bool = False) -> Any:
    """Of equal parts of several documents, the largest, if they were measured."""
    first = parts[0]
    if isinstance(first, dict) and all(isinstance(part, dict) for part in parts):
        return {key: _at(key, parts, where) for key in dict.fromkeys(key for part in parts for key in part)}
    if isinstance(first, list) and all(isinstance(part, list) and len(part) == len(first) for part in parts):
        columns = enumerate(zip(*parts, strict=True))
        return [_largest(column, f"{where}[{i}]", is_measured=is_measured) for i, column in columns]
    if is_measured and all(isinstance(part, (int, float)) for part in parts):
        return max(parts)
    if any(part != first for part in parts):
        raise FitError(f"The ranks measured different steps: {where} differs. {SAME_STEP}")
    return first


def _at(key: str, parts: Sequence[dict[str, Any]], where: str) -> Any:
    found = [part[key] for part in parts if key in part]
    if key in _OWN:
        return found[0]
    is_measured = key.endswith(("_bytes", "_s")) or key in _MEASURED
    if len(found) < len(parts) and not is_measured:
        found.append(None)  # left out where it is at its default, which differs from what is there
    return _largest(found, f"{where}.{key}", is_measured=is_measured)
