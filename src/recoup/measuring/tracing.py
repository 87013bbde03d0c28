"""Whether a model is traced, transformed or compiled just now, where a plan has nothing to say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import _symbolic_trace

__all__ = ["is_traced"]

# Private names, each of which a version of torch may lack.
_transform: Callable[[], Any] = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: None)
_is_fx_tracing: Callable[[], bool] = getattr(_symbolic_trace, "is_fx_symbolic_tracing", lambda: False)


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
        or torch._C._is_tracing()
        or _transform() is not None
        or _is_fx_tracing()
    )
