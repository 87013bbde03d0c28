"""Why a unit is kept or recomputed, in a sentence with the numbers that decided it."""

from __future__ import annotations

from collections.abc import Sequence

from recoup.report.decisions import Decision, Decisions
from recoup.report.numbers import format_rate, format_seconds
from recoup.sizes import format_bytes

__all__ = ["explain"]

# Less than this is below the resolution of a clock.
_NO_TIME_S = 1e-7


def explain(decisions: Decisions, alike: Sequence[Decision], *, ask: bool = True) -> str:
    """Why units that cost the same are treated as they are.

    Args:
        decisions: the whole plan.
        alike: the units, in order.
        ask: also simulate the step with another choice for these units.
    """
    first = alike[0]
    unit = decisions.plan.profile.units[first.unit]
    if first.segment is not None:
        return _in_segment(decisions, first)
    if not first.is_kept:
        return _recomputed(decisions, alike, ask=ask)
    if unit.unsafe:
        return f"Unsafe to replay: {unit.unsafe}."
    if unit.is_code:
        return "Code between units: only the model itself can run it."
    if not decisions.ways(first.unit):
        return "Nothing to gain: no other way to run it holds less."
    if decisions.plan.keeps_everything:
        return "The budget has room for everything."
    return _kept(decisions, alike, ask=ask)


def _price(num_bytes: int, seconds: float) -> str:
    if seconds < _NO_TIME_S:
        return f"{format_bytes(num_bytes)} at no cost in time"
    return f"{format_bytes(num_bytes)} for {format_seconds(seconds)} ({format_rate(num_bytes, seconds)})"


def _recomputed(decisions: Decisions, alike: Sequence[Decision], *, ask: bool) -> str:
    first, budget_bytes = alike[0], decisions.plan.budget_bytes
    each = "Each frees" if len(alike) > 1 else "Frees"
    text = f"{each} {_price(first.freed_bytes, first.extra_s)}{_compared(decisions, first)}."
    peak_bytes = decisions.peak_with(first.unit, 0) if ask else None
    if peak_bytes is not None and peak_bytes > budget_bytes:
        kept = "With the first of them kept" if len(alike) > 1 else "Kept"
        text += f" {kept}, the step would peak at {format_bytes(peak_bytes)}, over the budget."
    return text


def _compared(decisions: Decisions, decision: Decision) -> str:
    if decision.extra_s < _NO_TIME_S or not decisions.kept_rate:
        return ""
    rate = decision.freed_bytes / decision.extra_s
    if rate > decisions.kept_rate * 1.01:
        return f", more than any kept unit would ({format_rate(round(decisions.kept_rate), 1.0)})"
    return ", as much as any kept unit would" if rate > decisions.kept_rate * 0.99 else ""


def _in_segment(decisions: Decisions, decision: Decision) -> str:
    segment = decision.segment
    assert segment is not None
    members = [decisions[index] for index in range(segment.first, segment.last + 1)]
    freed_bytes = sum(member.freed_bytes for member in members)
    extra_s = sum(member.extra_s for member in members)
    neighbours = "its neighbour" if len(members) == 2 else f"{len(members) - 1} neighbours"
    return f"Forgotten with {neighbours}: together they free {_price(freed_bytes, extra_s)}."


def _kept(decisions: Decisions, alike: Sequence[Decision], *, ask: bool) -> str:
    first = alike[0]
    way = max(decisions.ways(first.unit), key=lambda way: (way.freed_bytes, -way.extra_s))
    if ask:
        peaks = [decisions.peak_with(decision.unit, way.choice) for decision in (first, alike[-1])]
        if all(peak is not None and peak >= decisions.plan.predicted_bytes for peak in peaks):
            return "Recomputing it would not lower the peak."
    price = _price(way.freed_bytes, way.extra_s)
    it, them = ("each", "them") if len(alike) > 1 else ("it", "it")
    return f"Not needed: the budget is met without {them}. Recomputed, {it} would free {price}."
