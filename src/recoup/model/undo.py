"""Running a unit again and again in the middle of a step, which must not notice."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from recoup.model.named_arguments import named_objects
from recoup.model.streaming import UnitCall
from recoup.snapshot.random_state import held_random_state
from recoup.snapshot.reachable import Reached

__all__ = ["hold_attributes", "made_attributes", "undone"]

_DEEPEST = 4


def _with_history(unit: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Attributes of a unit's modules that are tensors which something else computed, with where they are."""
    places = [vars(module) for module in unit.modules() if not isinstance(module, torch.jit.ScriptModule)]
    return [
        (attributes, name)
        for attributes in places
        for name, value in attributes.items()
        if isinstance(value, Tensor) and value.grad_fn is not None
    ]


def made_attributes(unit: nn.Module) -> list[Tensor]:
    """Tensors among the attributes of a unit's modules that need a gradient and are no parameters.

    Inside `undone` they are those that hooks outside the unit's forward have made.
    """
    return [
        value
        for module in unit.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and value.requires_grad and value.is_leaf
    ]


def hold_attributes(unit: nn.Module) -> Callable[[], None]:
    """Notes the attributes of a unit's modules, and what containers there hold; returns what puts that back."""
    return Reached((), known=unit, follows_code=False, deepest=_DEEPEST).hold()


@contextmanager
def undone(call: UnitCall) -> Iterator[UnitCall]:
    """Puts back what runs of a call change outside of tensors, also if the block raises.

    Yields the call such that each run of it on fresh arguments begins from there.

    Back are: attributes of the unit's modules, objects that it is given, lists and dicts that hooks of modules inside
    it fill (also by way of a context variable), and the random state.

    Inside, tensors that hooks have made for the unit's attributes, as pruning does with weights, begin a history of
    their own, as its arguments do: `made_attributes`.
    """
    containers = [
        (variable.name, value)
        for variable, value in copy_context().items()
        if isinstance(value, (list, dict, set, deque))
    ]
    hooks = [
        (f"a hook of {name}", hook)
        for name, module in call.module.named_modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    ]
    objects = [*named_objects(call), *containers]
    given = Reached(objects, known=call.module, follows_code=False, deepest=_DEEPEST)
    put_back_given, put_back_filled = given.hold(), Reached(hooks, deepest=_DEEPEST).hold()
    put_back_random_state = held_random_state()

    def reset() -> None:
        put_back_given()
        put_back_filled()
        for attributes, name in _with_history(call.module):
            attributes[name] = attributes[name].detach().requires_grad_()

    reset()
    try:
        yield replace(call, reset=reset)
    finally:
        put_back_random_state()
        put_back_given()
        put_back_filled()
