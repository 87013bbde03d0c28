"""A fitted model as a short table of text: what ``print(fitted)`` shows."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap

from recoup.report.numbers import format_seconds, format_share
from recoup.report.subject import Subject
from recoup.report.summary import Summary, summarize
from recoup.sizes import format_bytes

__all__ = ["to_text"]

_MOST_GROUPS = 16
_MOST_NAMES = 4
_WIDTH = 100


def to_text(subject: Subject) -> str:
    """The budget, peaks and seconds with notes, what happens to which units, and what was unsafe."""
    summary = summarize(subject)
    lines = [f"{summary.model} on {summary.device}. {summary.headline}."]
    lines += _figures(summary)
    if summary.notes:
        lines += ["", *(line for note in summary.notes for line in _wrapped(note))]
    lines += ["", *_groups(subject.plan.describe_units())]
    lines += _notes(subject, summary)
    return "\n".join(lines)


def _figures(summary: Summary) -> Iterator[str]:
    rows = (
        ("", "predicted", "measured"),
        ("peak, plain", _bytes(summary.plain_bytes), _bytes(summary.plain_measured_bytes)),
        ("peak, fitted", _bytes(summary.predicted_bytes), _bytes(summary.measured_bytes)),
        ("budget", _bytes(summary.budget_bytes), ""),
        ("step, plain", _seconds(summary.plain_s), _seconds(summary.plain_measured_s)),
        ("step, fitted", _seconds(summary.predicted_s), _seconds(summary.measured_s)),
        ("overhead", format_share(summary.predicted_overhead), _share(summary.measured_overhead)),
        ("gradients", "", summary.gradients or "-"),
    )
    for name, predicted, measured in rows:
        yield f"  {name:<14}{predicted:>10}  {measured:>10}".rstrip()


def _wrapped(sentence: str) -> list[str]:
    return wrap(sentence, _WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def _bytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else format_bytes(num_bytes)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


def _share(share: float | None) -> str:
    return "-" if share is None else format_share(share)


def _groups(groups: list[tuple[str, str]]) -> Iterator[str]:
    shown = groups[:_MOST_GROUPS]
    for names, what in shown:
        yield f"  {names}: {what}"
    if len(groups) > len(shown):
        yield f"  and {len(groups) - len(shown)} more groups of units; the HTML report shows all"


def _notes(subject: Subject, summary: Summary) -> Iterator[str]:
    kept = {unit.name for unit in subject.plan.profile.units if unit.unsafe}
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, why in subject.audit.unsafe.items():
        what = "kept, because unsafe" if name in kept else "unsafe, but not to be kept for that (insist)"
        reasons.setdefault((what, why), []).append(name)
    if reasons or summary.drifting:
        yield ""
    for (what, why), names in reasons.items():
        yield f"  {what}: {_few(names)} ({why})"
    if summary.drifting:
        yield f"  not deterministic in plain steps either: {_few(summary.drifting)}"


def _few(names: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
