"""Hand-made plans for batches of several sizes: numbers that nothing measured, so that every figure is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from report_subjects import Made, make_profile

from recoup.engines.verify import Verification, VerifiedSize
from recoup.model.conditions import Conditions
from recoup.planning import Option, Problem, Unit
from recoup.plans.by_hand import plan_by_hand
from recoup.plans.by_size.plans import PlansBySize, plans_by_size
from recoup.plans.by_size.profiles import sized_profiles
from recoup.plans.model_plan import minimum_budget, plan
from recoup.plans.profile import Profile

LONGEST = 1000


def sized_profile(length: int, *, rows: int = 2, num_blocks: int = 8) -> Profile:
    """At the longest what `make_profile` makes; numbers grow with the length, saved bytes with its square."""
    share = rows * length / (2 * LONGEST)
    profile = make_profile(num_blocks)
    units = [_scaled(unit, share, length / LONGEST) for unit in profile.problem.units]
    problem = Problem(units, resident_bytes=profile.problem.resident_bytes)
    conditions = Conditions((("ids", (rows, length)), ("mask", (rows, 1, length))))
    return replace(profile, problem=problem, conditions=conditions)


def _scaled(unit: Unit, share: float, length: float) -> Unit:
    def scaled(option: Option) -> Option:
        return replace(
            option,
            forward_s=option.forward_s * share,
            backward_s=option.backward_s * share,
            extra_s=option.extra_s * share,
            held_bytes=int(option.held_bytes * share * (1 + length) / 2),
            scratch=type(option.scratch)(*(int(size * share) for size in option.scratch)),
        )

    return replace(
        unit,
        options=tuple(map(scaled, unit.options)),
        output_bytes=int(unit.output_bytes * share),
        gradient_bytes=int(unit.gradient_bytes * share),
    )


def make_plans(
    *sizes: tuple[int, int], share: float = 0.3, num_blocks: int = 8, budget_bytes: int | None = None
) -> PlansBySize:
    """Under a budget between the smallest (0) and the plain step's peak (1) of the last size, rows and length."""
    wanted = sizes or ((2, 100), (2, 400), (2, LONGEST))
    profiles = [sized_profile(length, rows=rows, num_blocks=num_blocks) for rows, length in wanted]
    smallest = minimum_budget(profiles[-1])
    if budget_bytes is None:
        budget_bytes = smallest + int((profiles[-1].plain_bytes - smallest) * share)
    return plans_by_size(sized_profiles(profiles), plan(profiles[-1], budget_bytes))


def make_sized_subject(*sizes: tuple[int, int], is_verified: bool = True, **settings: Any) -> Made:
    """A hand-made model, fitted to several sizes."""
    plans = make_plans(*sizes, **settings)
    chosen, measured = plans.plan, plans.profiles
    if not is_verified:
        return Made(chosen, by_size=plans)
    seen = []
    for size, profile in zip(measured.sizes[:-1], measured.profiles[:-1], strict=True):
        own = plan_by_hand(profile, plans.plan_for(size).schedule.schedule, plans.budget_bytes)
        seen.append(VerifiedSize(size, own, verification_of(own.predicted_bytes, own.predicted_s)))
    verified = verification_of(chosen.predicted_bytes, chosen.predicted_s)
    return Made(chosen, verification=verified, by_size=plans, sizes=tuple(reversed(seen)))


def verification_of(peak_bytes: int, seconds: float) -> Verification:
    """Measured figures a little beside the predicted ones."""
    return Verification(
        peak_bytes=int(peak_bytes * 0.99),
        seconds=seconds * 1.05,
        plain_peak_bytes=None,
        plain_seconds=None,
        gradients="bit-equal",
    )
