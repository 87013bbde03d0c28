"""One step of a fitted model: units run under their options, segments under spans.

NOTE [ How a fitted model runs ]
    1. Each unit of the plan that is not simply kept has a stand-in for its forward. The user's code calls it as before.
    2. Outside a segment it runs under its recipe: plain, checkpointed, or with calls inside it checkpointed.
    3. The units of a segment share one `Span`, opened by the first and left by the last. Segments inside it are groups
       of that span's calls: its replay forgets them again.
    4. What a unit calls belongs to it: a unit that another one calls runs plainly there, as it was measured.
    5. Hooks of a unit run around its stand-in, in the forward only. A replay of a segment gathers sharded parameters by
       itself: of its units, only the last has begun its backward by then.
    6. The graph is always the real one. If the user's code does something else than in the measured step, gradients
       stay right; only the memory may differ.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from recoup.checkpointing import Checkpoint, Group, Span, is_replaying
from recoup.model.recipe import KEEP, Recipe, run_recipe
from recoup.model.sharded import gather
from recoup.plans.tree import Item, Leaf, Segment, leaves_of

__all__ = ["Nesting", "PlannedCall", "Run"]

_CHECKPOINT = Checkpoint()
Recipes = Mapping[int, Sequence[Recipe]]


class Nesting(threading.local):
    """Whether this thread runs a unit's forward or its replay: a backward may run in a thread of its own."""

    is_inside = False


class Gathering:
    """Gathers the sharded parameters of units that are replayed."""

    def __init__(self) -> None:
        self._owners: dict[nn.Module, Any] = {}
        self._root: weakref.ref[nn.Module] | None = None

    def begin(self, model: nn.Module) -> None:
        """A step of a model begins."""
        if self._root is None or self._root() is not model:
            self._root, self._owners = weakref.ref(model), {}

    def __call__(self, unit: nn.Module) -> None:
        """A unit is about to be replayed."""
        gather(self._owners, self._root() if self._root else None, unit)

    def __reduce__(self) -> Any:
        return Gathering, ()


class PlannedCall:
    """A unit's own forward, with its place in the plan."""

    # Slots: a search for what the function can reach follows `__wrapped__` only.
    __slots__ = ("__name__", "__self__", "__wrapped__", "gathering", "module", "nesting", "unit")

    def __init__(
        self,
        unit: int,
        module: nn.Module,
        fn: Callable[..., Any],
        nesting: Nesting | None = None,
        gathering: Gathering | None = None,
    ) -> None:
        # For error texts, this is the module's own method.
        self.__self__, self.__name__, self.__wrapped__ = module, "forward", fn
        self.unit, self.module, self.nesting = unit, module, nesting or Nesting()
        self.gathering = gathering

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward itself."""
        nesting = self.nesting
        if self.gathering is not None and is_replaying():
            self.gathering(self.module)
        before, nesting.is_inside = nesting.is_inside, True
        try:
            return self.__wrapped__(*args, **kwargs)
        finally:
            nesting.is_inside = before


class _CallUnder:
    """A unit's call under its recipe, as one function of a span."""

    __slots__ = ("__name__", "__self__", "__wrapped__", "recipe")

    def __init__(self, call: PlannedCall, recipe: Recipe) -> None:
        self.__self__, self.__name__, self.__wrapped__ = call.module, "forward", call
        self.recipe = recipe

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run_recipe(self.recipe, self.__self__, self.__wrapped__, args, kwargs)


class Run:
    """One pass over a list of items, call by call."""

    def __init__(self, items: Sequence[Item], recipes: Recipes) -> None:
        self._item_of = {unit: item for item in items for unit in range(item.first, item.last + 1)}
        self._recipe_of = {leaf.unit: recipes[leaf.unit][leaf.option] for leaf in leaves_of(items)}
        self._segment: Segment | None = None
        self._span: Span | None = None

    def __call__(self, call: PlannedCall, *args: Any, **kwargs: Any) -> Any:
        """Runs a unit's call as its item says."""
        item, recipe = self._item_of[call.unit], self._recipe_of[call.unit]
        if isinstance(item, Leaf):
            return run_recipe(recipe, call.module, call, args, kwargs)
        if item is not self._segment or call.unit == item.first or self._span is None:
            self._segment, self._span = item, Span(_CHECKPOINT, _groups(item))
        span = self._span
        if call.unit == item.last:
            # The span holds the segment's input: it must not live longer than needed.
            self._segment = self._span = None
        return span.call(call if recipe == KEEP else _CallUnder(call, recipe), args, kwargs)


def _groups(segment: Segment, offset: int | None = None) -> tuple[Group, ...]:
    """The segments inside a segment, by calls of its span, which are numbered from 0."""
    offset = segment.first if offset is None else offset
    inner = [item for item in segment.items if isinstance(item, Segment)]
    return tuple(Group(item.first - offset, item.last - offset, _groups(item, offset)) for item in inner)
