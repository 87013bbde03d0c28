"""The figures of a fitted step, and one sentence about them."""

from __future__ import annotations

from dataclasses import dataclass

from recoup.engines.drift import Drift
from recoup.report.numbers import format_share
from recoup.report.subject import Subject
from recoup.sizes import format_bytes

__all__ = ["Summary", "summarize"]

# Closer than this, two measured steps take the same time.
_SAME_SHARE = 0.005


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a fitted step, and sentences about them. What was not measured is ``None``."""

    model: str
    device: str
    budget_bytes: int
    plain_bytes: int
    plain_measured_bytes: int | None
    predicted_bytes: int
    measured_bytes: int | None
    plain_s: float
    plain_measured_s: float | None
    predicted_s: float
    measured_s: float | None
    gradients: str
    drifting: tuple[str, ...]
    keeps_everything: bool
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Of the fitted step: measured, or else predicted."""
        return self.predicted_bytes if self.measured_bytes is None else self.measured_bytes

    @property
    def predicted_overhead(self) -> float:
        """By what share of the plain step the fitted one was predicted to take longer."""
        return self.predicted_s / self.plain_s - 1 if self.plain_s else 0.0

    @property
    def measured_overhead(self) -> float | None:
        """By what share of the plain step the fitted one took longer, where both were run."""
        if self.measured_s is None or not self.plain_measured_s:
            return None
        return self.measured_s / self.plain_measured_s - 1

    @property
    def verdict(self) -> str:
        """Whether it fits, in a word or two."""
        if self.peak_bytes > self.budget_bytes:
            return "Does not fit"
        return "Predicted to fit" if self.measured_bytes is None else "Fits"

    @property
    def headline(self) -> str:
        """Peak, budget and overhead, such as ``"Fits: 5.00 GiB of 8.00 GiB, 12 % slower than plain"``."""
        return (
            f"{self.verdict}: {format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)},"
            f" {self._speed()}"
        )

    def _speed(self) -> str:
        if self.keeps_everything:
            return "nothing is recomputed"
        measured = self.measured_overhead
        overhead = self.predicted_overhead if measured is None else measured
        expected = "expected " if measured is None and self.measured_bytes is not None else ""
        if overhead < _SAME_SHARE:
            return f"{expected}as fast as plain"
        return f"{expected}{format_share(overhead)} slower than plain"


def summarize(subject: Subject) -> Summary:
    """The figures of a fitted model."""
    plan, seen = subject.plan, subject.verification
    profile = plan.profile
    return Summary(
        model=profile.model,
        device=profile.device,
        budget_bytes=plan.budget_bytes,
        plain_bytes=profile.plain_bytes,
        plain_measured_bytes=seen.plain_peak_bytes if seen else None,
        predicted_bytes=plan.predicted_bytes,
        measured_bytes=seen.peak_bytes if seen else None,
        plain_s=profile.plain.seconds,
        plain_measured_s=seen.plain_seconds if seen else None,
        predicted_s=plan.predicted_s,
        measured_s=seen.seconds if seen else None,
        gradients=seen.gradients if seen else "",
        drifting=tuple(map(_described, seen.drifting)) if seen else (),
        keeps_everything=plan.keeps_everything,
        notes=tuple(dict.fromkeys([*getattr(plan, "notes", ()), *getattr(seen, "notes", ())])),
    )


def _described(drift: Drift) -> str:
    return f"{drift.name} (relative error {drift.relative_error:.2g}, cosine {drift.cosine:.4f})"
