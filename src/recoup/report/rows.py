"""The rows of the table of units: neighbours that cost the same and are treated alike share one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from recoup.plans.model_plan import ModelPlan, span_name
from recoup.report.decisions import Decision, Decisions
from recoup.report.reasons import explain

__all__ = ["Row", "rows_of"]

# As many positions of other kinds may lie between two units that share a row.
_WIDEST_GAP = 8
# Above this many rows times units, alternatives are not simulated: that would take more than a few seconds.
_MOST_ASKED = 100_000


@dataclass(frozen=True, slots=True)
class Row:
    """Units that cost the same and are treated alike; figures are those of one of them.

    Attributes:
        names: of the units.
        title: their names in short.
        decision: the figures.
        tone: ``"keep"``, ``"recompute"``, ``"unsafe"`` or ``"code"``.
        why: the reason, in a sentence.
    """

    names: tuple[str, ...]
    title: str
    decision: Decision
    tone: str
    why: str


def rows_of(plan: ModelPlan) -> list[Row]:
    """The table's rows, in the order of the step."""
    decisions = Decisions(plan)
    groups = _groups(plan, decisions)
    ask = len(groups) * len(decisions) <= _MOST_ASKED
    return [_row(plan, decisions, group, ask=ask) for group in groups]


def _groups(plan: ModelPlan, decisions: Decisions) -> list[list[Decision]]:
    groups: list[list[Decision]] = []
    # By kind, its latest row: the next unit of the kind joins it, or begins another.
    latest: dict[object, tuple[object, list[Decision]]] = {}
    for decision in decisions:
        unit = plan.profile.units[decision.unit]
        figures = replace(decision, unit=0, segment=None, freed_bytes=0, extra_s=round(decision.extra_s, 9))
        key = (unit.kind, unit.is_code, unit.unsafe, figures)
        kind = key if unit.is_code else unit.kind
        known, group = latest.get(kind, (None, []))
        if known == key and decision.unit - group[-1].unit <= _WIDEST_GAP:
            group.append(decision)
        else:
            groups.append([decision])
            latest[kind] = (key, groups[-1])
    return groups


def _row(plan: ModelPlan, decisions: Decisions, alike: list[Decision], *, ask: bool) -> Row:
    units = [plan.profile.units[decision.unit] for decision in alike]
    first = units[0]
    tone = "keep" if alike[0].is_kept else "recompute"
    if first.unsafe or first.is_code:
        tone = "unsafe" if first.unsafe else "code"
    return Row(
        names=tuple(unit.name for unit in units),
        title=span_name(first.name, units[-1].name),
        decision=alike[0],
        tone=tone,
        why=explain(decisions, alike, ask=ask),
    )
