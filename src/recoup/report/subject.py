"""What a report is about: as much of a fitted model as it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from recoup.auditing.findings import Audit
from recoup.engines.verify import Verification, VerifiedSize
from recoup.plans.by_size.plans import PlansBySize
from recoup.plans.model_plan import ModelPlan

__all__ = ["Subject"]


@runtime_checkable
class Subject(Protocol):
    """A fitted model."""

    @property
    def plan(self) -> ModelPlan:
        """What happens to which unit."""

    @property
    def audit(self) -> Audit:
        """What could make a replay unsafe."""

    @property
    def verification(self) -> Verification | None:
        """A real step under the plan."""

    @property
    def notes(self) -> Sequence[str]:
        """What else is to be said, in sentences."""

    @property
    def by_size(self) -> PlansBySize | None:
        """The plans for batches of several sizes, of which ``plan`` is the largest one's."""

    @property
    def sizes(self) -> Sequence[VerifiedSize]:
        """Real steps of other sizes than the largest."""
