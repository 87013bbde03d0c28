"""What stands in for the forwards of a model and its units, while a plan is on it."""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from typing import Any

import torch
from torch import nn

from recoup.checkpointing import process_lock
from recoup.engines.by_size import Picker
from recoup.engines.running import Gathering, Nesting, PlannedCall, Run
from recoup.engines.waiting import Waiting
from recoup.engines.watching import Watch
from recoup.model.recipe import KEEP, RECOMPUTE, Recipe, run_recipe
from recoup.model.replace_forward import StandIn
from recoup.plans.tree import Item, Segment, leaves_of
from recoup.torch_private import is_exporting

__all__ = ["Engine", "KeptRoot", "Root", "UnitForward", "UnseenForward"]


class Engine(Nesting):
    """What the stand-ins of one model share: the plan, and the state of the step that this thread runs."""

    def __init__(
        self,
        items: Sequence[Item],
        recipes: dict[int, tuple[Recipe, ...]],
        watch: Watch,
        picker: Picker | None = None,
    ) -> None:
        self.items, self.recipes, self.watch, self.picker = tuple(items), recipes, watch, picker
        self.gathering = Gathering()
        self.depth = 0
        self._last_planned = max(self.planned(), default=-1)
        self.reset()

    def reset(self) -> None:
        """Drops the state of a step, before the next begins and after it has ended."""
        self.run = Run(self.items, self.recipes)
        self.num_calls: dict[nn.Module, int] = {}
        self.waiting = Waiting()
        self.last_unit = -1

    @property
    def goes_on(self) -> bool:
        """Whether the step has not ended with the model's call: the plan has more, and no backward has begun."""
        conditions = self.watch.conditions
        may_go_on = self.picker is None and (conditions is None or conditions.forwards > 1)
        return may_go_on and self.last_unit < self._last_planned and bool(self.waiting)

    def planned(self) -> dict[int, tuple[str, ...]]:
        """Units that are not simply kept, each with the modules inside that any of its recipes checkpoints."""
        planned: dict[int, tuple[str, ...]] = {}
        for item in self.items if self.picker is None else self.picker.all_items():
            for leaf in leaves_of([item]):
                recipe = self.recipes[leaf.unit][leaf.option]
                if isinstance(item, Segment) or recipe != KEEP:
                    planned[leaf.unit] = (*planned.get(leaf.unit, ()), *recipe.inner)
        return planned

    def begin(self, root: Root, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call of the model begins: under the plan for the size of its batch, if plans differ by it."""
        if self.picker is not None:
            self.items = self.picker.items_for(root.original, args, kwargs)
        if not self.goes_on:
            self.reset()
        self.gathering.begin(root.module)
        if self.depth == 0:
            self.watch.before(root.module, root.original, args, kwargs)

    def __reduce__(self) -> Any:
        return Engine, (self.items, self.recipes, self.watch, self.picker)


class Planned(StandIn):
    """Stands in for a forward by the plan."""

    def __init__(self, engine: Engine, module: nn.Module) -> None:
        super().__init__(module)
        self.engine = engine

    def run_traced(self, *args: Any, **kwargs: Any) -> Any:
        """Warns that the plan is not in force where the model is compiled."""
        if torch.compiler.is_dynamo_compiling() and not is_exporting():
            self.engine.watch.at_compiling()
        return self.original(*args, **kwargs)


class Root(Planned):
    """Stands in for the model's forward: each call is a step of its own, unless the plan is for several."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a call, and watches it."""
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        engine = self.engine
        items = engine.items
        engine.begin(self, args, kwargs)
        taken = process_lock.acquire()  # units that are kept draw from the same generators
        engine.depth += 1
        before, engine.watch.thread = engine.watch.thread, get_ident() if taken else engine.watch.thread
        has_returned = False
        try:
            output = self.original(*args, **kwargs)
            has_returned = True
        finally:
            engine.watch.thread = before
            engine.depth -= 1
            engine.items = items
            if not (has_returned and engine.goes_on):
                engine.reset()
            if taken:
                process_lock.release()
        if engine.depth == 0:
            engine.watch.after(output)
        return output


class KeptRoot(Root):
    """The same for a plan that keeps everything, and has no effect that could be missing in compiled code."""

    def run_traced(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model."""
        return self.original(*args, **kwargs)


class UnitForward(Planned):
    """Stands in for a unit's forward: runs each of its calls as the plan says."""

    def __init__(
        self, engine: Engine, module: nn.Module, units: Sequence[int], *, training: bool | None
    ) -> None:
        super().__init__(engine, module)
        self.training = training
        """The mode that the plan is for; None for both."""
        self.units = tuple(units)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a call by the plan, if that is in force."""
        engine = self.engine
        if engine.is_inside or not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        if self.training is not None and self.module.training != self.training:
            engine.watch.at_unit_in_other_mode(self.training)
            return self.original(*args, **kwargs)
        if engine.watch.is_recomputed_by_others(self.module):
            return self.original(*args, **kwargs)
        unit = engine.last_unit = self._unit()
        call = PlannedCall(unit, self.module, self.original, engine, engine.gathering)
        if engine.depth or engine.watch.thread is None:
            output = engine.run(call, *args, **kwargs)
        else:
            # A thread of the model's own, beside the one that runs the model.
            with process_lock.shared(engine.watch.thread):
                output = engine.run(call, *args, **kwargs)
        if len(self.units) > 1:
            engine.waiting.add(output)
        return output

    def _unit(self) -> int:
        engine = self.engine
        number = engine.num_calls.get(self.module, 0)
        if engine.depth == 0 and number and (number == len(self.units) or not engine.waiting):
            # A step of the user's calls parts of the model, and never the model itself: a new step has begun.
            engine.num_calls.clear()
            number = 0
        engine.num_calls[self.module] = number + 1
        if number == len(self.units) and engine.depth:
            engine.watch.at_more_calls(self.module, number)
        return self.units[min(number, len(self.units) - 1)]


class UnseenForward(Planned):
    """Stands in for the forward of a module that the measured step did not call, beside units of its kind.

    It is recomputed, if that is safe: nothing that it would keep is part of the plan's peak.
    """

    def __init__(self, engine: Engine, module: nn.Module, *, may_replay: bool) -> None:
        super().__init__(engine, module)
        self.may_replay = may_replay

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a call, and says so."""
        engine = self.engine
        is_plain = (
            engine.is_inside or not torch.is_grad_enabled() or not engine.watch.is_in_force(self.module)
        )
        if is_plain or engine.watch.is_recomputed_by_others(self.module):
            return self.original(*args, **kwargs)
        engine.watch.at_unseen(self.module)
        if not self.may_replay:
            return self.original(*args, **kwargs)
        call = PlannedCall(-1, self.module, self.original, engine, engine.gathering)
        return run_recipe(RECOMPUTE, self.module, call, args, kwargs)
