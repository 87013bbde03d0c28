"""What happens inside a captured unit, operation by operation."""

from __future__ import annotations

from dataclasses import dataclass

from recoup.capture.explain import OperationFate, fates_of
from recoup.capture.run import graph_of
from recoup.errors import UnitError
from recoup.given import check_given
from recoup.plans.model_plan import ModelPlan
from recoup.plans.tree import leaves_of
from recoup.report.subject import Subject
from recoup.sizes import format_bytes

__all__ = ["Explanation", "explain", "explanations"]


@dataclass(frozen=True)
class Explanation:
    """How one unit runs.

    Attributes:
        unit: its name.
        recipe: how it runs, in a few words.
        operations: of its forward, in order; empty for a unit that runs eagerly.
        note: why there are none.
    """

    unit: str
    recipe: str
    operations: tuple[OperationFate, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        lines = [f"{self.unit}: {self.recipe}"]
        if self.note:
            return f"{lines[0]}. {self.note}"
        names = [f"{one.name} ({one.operation})" for one in self.operations]
        width = max(map(len, names), default=0)
        for name, one in zip(names, self.operations, strict=True):
            figures = f"{format_bytes(one.num_bytes):>9}  {one.seconds * 1e6:8.1f} us  {one.fate:<10}"
            lines.append(f"  {name:<{width}}  {figures}  {one.line}".rstrip())
        return "\n".join(lines)


def explain(fitted: Subject, unit: str) -> Explanation:
    """What happens to each operation of a unit: bytes, microseconds, kept or recomputed, and the line that made it.

    Args:
        fitted: what `recoup.fit` returned.
        unit: its name, such as ``"layers.3"``.

    Raises:
        UnitError: the plan has no such unit.
    """
    check_given(fitted, Subject, "explain takes what recoup.fit returns")
    plan = fitted.plan
    units = plan.profile.units
    for leaf in leaves_of(plan.items):
        if units[leaf.unit].name == unit:
            return _explain(plan, leaf.unit, leaf.option)
    names = ", ".join(one.name for one in units[:8] if not one.is_code)
    raise UnitError(f"The plan has no unit {unit!r}; it has {names}{', ...' if len(units) > 8 else ''}.")


def explanations(plan: ModelPlan) -> list[tuple[str, Explanation]]:
    """Of each way to run captured units, its first unit and how that runs."""
    found: dict[object, tuple[str, Explanation]] = {}
    for leaf in leaves_of(plan.items):
        unit = plan.profile.units[leaf.unit]
        cut = unit.recipes[leaf.option].cut
        if cut is not None and cut not in found and graph_of(cut) is not None:
            found[cut] = (unit.name, _explain(plan, leaf.unit, leaf.option))
    return list(found.values())


def _explain(plan: ModelPlan, index: int, option: int) -> Explanation:
    unit = plan.profile.units[index]
    recipe = unit.recipes[option]
    if recipe.cut is None:
        small = "it holds too little to be worth capturing" if plan.profile.is_captured else ""
        why = (
            unit.uncaptured
            or small
            or "only captured units (engine='captured' or 'compiled') have operations"
        )
        return Explanation(unit.name, recipe.name, note=f"It runs eagerly: {why}.")
    graph = graph_of(recipe.cut)
    if graph is None:
        return Explanation(
            unit.name, recipe.name, note="Its graph was captured in another process: fit here."
        )
    return Explanation(unit.name, recipe.name, fates_of(graph, recipe.cut))
