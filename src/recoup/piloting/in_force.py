"""The plans that a model runs under, and those that take their place after a failure or when there is room again."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import nn

from recoup.engines import apply
from recoup.fitting import Fitted
from recoup.piloting.choose import faster_plan, smaller_plan
from recoup.plans.by_size.plans import PlansBySize
from recoup.plans.model_plan import ModelPlan, Replanner
from recoup.plans.profile import Profile

__all__ = ["InForce", "one_plan"]


class InForce(ABC):
    """The plan of a model, or its plans by size: the first ones, and those that are in force now."""

    by_size: PlansBySize | None = None
    """The plans that are in force, where they differ by the size of the batch."""

    @property
    @abstractmethod
    def plan(self) -> ModelPlan:
        """The plan that the last batch ran under."""

    @property
    @abstractmethod
    def profile(self) -> Profile:
        """Of that batch, or of one that is a little larger."""

    @property
    @abstractmethod
    def budget_bytes(self) -> int:
        """That is planned for."""

    @property
    @abstractmethod
    def slower_s(self) -> float:
        """By how many seconds a step like the last takes longer than under the first plan, as predicted."""

    @property
    @abstractmethod
    def is_first(self) -> bool:
        """Whether what `fit` found is in force."""

    @property
    @abstractmethod
    def batch(self) -> str:
        """The last batch in words; empty where plans do not differ by it."""

    @abstractmethod
    def shrink(self, usable_bytes: int, num_failures: int, *, has_failed: bool = True) -> None:
        """Chooses what takes less memory, or the same once more. All ranks call this, and choose alike.

        Args:
            usable_bytes: what the whole step may peak at.
            num_failures: of this step, in a row.
            has_failed: whether it was this rank that failed.

        Raises:
            BudgetError: nothing fits; it says what to do.
        """

    @abstractmethod
    def grow(self, usable_bytes: int) -> None:
        """Chooses what is clearly faster, up to the first, if something is."""

    @abstractmethod
    def apply(self) -> None:
        """Puts what was chosen on the model."""


def one_plan(fitted: Fitted) -> InForce:
    """One plan for every batch."""
    return _OnePlan(fitted)


class _OnePlan(InForce):
    def __init__(self, fitted: Fitted) -> None:
        self._model: nn.Module = fitted.model
        self._plan = self._first = fitted.plan
        self._planner = Replanner(fitted.profile)

    @property
    def plan(self) -> ModelPlan:
        return self._plan

    @property
    def profile(self) -> Profile:
        return self._plan.profile

    @property
    def budget_bytes(self) -> int:
        return self._plan.budget_bytes

    @property
    def slower_s(self) -> float:
        return self._plan.predicted_s - self._first.predicted_s

    @property
    def is_first(self) -> bool:
        return self._plan is self._first

    @property
    def batch(self) -> str:
        return ""

    def shrink(self, usable_bytes: int, num_failures: int, *, has_failed: bool = True) -> None:
        # Whoever failed: all ranks have the same plan, and choose the same one.
        self._plan = smaller_plan(self._planner, self._plan, usable_bytes, num_failures)

    def grow(self, usable_bytes: int) -> None:
        self._plan = faster_plan(self._planner, self._plan, self._first, usable_bytes)

    def apply(self) -> None:
        apply(self._model, self._plan)
