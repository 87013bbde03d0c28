"""Plans by size as versioned JSON: exact both ways, strict about what it reads."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

from recoup.errors import EncodingError
from recoup.planning.documents import decode, encode, expect_keys, expect_list, read_document, write_document
from recoup.planning.encoding import decode_schedule, encode_schedule
from recoup.plans.by_size.axes import Axis, Size
from recoup.plans.by_size.plans import PlansBySize
from recoup.plans.by_size.profiles import in_order
from recoup.plans.model_plan import ModelPlan
from recoup.plans.plan_json import (
    FORMAT_NAME,
    FORMAT_VERSION,
    checked_budget,
    decode_model_plan,
    encode_model_plan,
)
from recoup.plans.profile_json import decode_profile

__all__ = ["plans_from_json", "plans_to_json"]

_KIND = "plans_by_size"
_WHAT = "Plans by size"


def plans_to_json(plans: PlansBySize, *, indent: int | None = None) -> str:
    """Writes plans by size: what was measured, the budget, the ladder of schedules, and the plans that were chosen."""
    body = {
        "axes": [encode(axis) for axis in plans.profiles.axes],
        "profiles": [encode(profile) for profile in plans.profiles.profiles],
        "budget_bytes": plans.budget_bytes,
        "schedules": [encode_schedule(schedule) for schedule in plans.schedules],
        # Each with a profile of its own, which may lack bytes that a real step of another size showed to be missing.
        "known": [
            {"size": list(size), "plan": encode_model_plan(plan)} for size, plan in plans.known.items()
        ],
    }
    body["checksum"] = _checksum(body)
    return write_document(FORMAT_NAME, FORMAT_VERSION, _KIND, body, indent=indent)


def plans_from_json(text: str) -> PlansBySize:
    """Reads what `plans_to_json` wrote. Plans for ranges of sizes are chosen again, from the same schedules.

    Raises:
        EncodingError: the text is not JSON, not of plans by size, of another version, incomplete or altered.
    """
    return read_document(text, FORMAT_NAME, FORMAT_VERSION, {_KIND: _decode})


def _decode(body: Any) -> PlansBySize:
    expect_keys(_WHAT, body, {"axes", "profiles", "budget_bytes", "schedules", "known", "checksum"})
    axes = tuple(decode(Axis, axis) for axis in expect_list("axes", body["axes"]))
    profiles = [decode_profile(profile) for profile in expect_list("profiles", body["profiles"])]
    budget_bytes = checked_budget(_WHAT, body["budget_bytes"])
    schedules = [decode_schedule(schedule) for schedule in expect_list("schedules", body["schedules"])]
    known = dict(_known(plan) for plan in expect_list("known", body["known"]))
    if body["checksum"] != _checksum(body):
        raise EncodingError(f"{_WHAT}: the 'checksum' is not that of the content: it has been altered.")
    return PlansBySize(in_order(axes, profiles), budget_bytes, schedules, known)


def _known(body: Any) -> tuple[Size, ModelPlan]:
    expect_keys("A known plan", body, {"size", "plan"})
    return tuple(expect_list("size", body["size"])), decode_model_plan(body["plan"])


def _checksum(body: Mapping[str, Any]) -> int:
    content = {name: item for name, item in body.items() if name != "checksum"}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
