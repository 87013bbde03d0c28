"""Whether someone else runs the model just now, where a plan has nothing to say: tracers, transforms, checkpoints."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from recoup.checkpointing import is_replaying
from recoup.torch_private import (
    current_graph_task,
    current_transform,
    is_fx_tracing,
    is_jit_tracing,
    top_saved_tensor_hooks,
)

__all__ = [
    "compiled_functions_off",
    "is_in_torch_checkpoint",
    "is_recomputed_by_others",
    "is_traced",
    "recomputes_itself",
]

_NO_TASK = -1


def is_traced() -> bool:
    """Whether torch.compile, torch.export, torch.jit.trace, torch.fx or a torch.func transform runs this code.

    >>> torch.func.vmap(lambda x: print(is_traced()) or x)(torch.zeros(2))
    True
    tensor([0., 0.])
    >>> is_traced()
    False
    """
    # The compiler folds the first into a constant and never looks at the others.
    return (
        torch.compiler.is_compiling()
        or is_jit_tracing()
        or current_transform() is not None
        or is_fx_tracing()
    )


def compiled_functions_off() -> AbstractContextManager[None]:
    """A block in which what torch.compile made runs eagerly, in all threads.

    Generated code ends the process where tensors have no memory, and the compiler compiles hooks, too.
    """
    # Without this module nothing was compiled, and importing it takes a second.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def is_recomputed_by_others() -> bool:
    """Whether this code runs inside torch's own checkpoint, at first or again.

    >>> x = torch.zeros(2, requires_grad=True)
    >>> checkpoint(lambda x: print(is_recomputed_by_others()) or x.exp(), x, use_reentrant=False).sum().backward()
    True
    True
    """
    return (current_graph_task() != _NO_TASK and not is_replaying()) or is_in_torch_checkpoint()


def is_in_torch_checkpoint() -> bool:
    """Whether this code runs inside torch's own checkpoint, at first."""
    hooks = top_saved_tensor_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) == checkpoint.__module__


def recomputes_itself(module: nn.Module) -> bool:
    """Whether a layer of transformers puts a checkpoint around its own forward, as it does from 5.23 on.

    Before, the checkpoint was around the call, and whatever stands in for the forward ran inside it.
    """
    # Switched on it is an attribute of the layer's own; models have one too, which says nothing about their forward.
    is_on = module.__dict__.get("gradient_checkpointing", False)
    bases = type(module).__mro__ if is_on and module.training else ()
    return any(base.__name__ == "GradientCheckpointingLayer" for base in bases)
