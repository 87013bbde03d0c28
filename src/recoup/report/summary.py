"""A fitted step in one sentence, and what else is to be said about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recoup.engines.racing import Finisher
from recoup.engines.verify import Verification
from recoup.plans.model_plan import ModelPlan
from recoup.report.by_size import notes_on_sizes
from recoup.report.numbers import format_seconds, format_share
from recoup.report.subject import Subject
from recoup.sizes import format_bytes

__all__ = ["Summary", "summarize"]

# Closer than this, two measured steps take the same time.
_SAME_SHARE = 0.005


@dataclass(frozen=True, slots=True)
class Summary:
    """What follows from a plan's figures and, where a real step was run, from those of its verification."""

    plan: ModelPlan
    seen: Verification | None
    further: Sequence[str] = ()

    @property
    def peak_bytes(self) -> int:
        """Of the fitted step: measured, or else predicted."""
        return self.seen.peak_bytes if self.seen else self.plan.predicted_bytes

    @property
    def predicted_overhead(self) -> float:
        """By what share of the plain step the fitted one was predicted to take longer."""
        plain_s = self.plan.profile.plain.seconds
        return self.plan.predicted_s / plain_s - 1 if plain_s else 0.0

    @property
    def measured_overhead(self) -> float | None:
        """By what share of the plain step the fitted one took longer, where both were run."""
        if self.seen is None or not self.seen.plain_seconds:
            return None
        return self.seen.seconds / self.seen.plain_seconds - 1

    @property
    def headline(self) -> str:
        """Peak, budget and overhead, such as ``"Fits: 5.00 GiB of 8.00 GiB, 12 % slower than plain"``."""
        verdict = "Fits" if self.seen else "Predicted to fit"
        if self.peak_bytes > self.plan.budget_bytes:
            verdict = "Does not fit"
        budget = format_bytes(self.plan.budget_bytes)
        return f"{verdict}: {format_bytes(self.peak_bytes)} of {budget}, {self._speed()}"

    def _speed(self) -> str:
        if self.plan.keeps_everything:
            return "nothing is recomputed"
        measured = self.measured_overhead
        overhead = self.predicted_overhead if measured is None else measured
        expected = "expected " if measured is None and self.seen else ""
        if overhead < _SAME_SHARE:
            return f"{expected}as fast as plain"
        return f"{expected}{format_share(overhead)} slower than plain"

    @property
    def drifting(self) -> list[str]:
        """Gradients that are not bit-equal, with how far they are apart."""
        return [f"{drift.name} ({drift.distance})" for drift in self.seen.drifting] if self.seen else []

    @property
    def notes(self) -> list[str]:
        """What is to be known about the figures, in sentences."""
        seen = (*self.seen.notes, *_raced(self.seen.race)) if self.seen else ()
        return list(dict.fromkeys([*self.plan.notes, *seen, *self.further]))


def _raced(race: Sequence[Finisher]) -> list[str]:
    """What was raced, in a sentence or two."""
    if not race:
        return []
    laps = [
        f"{one.name} {format_seconds(one.seconds)} (predicted {format_seconds(one.predicted_s)}"
        f"{', kept' if one.is_kept else ''})"
        for one in race
    ]
    return [f"Raced on real steps, in turn: {'; '.join(laps)}. Predicted seconds are corrected by these."]


def summarize(subject: Subject) -> Summary:
    """What there is to say about a fitted model."""
    further = (*notes_on_sizes(subject), *subject.notes)
    return Summary(subject.plan, subject.verification, further)
