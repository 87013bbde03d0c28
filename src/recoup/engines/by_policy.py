"""A policy on a model: the units, found without running it, and the segments that the policy divides them into.

NOTE [ Units without a profile ]
    1. Modules are taken to be called in the order in which they are registered, each once. A container without a
       forward of its own (ModuleList, ModuleDict) is not called: what it holds is. So it is with a forward that is a
       generator. With a sample, the model is run once instead, without a trace, and shows its calls.
    2. Units are then chosen as `measure` chooses them. Nothing is known of bytes: without a sample, a module counts as
       many as it has layers. A single operation in place is no unit here: what it changes was made before, and a
       segment that began with it could not be replayed. It runs as it is.
    3. The order decides only how much is held. A model that calls its units in another order, more than once or not at
       all gets the same gradients, since a span replays the calls that it has seen.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from recoup.errors import PolicyError, RecoupWarning
from recoup.model.calls import ModuleCall, module_names, watch_calls
from recoup.model.replace_forward import own_forward
from recoup.model.slices import unit_names
from recoup.model.step import TrainingStep
from recoup.model.units import Units, choose_units, find_units
from recoup.model.wrappers import unsynchronized
from recoup.plans.tree import Item, Leaf, Segment, leaves_of
from recoup.policies import KeepAll, Policy

__all__ = ["arrange", "registered_calls"]


def arrange(
    model: nn.Module,
    policy: Policy,
    *,
    units: Units | Iterable[Units] | None,
    sample: Any,
    costs: Sequence[float] | None,
) -> tuple[list[nn.Module], list[Item]]:
    """A model's units, and how they run under a policy.

    Raises:
        PolicyError: the policy does not suit these units.
        UnitError: there are no such units.
    """
    root = registered_calls(model) if sample is None else _seen_calls(model, sample)
    found = _apart_from_in_place(choose_units(root)) if units is None else find_units(root, units)
    labels = unit_names(model, found)
    names = [labels[unit] or type(model).__name__ for unit in found]
    try:
        segments = policy.for_names(names).segments(len(names), costs)
    except PolicyError as error:
        raise PolicyError(f"{error} {_which(model, names)}") from None
    if not segments and policy != KeepAll():
        warnings.warn(
            f"{policy} recomputes nothing here. {_which(model, names)} UniformSegments({len(names)}) recomputes each of"
            " them by itself; units= names others.",
            RecoupWarning,
            stacklevel=3,
        )
    items: list[Item] = [
        Segment(first, last, tuple(Leaf(unit, 0) for unit in range(first, last + 1)))
        for first, last in segments
    ]
    recomputed = {leaf.unit for leaf in leaves_of(items)}
    items += [Leaf(unit, 0) for unit in range(len(names)) if unit not in recomputed]
    return found, sorted(items, key=lambda item: item.first)


def _apart_from_in_place(units: Sequence[nn.Module]) -> list[nn.Module]:
    return [unit for unit in units if not getattr(unit, "inplace", False)]


def registered_calls(model: nn.Module) -> ModuleCall:
    """The calls of a model, as its modules are registered: NOTE [ Units without a profile ], 1 and 2."""
    names = module_names(model)
    around: list[nn.Module] = []

    def call(module: nn.Module) -> ModuleCall:
        around.append(module)
        inside = [call(child) for child in _callable_inside(module) if child not in around]
        around.pop()
        return ModuleCall(names[module], module, inside, sum(part.made_bytes for part in inside) or 1)

    return call(model)


def _callable_inside(module: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        function = getattr(own_forward(child), "__func__", None)
        is_called = function is not nn.Module.forward and not inspect.isgeneratorfunction(function)
        found += [child] if is_called else _callable_inside(child)
    return found


def _seen_calls(model: nn.Module, sample: Any) -> ModuleCall:
    step = TrainingStep(model, sample)
    with unsynchronized([model]), step.plain():
        return watch_calls(step)


def _which(model: nn.Module, names: Sequence[str]) -> str:
    listed = [*names[:8], f"… ({len(names) - 8} more)"] if len(names) > 9 else names
    return f"The {len(names)} units of {type(model).__name__} are {', '.join(listed)}."
