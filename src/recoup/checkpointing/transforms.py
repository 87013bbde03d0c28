"""Transforms of torch.func, inside which nothing can be replayed: a replay would run outside of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["is_transformed"]

# A private name, which a version of torch may lack.
_transform: Callable[[], Any] = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: None)


def is_transformed() -> bool:
    """Whether this code runs inside `torch.func.vmap`, `grad` or another transform.

    >>> torch.func.vmap(lambda x: print(is_transformed()) or x)(torch.zeros(2))
    True
    tensor([0., 0.])
    """
    return _transform() is not None
