"""The recipes of a captured unit: cuts of its graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from torch.fx import Node

from recoup.capture.options import cuts_of, with_steady_cuts
from recoup.capture.run import capture, refusing
from recoup.devices.meter import device_of
from recoup.errors import CaptureError
from recoup.measuring.unit.one_unit import forward_and_backward
from recoup.model.cut_graph import gradients_from, seeded
from recoup.model.recipe import KEEP, Recipe, run_recipe, unwrapped
from recoup.model.streaming import UnitCall
from recoup.model.undo import hold_attributes
from recoup.torch_private import allocations_seen

__all__ = ["captured_recipes", "is_further_cut", "run_once"]

_UNSEEN = (
    "on a CPU what its generated code allocates could not be counted, because torch forgets the code or generates C++"
    " around it: unset TORCHINDUCTOR_FORCE_DISABLE_CACHES and TORCHINDUCTOR_CPP_WRAPPER"
)


def captured_recipes(
    call: UnitCall,
    engine: str,
    seconds_of: Callable[[Node], float],
    wanted: Sequence[bool] | None,
    settings: str = "",
) -> list[Recipe]:
    """The cuts that are worth measuring, and the first of them recomputed as a whole. Only the first has run.

    Args:
        call: to capture.
        engine: ``"captured"`` or ``"compiled"``.
        seconds_of: an operation's seconds.
        wanted: for each tensor among its outputs, whether the step gives it a gradient.
        settings: of the compiler, as a `Cut` has them.

    Raises:
        CaptureError: the compiler cannot capture the unit, or not without a change of what gets a gradient.
    """
    args, kwargs, _ = call.fresh()
    graph = capture(engine, unwrapped(call.fn), args, kwargs, settings, again=partial(_next_step, call))
    cuts = with_steady_cuts(graph, cuts_of(graph, engine, seconds_of, settings))
    recipes = [Recipe(cut=cut) for cut in cuts]
    seen: list[bool] = []
    with refusing(), allocations_seen(lambda _: seen.append(True)):
        with_gradient = _with_gradient(call, recipes[0], wanted)
    if not seen and engine == "compiled" and device_of(call.module, (call.args, call.kwargs)).type == "cpu":
        raise CaptureError(_UNSEEN)
    if new := with_gradient - _with_gradient(call, KEEP, wanted):
        raise CaptureError(
            f"{min(new)} gets no gradient in the step, and would get zeros, which optimizers treat otherwise"
        )
    return [*recipes, Recipe(whole=True, cut=recipes[0].cut)]


def _next_step(call: UnitCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments for a call as the next step makes it: they are fresh, and the unit is as its last call left it."""
    put_back = hold_attributes(call.module)
    args, kwargs, _ = call.fresh()
    put_back()
    return args, kwargs


def is_further_cut(recipe: Recipe) -> bool:
    """Whether a recipe has another cut than the engine's own, and so code of its own."""
    return recipe.cut is not None and recipe.cut.saves is not None


def run_once(call: UnitCall, recipes: Iterable[Recipe], wanted: Sequence[bool] | None) -> None:
    """Lets the compiler compile a call under some recipes: under a meter, it cannot.

    ``wanted`` is as for `captured_recipes`. A recipe that fails will fail again when it is measured, and is left out
    there.
    """
    for recipe in recipes:
        with suppress(CaptureError), refusing():
            for part in forward_and_backward(call, recipe, wanted):
                part()


def _with_gradient(call: UnitCall, recipe: Recipe, wanted: Sequence[bool] | None) -> set[str]:
    """The names of the parameters that get a gradient."""
    args, kwargs, start = call.fresh()
    named = {name: one for name, one in call.module.named_parameters() if one.requires_grad}
    seed = seeded(run_recipe(recipe, call.module, call.fn, args, kwargs), wanted)
    # With the inputs' gradients, as in a step: without them some kernels crash (GroupNorm's on channels-last inputs).
    _, *found = gradients_from([seed], [start, *named.values()]) if seed is not None and named else (None,)
    return {name for name, gradient in zip(named, found, strict=False) if gradient is not None}
