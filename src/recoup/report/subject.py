"""What a report is about: as much of a fitted model as it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from recoup.auditing.findings import Audit
from recoup.engines.verify import Verification
from recoup.plans.model_plan import ModelPlan

__all__ = ["Subject"]


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
