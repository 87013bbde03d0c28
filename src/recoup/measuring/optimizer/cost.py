"""The state and the scratch of an optimizer, without running it on the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from recoup.measuring.optimizer.rehearsal import rehearse_on_fakes, rehearse_on_samples
from recoup.model.optimizer_state import budget_devices, outermost, parameters_of, state_bytes_of
from recoup.model.optimizers import read_optimizers
from recoup.tensors import plain_tensors

__all__ = ["OptimizerCost", "joint_cost", "optimizer_cost"]


@dataclass(frozen=True)
class OptimizerCost:
    """Bytes of an optimizer on the device that computes with its parameters, beside parameters and gradients.

    Attributes:
        state_bytes: of its state now.
        missing_bytes: that its state will take in addition once every parameter with a gradient was stepped.
        transient_bytes: scratch of one `step()`.
        is_estimate: whether its step could not be rehearsed exactly.
        closure_bytes: that one `step()` holds, beside its state, while a closure runs the model.
    """

    state_bytes: int
    missing_bytes: int
    transient_bytes: int
    is_estimate: bool = False
    closure_bytes: int = 0


def optimizer_cost(optimizer: Optimizer, *, device_type: str | None = None) -> OptimizerCost:
    """Measures an optimizer by rehearsing steps of a copy of it on fake tensors.

    The optimizer and the model do not change, and nothing is allocated on their device. Where the rehearsal fails (a
    step that reads values), one on a few elements of each tensor is scaled up. Where that fails as well (a step that
    needs a closure), two tensors of each parameter's size are assumed for the missing state, and two for the scratch.
    `is_estimate` marks both. For `torch.optim.LBFGS` the whole history counts, which it fills in as many iterations.

    Args:
        optimizer: to measure; it may be inside a trainer's wrapper.
        device_type: measure it as if its parameters were on such a device, which need not be there.

    Only the device that computes with the parameters counts: step counters in host memory do not, beside parameters on
    an accelerator, nor does anything of parameters that FSDP2 keeps in host memory.

    >>> layer = torch.nn.Linear(8, 4)
    >>> optimizer_cost(torch.optim.SGD(layer.parameters(), momentum=0.9))
    OptimizerCost(state_bytes=0, missing_bytes=144, transient_bytes=0, is_estimate=False, closure_bytes=0)
    """
    (optimizer,) = read_optimizers(optimizer)
    parameters = parameters_of(optimizer)
    devices = budget_devices(parameters)
    rehearsed = None if device_type is None else torch.device(device_type, 0)
    state_bytes = state_bytes_of(optimizer)
    if isinstance(optimizer, LBFGS):
        return _lbfgs_cost(optimizer, state_bytes, [p for p in parameters if p.device in devices])
    # The step is the user's code: any exception means that it cannot be rehearsed in this way.
    with suppress(Exception):
        return OptimizerCost(state_bytes, *rehearse_on_fakes(optimizer, devices, rehearsed))
    with suppress(Exception):
        return OptimizerCost(state_bytes, *rehearse_on_samples(optimizer, devices), is_estimate=True)
    trained = [p for p in parameters if p.requires_grad and p.device in devices]
    missing_bytes = 2 * _num_bytes(parameter for parameter in trained if not optimizer.state.get(parameter))
    return OptimizerCost(state_bytes, missing_bytes, 2 * _num_bytes(trained), is_estimate=True)


def _lbfgs_cost(optimizer: LBFGS, state_bytes: int, parameters: Sequence[Tensor]) -> OptimizerCost:
    """Counted in vectors as large as all parameters.

    Its state: old directions and steps, the last direction, the last gradient; and numbers. While its closure runs the
    model once more, its step holds the gradient, two directions that it computes, and what its line search does.
    """
    group = optimizer.param_groups[0]
    searches = group["line_search_fn"] is not None
    num_held = 9 if searches else 3 if group["max_iter"] > 1 else 0
    num_scratch = num_held + 1 if searches else max(3, num_held + 2)
    vector_bytes = _num_bytes(parameters)
    number_bytes = max((parameter.element_size() for parameter in parameters), default=0)
    num_old = 2 * group["history_size"]
    full_bytes = (num_old + 2) * vector_bytes + (num_old + 1) * number_bytes
    return OptimizerCost(
        state_bytes,
        max(0, full_bytes - state_bytes),
        num_scratch * vector_bytes,
        is_estimate=True,
        closure_bytes=num_held * vector_bytes,
    )


def joint_cost(optimizers: Iterable[Optimizer], *, device_type: str | None = None) -> OptimizerCost:
    """The cost of several optimizers, which step one after the other; some may be inside others."""
    found = [optimizer_cost(optimizer, device_type=device_type) for optimizer in outermost(optimizers)]
    return OptimizerCost(
        sum(cost.state_bytes for cost in found),
        sum(cost.missing_bytes for cost in found),
        max((cost.transient_bytes for cost in found), default=0),
        any(cost.is_estimate for cost in found),
        max((cost.closure_bytes for cost in found), default=0),
    )


def _num_bytes(parameters: Iterable[Tensor]) -> int:
    return sum(plain.nbytes for parameter in parameters for plain in plain_tensors(parameter))
