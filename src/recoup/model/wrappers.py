"""Wrappers that train a model on several ranks: what is inside them, and what they hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recoup.errors import SampleError
from recoup.model.sharded import is_sharding
from recoup.tensors import needing_gradient
from recoup.torch_private import awaits_static_graph

__all__ = ["NO_BUCKETS", "Buckets", "buckets_of", "unsynchronized", "unwrapped_model"]


@dataclass(frozen=True)
class Buckets:
    """What `DistributedDataParallel` reduces gradients in: buckets as large as all gradients, for the whole step.

    Attributes:
        num_bytes: of them.
        is_allocated: whether they are there already.
        are_gradients: whether gradients are views of them: then these are there for the whole step.
    """

    num_bytes: int = 0
    is_allocated: bool = False
    are_gradients: bool = False


NO_BUCKETS = Buckets()


def unwrapped_model(model: Any) -> Any:
    """The model inside `DistributedDataParallel`; else the model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def buckets_of(model: nn.Module, *, expected: bool) -> Buckets:
    """The buckets of a model.

    Args:
        model: wrapped or not.
        expected: whether a model that is not wrapped will be, unless its parameters are divided over ranks already.
    """
    inner = unwrapped_model(model)
    num_bytes = sum(parameter.nbytes for parameter in needing_gradient(list(inner.parameters())))
    if inner is not model:
        are_gradients = bool(model.gradient_as_bucket_view)
        return Buckets(num_bytes, is_allocated=True, are_gradients=are_gradients)
    # FSDP2 may have left parameters gathered.
    is_divided = any(map(is_sharding, model.modules())) or any(
        type(parameter).__name__ == "DTensor" for parameter in model.parameters()
    )
    return Buckets(num_bytes) if expected and not is_divided else NO_BUCKETS


@contextmanager
def unsynchronized(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A block in which backwards reduce no gradients: one rank may run steps alone.

    Raises:
        SampleError: a wrapper would take the first of them for its own.
    """
    wrappers = [module for module in modules if isinstance(module, DistributedDataParallel)]
    if any(map(awaits_static_graph, wrappers)):
        raise SampleError(
            "DistributedDataParallel with static_graph=True learns the graph from its first backward, which must be one"
            " of training: fit the model before it is wrapped, or after the first training step."
        )
    with ExitStack() as stack:
        for wrapper in wrappers:
            stack.enter_context(wrapper.no_sync())
        yield
