"""Whether someone else runs the model just now, where a plan has nothing to say: tracers, transforms, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import _symbolic_trace
from torch.utils.checkpoint import checkpoint

from recoup.checkpointing import is_replaying
from recoup.checkpointing.transforms import is_transformed

__all__ = ["is_recomputed_by_others", "is_traced"]

# Private names, each of which a version of torch may lack.
_is_fx_tracing: Callable[[], bool] = getattr(_symbolic_trace, "is_fx_symbolic_tracing", lambda: False)

_current_task: Callable[[], int] = torch._C._current_graph_task_id
_NO_TASK = -1
_top_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks


def is_traced() -> bool:
    """Whether torch.compile, torch.export, torch.jit.trace, torch.fx or a torch.func transform runs this code.

    >>> torch.func.vmap(lambda x: print(is_traced()) or x)(torch.zeros(2))
    True
    tensor([0., 0.])
    >>> is_traced()
    False
    """
    # The compiler folds the first into a constant and never looks at the others.
    return torch.compiler.is_compiling() or torch._C._is_tracing() or is_transformed() or _is_fx_tracing()


def is_recomputed_by_others() -> bool:
    """Whether this code runs inside torch's own checkpoint, at first or again.

    >>> x = torch.zeros(2, requires_grad=True)
    >>> checkpoint(lambda x: print(is_recomputed_by_others()) or x.exp(), x, use_reentrant=False).sum().backward()
    True
    True
    """
    if _current_task() != _NO_TASK and not is_replaying():
        return True
    hooks = _top_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) == checkpoint.__module__
