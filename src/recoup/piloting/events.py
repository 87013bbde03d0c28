"""What the autopilot did: a line for each event, and a summary."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from recoup.plans.model_plan import ModelPlan
from recoup.sizes import format_bytes

__all__ = ["LOGGER", "Event", "summarize"]

LOGGER = logging.getLogger("recoup.autopilot")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that the autopilot did.

    Attributes:
        step: the number of the step, from 1.
        kind: ``"out of memory"``, ``"pressure"`` (the allocator found room only by emptying its cache, again and
            again) or ``"room"`` (there is room for a faster plan).
        reason: the error, on this rank or another one; and what the allocator's numbers say.
        usable_bytes: what a step could peak at then.
        before: the plan until then.
        after: the plan from then on; the same where it is tried once more.
        lost_s: seconds of the failed attempt, and of putting everything back.
        plan_s: seconds that planning took, and applying the plan.
        batch: the size of the batch, where plans differ by it: ``before`` and ``after`` are the plans for this size.
    """

    step: int
    kind: str
    reason: str
    usable_bytes: int
    before: ModelPlan
    after: ModelPlan
    lost_s: float
    plan_s: float
    batch: str = ""

    def __str__(self) -> str:
        if self.after is self.before:
            done = "repeated with empty caches under the same plan"
        else:
            slower = self.after.predicted_s / self.before.predicted_s - 1
            made = "new plans" if self.batch else "new plan"
            done = (
                f"{made} for {format_bytes(self.after.budget_bytes)} ({100 * slower:+.1f} % predicted seconds, made"
                f" in {1000 * self.plan_s:.0f} ms)"
            )
        lost = f"; {self.lost_s:.3g} s lost" if self.lost_s else ""
        reason = f" ({self.reason})" if self.reason else ""
        reason += f" at {self.batch}" if self.batch else ""
        usable = f"{format_bytes(self.usable_bytes)} usable"
        return f"step {self.step}: {self.kind}{reason}; {usable}: {done}{lost}"


def summarize(events: Sequence[Event], num_steps: int, slower_steps: int, slower_s: float) -> str:
    """How often something happened, and what it cost.

    Args:
        events: all of them.
        num_steps: that ended.
        slower_steps: that ran under a slower plan than the first.
        slower_s: that these were predicted to take longer.

    >>> summarize([], 10, 0, 0.0)
    '10 steps, none out of memory.'
    """
    failures = [event for event in events if event.kind == "out of memory"]
    if not events:
        return f"{num_steps} steps, none out of memory."
    repeated = len({event.step for event in failures})
    changes = sum(event.after is not event.before for event in events)
    lost_s = sum(event.lost_s + event.plan_s for event in events)
    errors = f"{len(failures)} out-of-memory error{'' if len(failures) == 1 else 's'}"
    return (
        f"{num_steps} steps, {repeated} of them repeated after {errors}; plan changed {changes} times; {lost_s:.3g} s"
        f" lost. {slower_steps} steps ran under another plan than the first, predicted to cost {slower_s:.3g} s."
    )
