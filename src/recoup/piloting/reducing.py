"""Gradients of `DistributedDataParallel`, reduced after all ranks have agreed that the step ended.

NOTE [ One rank fails alone ]
    1. The wrapper reduces gradients while the backward runs. A rank that fails there leaves the others waiting for it.
       So the step runs without reductions, all ranks agree, and then the gradients are reduced at once.
    2. The wrapper itself reduces them, in its buckets and with its hooks: a backward that adds nothing to any gradient
       tells it that they are all there.
    3. The reductions do not overlap with the backward then: that is the price.
    4. What else the wrapper exchanges, before a forward, it exchanges before the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recoup.errors import FitError
from recoup.torch_private import begin_forward

__all__ = ["Reducing", "reduce_gradients"]


class Reducing:
    """The reductions of a model's wrappers.

    Args:
        model: with its wrapper, if it has one.

    Raises:
        FitError: a wrapper reduces gradients only in its own backward.
    """

    def __init__(self, model: nn.Module) -> None:
        self._wrappers = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
        if any(wrapper.static_graph for wrapper in self._wrappers):
            raise FitError(
                "DistributedDataParallel with static_graph=True reduces gradients only in the backward that it has"
                " learned, and there a rank that runs out of memory leaves the others waiting. Wrap the model without"
                " static_graph=True to use the autopilot."
            )

    @contextmanager
    def delayed(self) -> Iterator[list[DistributedDataParallel]]:
        """A block in which no rank waits for another; gives the wrappers whose gradients are to be reduced after it."""
        waiting = [wrapper for wrapper in self._wrappers if wrapper.require_backward_grad_sync]
        with ExitStack() as stack:
            for wrapper in self._wrappers:
                begin_forward(wrapper)
                stack.enter_context(wrapper.no_sync())
            yield waiting


def reduce_gradients(wrappers: list[DistributedDataParallel]) -> None:
    """Reduces the gradients that are there, by NOTE [ One rank fails alone ]."""
    for wrapper in wrappers:
        wrapper.require_forward_param_sync = True
        owners = [p for p in wrapper.module.parameters() if p.requires_grad and p.grad is not None]
        if not owners:
            continue
        nothing = _AddNothing.apply(*owners)  # type: ignore[no-untyped-call]
        wrapper.reducer.prepare_for_forward()
        wrapper.reducer.prepare_for_backward([nothing] if wrapper.find_unused_parameters else [])
        nothing.backward()


class _AddNothing(torch.autograd.Function):
    """A number whose gradient for every parameter is zero."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # Views of one number: they take no memory.
        return tuple(parameter.new_zeros(()).expand_as(parameter) for parameter in ctx.parameters)
