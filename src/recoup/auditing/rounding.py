"""Whether two runs of a unit differ by rounding only, as sums do whose order the device does not fix."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recoup.checkpointing.replay import pop_hooks, push_hooks
from recoup.measuring.preserve import preserving
from recoup.measuring.streaming import UnitCall
from recoup.measuring.trees import tensors_in

__all__ = ["differs_by_rounding"]


def differs_by_rounding(call: UnitCall) -> bool:
    """Runs a call twice from the same random state and compares all that it saves and returns.

    The first run's results wait in host memory. Where even so the memory does not suffice, the answer is no.
    """
    held: list[Tensor] = []
    are_close: list[bool] = []

    def compare(tensor: Tensor) -> None:
        position = len(are_close)
        then = held[position].to(tensor.device) if position < len(held) else None
        are_close.append(then is not None and _is_close(then, tensor))

    try:
        with preserving(call.module):
            _run(call, lambda tensor: held.append(tensor.to("cpu", copy=True)))
        _run(call, compare)
    except Exception:
        return False
    return len(are_close) == len(held) and all(are_close)


def _run(call: UnitCall, see: Callable[[Tensor], None]) -> None:
    args, kwargs, _ = call.fresh()

    def pack(tensor: Tensor) -> Tensor:
        if not (tensor.is_leaf and tensor.requires_grad):
            see(tensor.detach())
        return tensor.detach()

    push_hooks(pack, _given_back)
    try:
        output: Any = call.fn(*args, **kwargs)
    finally:
        pop_hooks()
    for tensor in tensors_in(output):
        see(tensor.detach())


def _given_back(tensor: Tensor) -> Tensor:
    return tensor


def _is_close(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors agree to half of their digits.

    >>> _is_close(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + 1e-6]))
    True
    >>> _is_close(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1]))
    False
    """
    if left.shape != right.shape or left.dtype != right.dtype or left.layout is not torch.strided:
        return False
    if not (left.is_floating_point() or left.is_complex()) or left.numel() == 0:
        return torch.equal(left, right)
    # Half of the digits: rounding grows within a unit. Compared with the largest value, since sums cancel.
    tolerance = math.sqrt(torch.finfo(left.dtype).eps)
    finite = left[left.isfinite()].abs()
    scale = finite.max().item() if finite.numel() else 0.0
    return torch.allclose(left, right, rtol=0.0, atol=tolerance * scale, equal_nan=True)
