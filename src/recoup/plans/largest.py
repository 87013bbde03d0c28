"""One profile from those of several ranks: the largest bytes, the slowest seconds."""

from __future__ import annotations

from collections.abc import Sequence

from recoup.errors import FitError
from recoup.planning.documents import encode
from recoup.plans.combined import combined
from recoup.plans.profile import Profile
from recoup.plans.profile_json import decode_profile
from recoup.ranks import SAME_STEP

__all__ = ["largest_profile"]


def largest_profile(profiles: Sequence[Profile]) -> Profile:
    """The profile with the largest of each number.

    Raises:
        FitError: they are not profiles of the same step.
    """
    first, *others = profiles
    if all(other == first for other in others):
        return first
    return decode_profile(combined([encode(profile) for profile in profiles], max, _refuse))


def _refuse(where: str) -> FitError:
    return FitError(f"The ranks measured different steps: {where} differs. {SAME_STEP}")
