"""Plans by size under the autopilot.

NOTE [ A failure under plans by size ]
    1. The plan that failed is that of the batch which the model was called with last. A smaller budget is chosen for
       this batch, as for one plan, and all sizes get their plans for it: from the ladder, without the solvers.
    2. Batches may differ from rank to rank. A rank that failed chooses, and the smallest budget holds on all: so they
       also return to faster plans at the same step. On the other ranks nothing is refused: their batches ran.
    3. A budget that was lowered for a short batch may be less than a longer one needs. That one runs under the plan
       with the smallest peak.
"""

from __future__ import annotations

from dataclasses import replace

from recoup.engines import apply
from recoup.engines.by_size import batch_in_words
from recoup.engines.eager import picked_size
from recoup.fitting import Fitted
from recoup.piloting.choose import is_worth_it, smaller_plan
from recoup.piloting.in_force import InForce
from recoup.plans.by_size.axes import Size
from recoup.plans.by_size.plans import PlansBySize
from recoup.plans.model_plan import ModelPlan
from recoup.plans.profile import Profile
from recoup.plans.refusal import refusal
from recoup.plans.usable_bytes import smallest_budget
from recoup.ranks import Ranks

__all__ = ["several_plans"]


def several_plans(fitted: Fitted, ranks: Ranks) -> InForce:
    """A plan for each range of sizes, by NOTE [ A failure under plans by size ].

    Args:
        fitted: what `fit` returned, with plans by size.
        ranks: that train together.
    """
    assert fitted.by_size is not None
    return _SeveralPlans(fitted, fitted.by_size, ranks)


class _SeveralPlans(InForce):
    def __init__(self, fitted: Fitted, plans: PlansBySize, ranks: Ranks) -> None:
        self._model, self._ranks = fitted.model, ranks
        self.by_size: PlansBySize = plans
        self._first = plans
        self._last = plans.profiles.sizes[-1]

    @property
    def _size(self) -> Size:
        """Of the last batch, also after other plans were applied; before the first one, the largest."""
        self._last = picked_size(self._model) or self._last
        return self._last

    @property
    def plan(self) -> ModelPlan:
        return self.by_size.plan_at(self._size)

    @property
    def profile(self) -> Profile:
        return self.by_size.plan_for(self._size).profile

    @property
    def budget_bytes(self) -> int:
        return self.by_size.budget_bytes

    @property
    def slower_s(self) -> float:
        return self.by_size.slower_s(self._first, self._size)

    @property
    def is_first(self) -> bool:
        return self.by_size is self._first

    @property
    def batch(self) -> str:
        return batch_in_words(self.by_size, self._size)

    def shrink(self, usable_bytes: int, num_failures: int, *, has_failed: bool = True) -> None:
        chosen = self.plan
        with self._ranks.together():
            if has_failed:
                planner = _Planner(self._first, self._size)
                chosen = smaller_plan(planner, chosen, usable_bytes, num_failures)
        self._take(self._ranks.smallest(chosen.budget_bytes))

    def grow(self, usable_bytes: int) -> None:
        before = self.by_size
        fits = self._first.plan.predicted_bytes <= usable_bytes
        self._take(self._first.budget_bytes if fits else min(usable_bytes, self._first.budget_bytes))
        sizes = before.profiles.sizes
        if not fits and not any(is_worth_it(self.by_size.plan_for(s), before.plan_for(s)) for s in sizes):
            self.by_size = before

    def _take(self, budget_bytes: int) -> None:
        if budget_bytes == self._first.budget_bytes:
            self.by_size = self._first
        elif budget_bytes != self.by_size.budget_bytes:
            self.by_size = self._first.within(budget_bytes)

    def apply(self) -> None:
        apply(self._model, self.by_size)


class _Planner:
    """Plans for one size."""

    def __init__(self, plans: PlansBySize, size: Size) -> None:
        self._plans, self._size = plans, size

    @property
    def smallest(self) -> ModelPlan:
        """The plan with the smallest budget."""
        least = self._plans.within(0).plan_for(self._size)
        return replace(least, budget_bytes=smallest_budget(least))

    def plan(self, budget_bytes: int) -> ModelPlan:
        """As `recoup.plan`."""
        found = self._plans.within(budget_bytes).plan_for(self._size)
        if smallest_budget(found) > budget_bytes:
            raise refusal(self.smallest, budget_bytes)
        return found
