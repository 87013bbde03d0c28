"""What callbacks of trainers have in common: what they are given, the batch that they plan for, and what came of it."""

from __future__ import annotations

from typing import Any

from recoup.fitting import Fitted
from recoup.integrations.batches import largest_batch_of

__all__ = ["FittingCallback"]


class FittingCallback:
    """Fits a trainer's model into a budget when training begins.

    Args:
        budget: as for `recoup.fit`: ``"8GiB"``, ``"80%"``, or ``"auto"``, what is free less a margin.
        sample: a batch as the loader yields it, to plan for; unless given, the largest of a few.
        num_batches: how many batches are looked at.
        options: further arguments of `recoup.fit`, such as ``engine=`` and ``units=``.

    Attributes:
        fitted: what `recoup.fit` returned; ``None`` before training.
    """

    def __init__(
        self, budget: int | str = "auto", *, sample: Any = None, num_batches: int = 4, **options: Any
    ) -> None:
        self.budget, self.sample, self.num_batches, self.options = budget, sample, num_batches, options
        self.fitted: Fitted | None = None

    def batch_to_plan_for(self, loader: Any, *, batch_size: int | None = None) -> Any:
        """The user's sample, or the largest of a few batches of a loader that is not touched."""
        if self.sample is not None:
            return self.sample
        return largest_batch_of(loader, num_batches=self.num_batches, batch_size=batch_size)
