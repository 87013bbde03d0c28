"""The recipes of a captured unit: cuts of its graph, each of which has run once."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Node

from recoup.capture.options import cuts_of
from recoup.capture.run import capture
from recoup.measuring.unit.one_unit import forward_and_backward
from recoup.model.recipe import Recipe, unwrapped
from recoup.model.streaming import UnitCall

__all__ = ["captured_recipes"]


def captured_recipes(call: UnitCall, engine: str, seconds_of: Callable[[Node], float]) -> list[Recipe]:
    """The cuts that are worth measuring, and the first of them recomputed as a whole.

    Each runs once: under a meter, nothing can be compiled.

    Raises:
        CaptureError: the compiler cannot capture the unit.
    """
    args, kwargs, _ = call.fresh()
    graph = capture(engine, unwrapped(call.fn), args, kwargs)
    recipes = [Recipe(cut=cut) for cut in cuts_of(graph, engine, seconds_of)]
    for recipe in recipes:
        for part in forward_and_backward(call, recipe):
            part()
    return [*recipes, Recipe(whole=True, cut=recipes[0].cut)]
