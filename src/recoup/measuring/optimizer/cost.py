"""The state and the scratch of an optimizer, without running it on the model."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from recoup.measuring.optimizer.rehearsal import rehearse_on_fakes, rehearse_on_samples
from recoup.measuring.optimizer.state import outermost, parameters_of, state_storages
from recoup.model.optimizers import read_optimizers
from recoup.tensors import plain_tensors, working_device

__all__ = ["OptimizerCost", "joint_cost", "optimizer_cost", "state_bytes_of"]


@dataclass(frozen=True)
class OptimizerCost:
    """Bytes of an optimizer on the device that computes with its parameters, beside parameters and gradients.

    Attributes:
        state_bytes: of its state now.
        missing_bytes: that its state will take in addition once every parameter with a gradient was stepped.
        transient_bytes: scratch of one `step()`.
        is_estimate: whether its step could not be rehearsed exactly.
    """

    state_bytes: int
    missing_bytes: int
    transient_bytes: int
    is_estimate: bool = False


def optimizer_cost(optimizer: Optimizer, *, device_type: str | None = None) -> OptimizerCost:
    """Measures an optimizer by rehearsing steps of a copy of it on fake tensors.

    The optimizer and the model do not change, and nothing is allocated on their device. Where the rehearsal fails (a
    step that reads values), one on a few elements of each tensor is scaled up. Where that fails as well (a step that
    needs a closure), two tensors of each parameter's size are assumed for the missing state, and two for the scratch.
    `is_estimate` marks both. An optimizer with a growing history, such as L-BFGS, takes more than that.

    Args:
        optimizer: to measure; it may be inside a trainer's wrapper.
        device_type: measure it as if its parameters were on such a device, which need not be there.

    Only the device that computes with the parameters counts: step counters in host memory do not, beside parameters on
    an accelerator, nor does anything of parameters that FSDP2 keeps in host memory.

    >>> layer = torch.nn.Linear(8, 4)
    >>> optimizer_cost(torch.optim.SGD(layer.parameters(), momentum=0.9))
    OptimizerCost(state_bytes=0, missing_bytes=144, transient_bytes=0, is_estimate=False)
    """
    (optimizer,) = read_optimizers(optimizer)
    parameters = parameters_of(optimizer)
    devices = _budget_devices(parameters)
    rehearsed = None if device_type is None else torch.device(device_type, 0)
    state_bytes = state_bytes_of(optimizer)
    # The step is the user's code: any exception means that it cannot be rehearsed in this way.
    with suppress(Exception):
        return OptimizerCost(state_bytes, *rehearse_on_fakes(optimizer, devices, rehearsed))
    with suppress(Exception):
        return OptimizerCost(state_bytes, *rehearse_on_samples(optimizer, devices), is_estimate=True)
    trained = [p for p in parameters if p.requires_grad and p.device in devices]
    missing_bytes = 2 * _num_bytes(parameter for parameter in trained if not optimizer.state.get(parameter))
    return OptimizerCost(state_bytes, missing_bytes, 2 * _num_bytes(trained), is_estimate=True)


def _budget_devices(parameters: Iterable[Tensor]) -> frozenset[torch.device]:
    """The accelerators that compute with parameters, or the host if none does."""
    devices = {working_device(parameter) for parameter in parameters}
    return frozenset(device for device in devices if device.type != "cpu") or frozenset(devices)


def joint_cost(optimizers: Iterable[Optimizer], *, device_type: str | None = None) -> OptimizerCost:
    """The cost of several optimizers, which step one after the other; some may be inside others."""
    found = [optimizer_cost(optimizer, device_type=device_type) for optimizer in outermost(optimizers)]
    return OptimizerCost(
        sum(cost.state_bytes for cost in found),
        sum(cost.missing_bytes for cost in found),
        max((cost.transient_bytes for cost in found), default=0),
        any(cost.is_estimate for cost in found),
    )


def state_bytes_of(*optimizers: Optimizer) -> int:
    """Bytes of the state of optimizers now, on the device that computes with their parameters."""
    held: dict[int, torch.UntypedStorage] = {}
    for optimizer in optimizers:
        held |= state_storages(optimizer, _budget_devices(parameters_of(optimizer)))
    return sum(storage.nbytes() for storage in held.values())


def _num_bytes(parameters: Iterable[Tensor]) -> int:
    return sum(plain.nbytes for parameter in parameters for plain in plain_tensors(parameter))
