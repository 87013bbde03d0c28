"""A fitted model as a short table of text: what ``print(fitted)`` shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from textwrap import wrap
from typing import Any

from recoup.auditing.findings import some_of
from recoup.report.by_size import real_steps, rows_by_size, title_of
from recoup.report.numbers import format_seconds, format_share
from recoup.report.subject import Subject
from recoup.report.summary import Summary, summarize
from recoup.sizes import format_bytes

__all__ = ["to_text"]

_MOST_GROUPS = 16
_WIDTH = 100


def to_text(subject: Subject) -> str:
    """The budget, peaks and seconds with notes, what happens to which units, and what was unsafe."""
    summary, profile = summarize(subject), subject.plan.profile
    lines = [f"{profile.model} on {profile.device}. {summary.headline}.", *_figures(summary)]
    if summary.notes:
        lines += ["", *(line for note in summary.notes for line in _wrapped(note))]
    lines += ["", *_groups(subject.plan.describe_units())]
    lines += _sizes(subject)
    lines += _notes(subject, summary)
    return "\n".join(lines)


def _figures(summary: Summary) -> Iterator[str]:
    plan, seen, profile = summary.plan, summary.seen, summary.plan.profile
    rows: list[tuple[str, Callable[[Any], str], Any, Any]] = [
        ("", str, "predicted", "measured"),
        ("peak, plain", format_bytes, profile.plain_bytes, seen and seen.plain_peak_bytes),
        ("peak, fitted", format_bytes, plan.predicted_bytes, seen and seen.peak_bytes),
        ("budget", str, format_bytes(plan.budget_bytes), ""),
        ("step, plain", format_seconds, profile.plain.seconds, seen and seen.plain_seconds),
        ("step, fitted", format_seconds, plan.predicted_s, seen and seen.seconds),
        ("overhead", format_share, summary.predicted_overhead, summary.measured_overhead),
        ("gradients", str, "", seen and seen.gradients),
    ]
    for name, form, predicted, measured in rows:
        known = "-" if measured is None else form(measured)
        yield f"  {name:<14}{form(predicted):>10}  {known:>10}".rstrip()


def _wrapped(sentence: str) -> list[str]:
    return wrap(sentence, _WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def _groups(groups: list[tuple[str, str]]) -> Iterator[str]:
    shown = groups[:_MOST_GROUPS]
    for names, what in shown:
        yield f"  {names}: {what}"
    if len(groups) > len(shown):
        yield f"  and {len(groups) - len(shown)} more groups of units; the HTML report shows all"


def _sizes(subject: Subject) -> Iterator[str]:
    """Ranges of sizes with their plans, and the real steps."""
    plans = subject.by_size
    if plans is None:
        return
    yield ""
    yield f"  {title_of(plans)}; predicted peak, and seconds of a step per 1,000 of it:"
    yield f"  {'up to':>12}{'peak':>12}{'per 1,000':>12}  plan"
    for row in rows_by_size(plans):
        figures = f"{format_bytes(row.peak_bytes):>12}{format_seconds(row.per_thousand_s):>12}"
        yield f"  {row.up_to:>12}{figures}  {row.what}{'' if row.fits else ', over the budget'}"
    steps = real_steps(subject)
    if steps:
        yield "  Real steps:"
        yield f"  {'size':>12}{'peak':>12}{'predicted':>12}  gradients"
    for step in steps:
        peaks = f"{format_bytes(step.seen.peak_bytes):>12}{format_bytes(step.plan.predicted_bytes):>12}"
        yield f"  {step.at:>12}{peaks}  {step.seen.gradients}"


def _notes(subject: Subject, summary: Summary) -> Iterator[str]:
    kept = {unit.name for unit in subject.plan.profile.units if unit.unsafe}
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, why in subject.audit.unsafe.items():
        what = "kept, because unsafe" if name in kept else "unsafe, but not to be kept for that (insist)"
        reasons.setdefault((what, why), []).append(name)
    if reasons or summary.drifting:
        yield ""
    for (what, why), names in reasons.items():
        yield f"  {what}: {some_of(names)} ({why})"
    if summary.drifting:
        is_captured = subject.plan.profile.is_captured
        what = "not bit-equal" if is_captured else "not deterministic in plain steps either"
        yield f"  {what}: {some_of(summary.drifting)}"
