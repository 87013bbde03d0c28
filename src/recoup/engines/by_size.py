"""Which plan a call of the model runs under, where plans differ by the size of the batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from recoup.errors import RecoupWarning
from recoup.model.conditions import input_shapes
from recoup.plans.by_size.axes import Size
from recoup.plans.by_size.plans import PlansBySize
from recoup.plans.model_plan import ModelPlan
from recoup.plans.tree import Item, tree_of
from recoup.sizes import format_bytes
from recoup.tensors import positional_names

__all__ = ["Picker", "batch_in_words", "plan_of_call"]

_MOST_SHAPES = 4096
"""Of batches whose plans are remembered."""


class Picker:
    """Picks the plan for each call of a model by the shapes of its arguments; warns once of each kind of trouble.

    Args:
        plans: to pick from.

    Attributes:
        size: of the last call's batch; that of the largest measured one if it could not be told, ``None`` before.
    """

    def __init__(self, plans: PlansBySize) -> None:
        self.plans = plans
        self.size: Size | None = None
        self._names: tuple[str, ...] | None = None
        self._warned: set[str] = set()
        self._seen: dict[tuple[Any, ...], tuple[Size, tuple[Item, ...]]] = {}

    def __reduce__(self) -> Any:
        return Picker, (self.plans,)

    def all_items(self) -> set[Item]:
        """What any plan does with any unit."""
        num_units = len(self.plans.profiles.largest.units)
        return {item for schedule in self.plans.schedules for item in tree_of(schedule, num_units)}

    def items_for(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Item, ...]:
        """What the plan for a call does with the units."""
        if self._names is None:
            self._names = positional_names(forward)
        shapes = tuple(input_shapes(self._names, args, kwargs))
        if shapes not in self._seen:
            if len(self._seen) >= _MOST_SHAPES:
                self._seen.clear()
            self._seen[shapes] = self._pick(dict(shapes))
        self.size, items = self._seen[shapes]
        return items

    def _pick(self, shapes: Mapping[str, Sequence[int]]) -> tuple[Size, tuple[Item, ...]]:
        size, largest = self.plans.size_of(shapes), (self.plans.profiles.sizes[-1], self.plans.plan.items)
        if size is None:
            self._warn("unknown", _unknown(self.plans))
            return largest
        if (larger := self.plans.profiles.larger_elsewhere(shapes)) is not None:
            self._warn("elsewhere", _elsewhere(self.plans, larger, shapes))
            return largest
        plan = self.plans.plan_for(size)
        self._look_at(size, plan)
        return size, plan.items

    def _look_at(self, size: Size, plan: ModelPlan) -> None:
        if plan.predicted_bytes > plan.budget_bytes:
            self._warn("over", _over(self.plans, size, plan))
        elif not self.plans.profiles.is_measured(size):
            self._warn("beyond", _beyond(self.plans, size, plan))

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, RecoupWarning, stacklevel=2)


def plan_of_call(
    plans: PlansBySize, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> ModelPlan:
    """The plan for a call, with what is predicted for its size; that of the largest batch if its size is not told."""
    size = plans.size_of(dict(input_shapes(positional_names(forward), args, kwargs)))
    return plans.plan if size is None else plans.plan_at(size)


def batch_in_words(plans: PlansBySize, size: Size) -> str:
    """The size of a batch, for people."""
    return ", ".join(f"{axis.name} = {value}" for axis, value in zip(plans.profiles.axes, size, strict=True))


def _beyond(plans: PlansBySize, size: Size, plan: ModelPlan) -> str:
    measured = f"up to {batch_in_words(plans, plans.profiles.sizes[-1])}"
    if len(size) > 1:
        every = "; ".join(batch_in_words(plans, one) for one in plans.profiles.sizes)
        measured = f"none is as large along both axes: {every}"
    return (
        f"A batch is larger ({batch_in_words(plans, size)}) than all that were measured ({measured}): its bytes"
        f" are extrapolated, and its plan is predicted to peak at {format_bytes(plan.predicted_bytes)} of"
        f" {format_bytes(plan.budget_bytes)}. Fit with a sample as large as any in training."
    )


def _over(plans: PlansBySize, size: Size, plan: ModelPlan) -> str:
    return (
        f"No plan is predicted to fit a batch of this size ({batch_in_words(plans, size)}): the smallest peak is"
        f" {format_bytes(plan.predicted_bytes)}, and the budget {format_bytes(plan.budget_bytes)}. Its step runs under"
        " that plan. Shorten the batch, or raise the budget."
    )


def _elsewhere(plans: PlansBySize, name: str, shapes: Mapping[str, Sequence[int]]) -> str:
    measured = plans.profiles.shapes[name]
    names = " and ".join(axis.name for axis in plans.profiles.axes)
    return (
        f"{name} is {list(shapes[name])}, larger than the {list(measured)} that was measured in a dimension other than"
        f" {names}, which plans are picked by: the call runs under the plan for the largest batch, and may pass the"
        " budget. Fit with samples that vary in that dimension as batches do."
    )


def _unknown(plans: PlansBySize) -> str:
    names = " and ".join(axis.name for axis in plans.profiles.axes)
    return (
        f"The size of a batch is read from {names}, and a call of the model has no such argument: it runs under the"
        " plan for the largest batch. Call the model as in the measured step."
    )
