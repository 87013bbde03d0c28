"""Plans for models as versioned JSON: exact both ways, strict about what it reads."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from recoup.errors import EncodingError
from recoup.planning.documents import encode, expect_keys, read_document, write_document
from recoup.planning.encoding import decode_plan, encode_plan
from recoup.plans.model_plan import ModelPlan
from recoup.plans.profile_json import decode_profile

__all__ = [
    "FORMAT_NAME",
    "FORMAT_VERSION",
    "checked_budget",
    "decode_model_plan",
    "encode_model_plan",
    "plan_from_json",
    "plan_to_json",
]

FORMAT_VERSION = 1
FORMAT_NAME = "recoup.engines"


def plan_to_json(plan: ModelPlan, *, indent: int | None = None) -> str:
    """Writes a plan with its profile, whose problem is also the schedule's.

    Raises:
        EncodingError: the schedule was made for another problem than the profile's.
    """
    return write_document(FORMAT_NAME, FORMAT_VERSION, "plan", encode_model_plan(plan), indent=indent)


def plan_from_json(text: str) -> ModelPlan:
    """Reads what `plan_to_json` wrote. The schedule is simulated again, and refused if its figures do not agree.

    Raises:
        EncodingError: the text is not JSON, not a model's plan, of another version, incomplete or altered.
    """
    return read_document(text, FORMAT_NAME, FORMAT_VERSION, {"plan": decode_model_plan})


def encode_model_plan(plan: ModelPlan) -> dict[str, Any]:
    """A plan as what JSON knows.

    Raises:
        EncodingError: the schedule was made for another problem than the profile's.
    """
    if plan.schedule.problem != plan.profile.problem:
        raise EncodingError("The plan's schedule was made for another problem than that of its profile.")
    schedule = encode_plan(plan.schedule)
    del schedule["problem"]
    return {
        "profile": encode(plan.profile),
        "schedule": schedule,
        "budget_bytes": plan.budget_bytes,
        "checksum": _checksum(plan.budget_bytes, schedule),
    }


def decode_model_plan(body: Any) -> ModelPlan:
    """A plan from what `encode_model_plan` made of it, simulated again."""
    names = {"profile", "schedule", "budget_bytes"}
    expect_keys("A plan", body, {*names, "checksum"}, names)
    profile = decode_profile(body["profile"])
    schedule = decode_plan(body["schedule"], shared=(profile.problem, body["profile"]["problem"]))
    budget_bytes = checked_budget("A plan", body["budget_bytes"])
    plan = ModelPlan(profile, schedule, budget_bytes)
    # Read now, so that a schedule that no model can run is refused here and not when it is applied.
    # A real step may need less than its prediction, and `fit` then takes a plan that only its checksum can vouch for.
    needed_bytes = plan.predicted_bytes
    if needed_bytes > budget_bytes and body.get("checksum") != _checksum(budget_bytes, body["schedule"]):
        raise EncodingError(
            f"A plan's 'budget_bytes' is {budget_bytes}; its schedule needs {needed_bytes} bytes."
        )
    return plan


def checked_budget(what: str, budget_bytes: Any) -> int:
    """A budget as it was written, if it is one."""
    if not isinstance(budget_bytes, int) or isinstance(budget_bytes, bool) or budget_bytes < 0:
        raise EncodingError(f"{what}'s 'budget_bytes' should be a number of bytes; got {budget_bytes!r}.")
    return budget_bytes


def _checksum(budget_bytes: int, schedule: Mapping[str, Any]) -> int:
    return zlib.crc32(f"{budget_bytes} {schedule.get('checksum')}".encode())
