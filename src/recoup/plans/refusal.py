"""Why nothing fits a budget: what the smallest one consists of, and what would lower it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from recoup import planning
from recoup.errors import BudgetError
from recoup.plans.profile import Profile, ProfiledUnit
from recoup.plans.usable_bytes import smallest_budget
from recoup.sizes import format_bytes

if TYPE_CHECKING:
    from recoup.plans.model_plan import ModelPlan

__all__ = ["NOTED_SHARE", "refusal"]

NOTED_SHARE = 0.01
"""An output that takes less of the peak than this is not worth a sentence."""


def refusal(least: ModelPlan, budget_bytes: int, *, measured_bytes: int = 0) -> BudgetError:
    """Why nothing fits a budget, what would, and what to change.

    Args:
        least: the plan that needs the least memory.
        budget_bytes: that was asked for.
        measured_bytes: the peak of a real step under that plan; 0 if none was run.
    """
    profile = least.profile
    smallest = smallest_budget(least, measured_bytes)
    known = "verified on a real step" if measured_bytes else "predicted"
    named = f"smallest feasible budget is {format_bytes(smallest)} ({smallest} bytes, {known})"
    floor = profile.residents.optimizer_peak_bytes
    if floor > budget_bytes:
        residents = profile.residents
        steps = residents.optimizer_bytes or residents.optimizer_transient_bytes
        what = "The optimizer's own step needs" if steps else "Apart from activations, the step needs"
        lighter = "Use a lighter optimizer, fewer" if steps else "Train fewer parameters, use fewer"
        return BudgetError(
            f"{what} {format_bytes(floor)} ({floor} bytes: {_residents(profile)}), and the budget is"
            f" {format_bytes(budget_bytes)}. No plan for activations changes that; the {named}. {lighter} bits for"
            " parameters, or shard them; or a smaller batch, where the sample is what takes the room.",
            budget_bytes=budget_bytes,
            smallest_bytes=smallest,
        )
    peak = least.schedule.predicted.peak
    unit = profile.units[peak.unit]
    parts = _floor(least, measured_bytes)
    given = "" if profile.holds_output else " with the model's output let go before the backward"
    return BudgetError(
        f"{profile.model} does not fit {format_bytes(budget_bytes)} ({budget_bytes} bytes). The {named}{given}, set by"
        f" the {peak.phase} of {unit.name!r}:"
        f" {', '.join(f'{format_bytes(size)} {name}' for name, size in parts.items() if size)}."
        f" {' '.join(_advice(profile, unit, parts))}",
        budget_bytes=budget_bytes,
        smallest_bytes=smallest,
        unit=unit.name,
    )


def _residents(profile: Profile) -> str:
    """What lives in an optimizer's step."""
    residents = profile.residents
    parts = {
        "parameters and buffers": residents.parameter_bytes,
        "gradients": residents.gradient_bytes,
        "optimizer state": residents.optimizer_bytes,
        "sample and other tensors": residents.other_bytes,
        "temporaries of the step": residents.optimizer_transient_bytes,
    }
    return ", ".join(f"{format_bytes(size)} {name}" for name, size in parts.items() if size)


def _floor(least: ModelPlan, measured_bytes: int) -> dict[str, int]:
    """What a plan's peak consists of: bytes by name, those of parameters, gradients and optimizer state first."""
    profile, predicted = least.profile, least.schedule.predicted
    residents = profile.residents
    run = least.schedule.schedule.actions[: predicted.peak.action]
    gradient_bytes = residents.gradient_bytes if profile.accumulates else 0
    gradient_bytes += sum(
        profile.problem.units[action.unit].parameter_gradient_bytes
        for action in run
        if isinstance(action, planning.Backward)
    )
    output_bytes = profile.output_bytes if profile.holds_output else 0
    parts = {
        "parameters and buffers": residents.parameter_bytes,
        "gradients": gradient_bytes,
        "optimizer state": residents.optimizer_bytes,
        "sample and other tensors": residents.other_bytes,
        f"the model's output ({profile.output_names})": output_bytes,
    }
    peak_bytes = measured_bytes or predicted.peak_bytes
    parts["activations and workspace there"] = max(0, peak_bytes - sum(parts.values()))
    return parts


def _advice(profile: Profile, unit: ProfiledUnit, parts: Mapping[str, int]) -> list[str]:
    """What would lower the smallest budget, as far as it is known."""
    fixed_bytes = sum(list(parts.values())[:3])
    advice = ["Raise the budget, or use a smaller batch."]
    if kept := [unit for unit in profile.units if unit.unsafe]:
        others = f" and {len(kept) - 1} more are" if len(kept) > 1 else " is"
        advice.append(
            f"{kept[0].name!r}{others} kept, since a replay would not be safe ({kept[0].unsafe}): see recoup.audit."
        )
    if profile.holds_output and profile.output_bytes > NOTED_SHARE * sum(parts.values()):
        advice.append(
            f"Letting the model's output go before the backward, as loss = model(**batch).loss does, frees up to"
            f" {format_bytes(profile.output_bytes)}: then pass holds_output=False."
        )
    if fixed_bytes > sum(parts.values()) // 2:
        advice.append(
            "Most of it is parameters, gradients and optimizer state, which no plan makes smaller: use a lighter"
            " optimizer, train fewer parameters, or shard them."
        )
    elif unit.num_parts:
        advice.append(f"units= can name what {unit.name!r} calls, to split it.")
    return advice
