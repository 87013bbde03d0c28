"""What `fit` returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from recoup.auditing import Audit
from recoup.engines.tried import TriedEngine, most_gain_in_words, tried_in_words
from recoup.engines.verify import Verification, VerifiedSize
from recoup.plans.by_size.plans import PlansBySize
from recoup.plans.model_plan import ModelPlan
from recoup.plans.profile import Profile
from recoup.report.table import to_text

__all__ = ["Fitted", "planned_earlier"]


@dataclass(frozen=True)
class Fitted:
    """A fitted model: what was measured, planned, found unsafe, and verified.

    Attributes:
        model: the model, with its plan applied.
        plan: what happens to which unit, and what that was predicted to cost.
        audit: what could make a replay unsafe.
        verification: a real step under the plan; ``None`` if that was not asked for.
        engines: those that ``engine="best"`` tried, with their seconds, or why they have no plan; else empty.
        by_size: the plans for batches of other sizes, where several were given; ``plan`` is that of the largest.
        sizes: real steps of these other sizes.
    """

    model: nn.Module = field(repr=False)
    plan: ModelPlan
    audit: Audit
    verification: Verification | None
    engines: tuple[TriedEngine, ...] = ()
    by_size: PlansBySize | None = None
    sizes: tuple[VerifiedSize, ...] = ()

    @property
    def profile(self) -> Profile:
        """The measured step."""
        return self.plan.profile

    @property
    def applied(self) -> ModelPlan | PlansBySize:
        """What the model runs under, as `apply` takes it: the plan or, where there are several sizes, their plans."""
        return self.plan if self.by_size is None else self.by_size

    @property
    def notes(self) -> tuple[str, ...]:
        """What the report says beside the plan's and the verification's own notes, in sentences."""
        if self.engines:
            return tried_in_words(self.engines)
        return most_gain_in_words(self.plan, self.verification)

    def to_html(self, path: str | Path) -> Path:
        """Writes a report into one HTML file that needs nothing else; returns its path."""
        from recoup.report.page import write_html

        return write_html(self, path)

    def _repr_html_(self) -> str:
        from recoup.report.page import to_notebook

        return to_notebook(self)

    def __str__(self) -> str:
        return to_text(self)


def planned_earlier(model: nn.Module, applied: ModelPlan | PlansBySize) -> Fitted:
    """A model under a plan that an earlier process made: nothing was audited or verified in this one."""
    if isinstance(applied, ModelPlan):
        return Fitted(model, applied, Audit(()), None)
    return Fitted(model, applied.plan, Audit(()), None, by_size=applied)
