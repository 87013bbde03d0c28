"""The ways to run a unit: what of it is checkpointed, and whether it runs as a captured graph."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from recoup.capture.cut import Cut
from recoup.checkpointing import Checkpoint
from recoup.model.replace_forward import StandIn
from recoup.model.tracing import is_recomputed_by_others

__all__ = [
    "KEEP",
    "RECOMPUTE",
    "InnerForward",
    "MarkedCall",
    "Recipe",
    "checkpointed",
    "fn_under",
    "run_recipe",
    "unwrapped",
]


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way to run a unit.

    Attributes:
        whole: whether the unit's call is checkpointed as a whole.
        inner: modules inside it whose calls are checkpointed, by their names relative to the unit.
        cut: how it is cut into forward and backward, if it runs as a captured graph.

    >>> Recipe(whole=False, inner=("mlp", "norm")).name
    'recompute mlp, norm'
    >>> Recipe(whole=True, inner=("mlp",)).name
    'recompute, then again mlp'
    """

    whole: bool = False
    inner: tuple[str, ...] = ()
    cut: Cut | None = None

    @property
    def is_kept(self) -> bool:
        """Whether nothing is recomputed but what the engine recomputes by itself."""
        return not self.whole and not self.inner and (self.cut is None or self.cut.saves is None)

    @property
    def by_seconds(self) -> bool:
        """Whether measured seconds have chosen it: another measurement may not have it."""
        return self.cut is not None and self.cut.by_seconds

    @property
    def kept(self) -> Recipe:
        """How the unit runs with everything kept and the same kernels: its results are bit-equal to those."""
        return self.uncut if self.cut is not None and self.cut.engine == "compiled" else KEEP

    @property
    def uncut(self) -> Recipe:
        """How the unit runs with everything kept: as a graph under the engine's own cut, if it is captured."""
        if self.cut is None:
            return KEEP
        return Recipe(cut=replace(self.cut, saves=None, number=0, by_seconds=False))

    @property
    def name(self) -> str:
        """Its name in plans and reports."""
        if self.cut is not None:
            return f"recompute, {self.cut.name}" if self.whole else self.cut.name
        if not self.inner:
            return "recompute" if self.whole else "keep"
        return ("recompute, then again " if self.whole else "recompute ") + ", ".join(self.inner)

    def modules(self, unit: nn.Module) -> frozenset[nn.Module]:
        """The modules inside a unit that are checkpointed."""
        return frozenset(map(unit.get_submodule, self.inner))


_CHECKPOINT = Checkpoint()
KEEP, RECOMPUTE = Recipe(), Recipe(whole=True)


class _Marked(threading.local):
    """The modules to checkpoint in the unit that this thread runs."""

    modules: frozenset[nn.Module] = frozenset()


_marked = _Marked()


class MarkedCall:
    """A unit's forward with some of the modules inside it checkpointed."""

    def __init__(self, unit: nn.Module, fn: Callable[..., Any], modules: frozenset[nn.Module]) -> None:
        # Error texts name it as the unit's own method.
        self.__self__, self.__name__, self.__wrapped__ = unit, "forward", fn
        self.unit, self.fn, self.modules = unit, fn, modules

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward with these modules marked."""
        before, _marked.modules = _marked.modules, self.modules
        try:
            return self.fn(*args, **kwargs)
        finally:
            _marked.modules = before


class CutCall:
    """A unit's forward as a captured graph."""

    # Slots: a search for what the function can reach follows `__wrapped__` only.
    __slots__ = ("__name__", "__self__", "__wrapped__", "cut")

    def __init__(self, unit: nn.Module, fn: Callable[..., Any], cut: Cut) -> None:
        self.__self__, self.__name__, self.__wrapped__ = unit, "forward", fn
        self.cut = cut

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the graph."""
        from recoup.capture.run import run_cut

        return run_cut(self.cut, unwrapped(self.__wrapped__), args, kwargs, eager=self.__wrapped__)


def unwrapped(fn: Any) -> Callable[..., Any]:
    """A unit's own forward, without what recoup has put around it."""
    while type(fn).__module__.partition(".")[0] == __name__.partition(".")[0]:
        fn = fn.__wrapped__
    return fn  # type: ignore[no-any-return]


def run_recipe(
    recipe: Recipe, unit: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Runs a unit's forward under a recipe."""
    run = fn_under(recipe, unit, fn)
    return checkpointed(run, args, kwargs) if recipe.whole else run(*args, **kwargs)


def checkpointed(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a call under `Checkpoint`, also one without arguments."""
    return _CHECKPOINT(fn, *args, **kwargs) if args or kwargs else _CHECKPOINT(fn)()


def fn_under(recipe: Recipe, unit: nn.Module, fn: Callable[..., Any]) -> Callable[..., Any]:
    """A unit's forward as a recipe says, but for the checkpoint around the whole of it."""
    if recipe.cut is not None:
        return CutCall(unit, fn, recipe.cut)
    return MarkedCall(unit, fn, recipe.modules(unit)) if recipe.inner else fn


class InnerForward(StandIn):
    """Stands in for the forward of a module inside a unit: checkpointed if the running recipe marks the module."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the call, checkpointed if it is marked."""
        is_marked = self.module in _marked.modules and torch.is_grad_enabled()
        if is_marked and not is_recomputed_by_others():
            return checkpointed(self.original, args, kwargs)
        return self.original(*args, **kwargs)
