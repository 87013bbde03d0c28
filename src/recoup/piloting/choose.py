"""Which plan comes next, after a failure or when there is room again."""

from __future__ import annotations

from typing import Protocol

from recoup.errors import BudgetError
from recoup.plans.model_plan import ModelPlan

__all__ = ["Planner", "faster_plan", "is_worth_it", "smaller_plan"]

_SMALLER = 4
"""A second failure in a row lowers the budget by this part of what the plan takes beside parameters and optimizer."""

_WORTH = 0.99
"""A plan that is predicted to take more than this share of the current one's seconds is not worth a change."""


class Planner(Protocol):
    """Plans a measured step again and again."""

    @property
    def smallest(self) -> ModelPlan:
        """The plan with the smallest budget."""

    def plan(self, budget_bytes: int) -> ModelPlan:
        """The plan for a budget; a `BudgetError` if nothing fits."""


def smaller_plan(planner: Planner, current: ModelPlan, usable_bytes: int, num_failures: int) -> ModelPlan:
    """The plan for a step that failed.

    The first failure tries the same plan once more if it fits what is usable, now that caches are empty. From the
    second on, each lowers the budget, whatever is said to be usable: so there is an end.

    Args:
        planner: of the step.
        current: the plan that failed.
        usable_bytes: what the whole step may peak at.
        num_failures: of this step, in a row.

    Raises:
        BudgetError: nothing fits; it says what to do.
    """
    if num_failures == 1 and current.predicted_bytes <= usable_bytes:
        return current
    budget_bytes = min(usable_bytes, current.budget_bytes)
    if num_failures > 1:
        resident_bytes = current.profile.residents.total_bytes
        less_bytes = max(1, (current.predicted_bytes - resident_bytes) // _SMALLER)
        budget_bytes = min(budget_bytes, current.predicted_bytes - less_bytes)
    try:
        return planner.plan(budget_bytes)
    except BudgetError:
        least = planner.smallest
        if least.budget_bytes <= usable_bytes and least.predicted_bytes < current.predicted_bytes:
            return least
        raise


def faster_plan(planner: Planner, current: ModelPlan, first: ModelPlan, usable_bytes: int) -> ModelPlan:
    """The plan for a step that has room again, up to the first one; the current one, if none is clearly faster."""
    if first.predicted_bytes <= usable_bytes:
        return first
    if usable_bytes <= current.budget_bytes:
        return current
    found = planner.plan(min(usable_bytes, first.budget_bytes))
    return found if is_worth_it(found, current) else current


def is_worth_it(plan: ModelPlan, current: ModelPlan) -> bool:
    """Whether a plan is clearly faster than the current one."""
    return plan.predicted_s < _WORTH * current.predicted_s
