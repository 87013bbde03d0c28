"""Transforms of torch.func, inside which nothing can be replayed: a replay would run outside of them."""

from __future__ import annotations

from recoup.torch_private import current_transform

__all__ = ["is_transformed"]


def is_transformed() -> bool:
    """Whether this code runs inside `torch.func.vmap`, `grad` or another transform.

    >>> import torch
    >>> torch.func.vmap(lambda x: print(is_transformed()) or x)(torch.zeros(2))
    True
    tensor([0., 0.])
    """
    return current_transform() is not None
