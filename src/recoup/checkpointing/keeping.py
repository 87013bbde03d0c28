"""``keep``: a tensor whose value a replay does not compute anew."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recoup.checkpointing.deciding_operations import KEEP
from recoup.checkpointing.decisions import regions
from recoup.torch_private import current_transform

__all__ = ["keep"]


def keep(tensor: Tensor, /) -> Tensor:
    """Gives a copy of a tensor, and has the replay give the same values, bit for bit.

    For values that decide and that must not differ between forward and replay: what a router makes of its logits, what
    a function draws from a generator of its own. Integers and booleans that depend on floating-point values are kept
    without it. Gradients flow through the copy to the tensor as the replay computes it. Outside of checkpoints and of
    units that are recomputed it is a copy, as in a transform of torch.func.

    The copy is held exactly, from the forward to the end of the backward, whatever becomes of other saved tensors.

    Raises:
        TypeError: it is given no tensor.
        ReplayMismatchError: (in the backward) the replay keeps other tensors than the forward.

    >>> import itertools, recoup
    >>> numbers = itertools.count(1)
    >>> def scaled(x):
    ...     return x * recoup.keep(torch.tensor(float(next(numbers))))  # 1 in the forward, 2 in the replay
    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> recoup.checkpoint(scaled, x).backward()
    >>> x.grad, next(numbers)
    (tensor(1.), 3)
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"keep takes a tensor: keep(x). Got a {type(tensor).__name__}.")
    if torch.compiler.is_compiling():
        kept: Tensor = KEEP(tensor)
        return kept
    if current_transform() is not None:
        return tensor.clone()
    value: Tensor | None = None
    for region in regions():
        value = region.keep(tensor, value)
    if value is None:
        return tensor.clone()
    result: Tensor = _Keep.apply(tensor, value)  # type: ignore[no-untyped-call]
    return result


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
