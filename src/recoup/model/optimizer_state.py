"""What an optimizer holds: its state, and that of optimizers inside it, wherever they keep it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recoup.snapshot.reachable import Reached
from recoup.tensors import storages, tensors_in, working_device

__all__ = [
    "all_state_storages",
    "budget_devices",
    "outermost",
    "parameters_of",
    "state_bytes_of",
    "state_storages",
    "with_optimizers_inside",
]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters that it steps."""
    return tensors_in([group["params"] for group in optimizer.param_groups])


def with_optimizers_inside(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer itself, and those that it wraps, such as Lookahead does."""
    return Reached([("optimizer", optimizer)], follows_code=False).optimizers


def outermost(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Those that are inside no other, whose state would count twice."""
    inside = {one: with_optimizers_inside(one) for one in optimizers}
    found: list[Optimizer] = []
    seen: set[Optimizer] = set()
    for one in sorted(inside, key=lambda one: -len(inside[one])):
        if one not in seen:
            found.append(one)
            seen.update(inside[one])
    return found


def state_bytes_of(*optimizers: Optimizer) -> int:
    """Bytes of the state of optimizers now, on the device that computes with their parameters."""
    return sum(storage.nbytes() for storage in all_state_storages(optimizers))


def all_state_storages(optimizers: Iterable[Optimizer]) -> list[torch.UntypedStorage]:
    """The storages of the state of optimizers now, each once, on the device that computes with their parameters."""
    held: dict[int, torch.UntypedStorage] = {}
    for optimizer in optimizers:
        held |= state_storages(optimizer, budget_devices(parameters_of(optimizer)))
    return list(held.values())


def budget_devices(parameters: Iterable[Tensor]) -> frozenset[torch.device]:
    """The accelerators that compute with parameters, or the host if none does."""
    devices = {working_device(parameter) for parameter in parameters}
    return frozenset(device for device in devices if device.type != "cpu") or frozenset(devices)


def state_storages(
    optimizer: Optimizer, devices: frozenset[torch.device], made: Iterable[torch.UntypedStorage] = ()
) -> dict[int, torch.UntypedStorage]:
    """The storages of its state on some devices, by id: not those of parameters and gradients.

    State may be in `Optimizer.state`, in an attribute, in a group of parameters, or in an optimizer inside. Numbers
    outside of `Optimizer.state`, such as a learning rate, are settings.

    Args:
        optimizer: that holds it.
        devices: that count.
        made: further storages on these devices, which its steps have allocated.
    """
    reached = Reached([("optimizer", optimizer)], follows_code=False)
    found = [tensor for one in reached.optimizers for tensor in tensors_in(list(one.state.values()))]
    others = (
        *reached.tensors,
        *(tensor for one in reached.optimizers for tensor in tensors_in(one.param_groups)),
    )
    # Parameters of other optimizers may be in a list of all.
    found += [tensor for tensor in others if tensor.dim() and not isinstance(tensor, nn.Parameter)]
    held = {id(one): one for tensor in found if tensor.device in devices for one in storages(tensor)}
    held |= {id(one): one for one in made}
    for one in (part for inner in reached.optimizers for part in parameters_of(inner)):
        for tensor in (one, one.grad):
            for storage in () if tensor is None else storages(tensor):
                held.pop(id(storage), None)
    return held
