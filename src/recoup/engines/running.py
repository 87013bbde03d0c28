"""One step of a fitted model: units run under their options, segments under spans.

NOTE [ How a fitted model runs ]
    1. Each unit of the plan that is not simply kept has a stand-in for its forward. The user's code calls it as before.
    2. Outside a segment it runs under its recipe: plain, checkpointed, or with calls inside it checkpointed.
    3. The units of a segment share one `Span`, opened by the first and left by the last. Its replay runs a `Run` of its
       own over the segment's items, which opens spans inside: nested segments need no further rule.
    4. What a unit calls belongs to it: a unit that another one calls runs plainly there, as it was measured.
    5. The graph is always the real one. If the user's code does something else than in the measured step, gradients
       stay right; only the memory may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from recoup.checkpointing import Checkpoint
from recoup.checkpointing.span import Span
from recoup.engines.tree import Item, Leaf, Segment
from recoup.measuring.options import Recipe, run_recipe

__all__ = ["Nesting", "PlannedCall", "Run"]

_CHECKPOINT = Checkpoint()
Recipes = Mapping[int, Sequence[Recipe]]


class Nesting:
    """Whether a unit's forward is running, at first or again."""

    is_inside = False


class PlannedCall:
    """A unit's own forward, with its place in the plan."""

    # Slots, so that who looks for what the function reaches follows `__wrapped__` only.
    __slots__ = ("__name__", "__self__", "__wrapped__", "module", "nesting", "unit")

    def __init__(
        self, unit: int, module: nn.Module, fn: Callable[..., Any], nesting: Nesting | None = None
    ) -> None:
        # For error texts, this is the module's own method.
        self.__self__, self.__name__, self.__wrapped__ = module, "forward", fn
        self.unit, self.module, self.nesting = unit, module, nesting or Nesting()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward itself."""
        nesting = self.nesting
        before, nesting.is_inside = nesting.is_inside, True
        try:
            return self.__wrapped__(*args, **kwargs)
        finally:
            nesting.is_inside = before


class Run:
    """One pass over a list of items, call by call."""

    def __init__(self, items: Sequence[Item], recipes: Recipes) -> None:
        self._item_of = {unit: item for item in items for unit in range(item.first, item.last + 1)}
        self._recipes = recipes
        self._segment: Segment | None = None
        self._span: Span | None = None

    def __call__(self, call: PlannedCall, *args: Any, **kwargs: Any) -> Any:
        """Runs a unit's call as its item says."""
        item = self._item_of[call.unit]
        if isinstance(item, Leaf):
            recipe = self._recipes[item.unit][item.option]
            return run_recipe(recipe, call.module, call, args, kwargs)
        if item is not self._segment or call.unit == item.first or self._span is None:
            self._segment, self._span = item, self._open(item)
        span = self._span
        if call.unit == item.last:
            # Not a moment longer than needed: the span holds the segment's input.
            self._segment = self._span = None
        return span.call(call, args, kwargs)

    def _open(self, segment: Segment) -> Span:
        recipes = self._recipes
        return Span(_CHECKPOINT, lambda: Run(segment.items, recipes))
