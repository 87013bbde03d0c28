"""Plans that may be faster than the chosen one, if predicted seconds are wrong: who takes part in a race."""

from __future__ import annotations

from recoup.plans.by_hand import usual_plan
from recoup.plans.model_plan import ModelPlan, plan_with_less
from recoup.plans.profile import Profile
from recoup.plans.tightest import session_of
from recoup.plans.tree import Item, Leaf
from recoup.sizes import format_bytes

__all__ = ["plan_with_rivals", "rivals_of"]

_MOST_SLOWER = 1.15
"""A rival that is predicted to take more than this many times the plan's seconds is not worth a step."""
_SMALLER = 8
"""The smaller budget has so much less room: a share of what the budget leaves beside parameters and optimizer."""
_MOST_S = 5.0
"""Longer steps are not raced: where a step takes seconds the host hardly matters, and a race takes minutes."""


def plan_with_rivals(profile: Profile, budget_bytes: int) -> tuple[ModelPlan, list[tuple[str, ModelPlan]]]:
    """The plan for a budget, and its rivals.

    Raises:
        BudgetError: nothing fits.
    """
    less_bytes = budget_bytes - max(0, budget_bytes - profile.residents.total_bytes) // _SMALLER
    # After a race seconds are others, and with them the bound.
    session = session_of(profile.problem, proves=False)
    plan, smaller = plan_with_less(profile, budget_bytes, less_bytes, session=session)
    named = None if smaller is None else (f"the plan for {format_bytes(less_bytes)}", smaller)
    return plan, rivals_of(plan, named)


def rivals_of(plan: ModelPlan, smaller: tuple[str, ModelPlan] | None = None) -> list[tuple[str, ModelPlan]]:
    """Up to two plans for the same budget, with their names: the usual recipe, and the plan for a smaller budget.

    Those that are not far behind, by prediction; of plans that do the same work, one; none for a plan that keeps
    everything.
    """
    if plan.keeps_everything or plan.predicted_s > _MOST_S:
        return []
    rivals = {_work(plan): ("", plan)}
    for named in (usual_plan(plan.profile, plan.budget_bytes), smaller):
        if named is not None and named[1].predicted_s <= _MOST_SLOWER * plan.predicted_s:
            rivals.setdefault(_work(named[1]), named)
    return sorted(list(rivals.values())[1:], key=lambda named: named[1].predicted_s)


def _work(plan: ModelPlan) -> tuple[str, ...]:
    """What a plan does to which kinds of units: plans that do the same to other units of a kind take as long."""
    return tuple(sorted(_describe(plan, item) for item in plan.items))


def _describe(plan: ModelPlan, item: Item) -> str:
    if isinstance(item, Leaf):
        return f"{plan.profile.units[item.unit].kind} {plan.recipe(item).name}"
    return f"({', '.join(_describe(plan, part) for part in item.items)})"
