"""What a report is about: as much of a fitted model as it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from recoup.engines.verify import Verification
from recoup.plans.model_plan import ModelPlan

__all__ = ["Findings", "Subject"]


class Findings(Protocol):
    """What an audit found."""

    @property
    def findings(self) -> Sequence[Any]:
        """Each with ``unit``, ``what``, ``detail``, ``action`` and ``is_unsafe``."""

    @property
    def unsafe(self) -> Mapping[str, str]:
        """By name, the units that must be kept, and why."""


class Subject(Protocol):
    """A fitted model."""

    @property
    def plan(self) -> ModelPlan:
        """What happens to which unit."""

    @property
    def audit(self) -> Findings:
        """What could make a replay unsafe."""

    @property
    def verification(self) -> Verification | None:
        """A real step under the plan."""
