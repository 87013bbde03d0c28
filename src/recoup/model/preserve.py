"""Runs of a model without side effects: all that a training step changes is restored."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recoup.checkpointing.sampling import sampling
from recoup.model.history import hide_graphs
from recoup.model.optimizers import Optimizers, read_optimizers
from recoup.snapshot.accessors import setting, tensor_data
from recoup.snapshot.places import Snapshot
from recoup.snapshot.random_state import held_random_state
from recoup.snapshot.reachable import Reached
from recoup.snapshot.tensor_values import HeldValues, held_gradient
from recoup.snapshot.writes import Writes
from recoup.tensors import tensors_in
from recoup.torch_private import set_grad_enabled

__all__ = ["gradient_owners", "preserving"]

_DEEPEST = 4
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_grad_enabled, set_grad_enabled),
)


@contextmanager
def preserving(
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    everything: bool = False,
    reached: Reached | None = None,
    writes: Writes | None = None,
) -> Iterator[None]:
    """Puts a model back as it was, whatever the block does with it, also if the block raises.

    Back are: buffers (objects and values), `.grad` of the parameters, `requires_grad`, training mode, hooks and
    attributes of every module with lists and dicts there, the random state of Python, NumPy and torch, and torch's
    settings, such as the default dtype. Inside, all `.grad` are None, so that a step starts afresh; on an accelerator
    the old ones wait in host memory and return as the same tensors. After a `torch.OutOfMemoryError` the local
    variables of the calls that raised it are cleared, to make room for them.

    Args:
        model: the model that the block runs.
        optimizer: the optimizer that the block may step, or several.
        everything: also put back the values of the parameters and all that the optimizer holds. Their copies wait
            in host memory, never on the device.
        reached: the model and what else the block's code can reach; Python state and gradients are put back.
        writes: what else its code writes to, as far as that is known.

    >>> model = nn.BatchNorm1d(2)
    >>> with preserving(model):
    ...     model(torch.randn(8, 2)).sum().backward()
    >>> model.running_mean, model.weight.grad
    (tensor([0., 0.]), None)
    """
    reached = Reached((), known=model, follows_code=False, deepest=_DEEPEST) if reached is None else reached
    models = [model, *reached.modules]
    optimizers = list(dict.fromkeys([*read_optimizers(optimizer), *reached.optimizers]))
    groups = [group["params"] for stepped in optimizers for group in stepped.param_groups]
    owned = [tensor for one in models for tensor in gradient_owners(one)]
    parameters = list(dict.fromkeys([*owned, *tensors_in(groups), *reached.leaves]))
    # Put back from the last to the first: gradients of the block make room before anything else returns.
    with ExitStack() as exits:
        exits.enter_context(sampling("never"))
        exits.callback(held_random_state())
        settings = Snapshot()
        for read, write in _SETTINGS:
            settings.add(setting(read, write))
        exits.callback(settings.put_back)
        exits.callback(reached.hold())
        for parameter in parameters:
            exits.callback(held_gradient(parameter))
        tensors = Snapshot()
        for parameter in parameters:
            tensors.add(setting(partial(getattr, parameter, "requires_grad"), parameter.requires_grad_))
        # Where the values of the model's own are held below, so are their storages.
        for one in models[everything:]:
            for owner in gradient_owners(one):
                tensors.add(tensor_data(owner))
        exits.callback(tensors.put_back)
        values = HeldValues()
        exits.callback(values.hold([list(one.buffers()) for one in models]))
        if everything:
            exits.callback(values.hold([list(model.parameters()), optimizers]))
        if writes is not None:
            exits.callback(writes.hold())
        exits.callback(_drop_gradients, parameters)
        hide_graphs(models)
        try:
            yield
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)
            raise


def _drop_gradients(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


def gradient_owners(model: nn.Module) -> list[Tensor]:
    """A model's tensors that a backward may give a `.grad`: parameters, and buffers that need one."""
    return [*model.parameters(), *(b for b in model.buffers() if b.requires_grad and b.is_leaf)]
