"""The same call on other arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from recoup.model.streaming import UnitCall
from recoup.tensors import map_tensors

__all__ = ["copied", "with_other_values"]


def copied(call: UnitCall) -> UnitCall:
    """The same call on copies of its tensors, which it may change."""
    return _on(call, Tensor.clone)


def with_other_values(call: UnitCall) -> UnitCall | None:
    """The same call on other values of its floating-point tensors; None if there are none to change.

    Values are reordered, so that their range stays the same. Integers are not changed: they may be indices, and a wrong
    index ends a CUDA context. Nor are tensors with values that are not finite, which are masks.
    """
    is_changed = False

    def change(tensor: Tensor) -> Tensor:
        nonlocal is_changed
        if (
            not tensor.is_floating_point()
            or tensor.layout is not torch.strided
            or not tensor.isfinite().all()
        ):
            return tensor.clone()
        is_changed = True
        return _reordered(tensor)

    changed = _on(call, change)
    return changed if is_changed else None


def _reordered(tensor: Tensor) -> Tensor:
    """The values in another order; where that changes nothing, with noise.

    >>> _reordered(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[3., 2.],
            [1., 4.]])
    """
    # By one more than half: values also move between rows.
    values = tensor.flatten().flip(0).roll(tensor.numel() // 2 + 1).view(tensor.shape)
    return values + torch.randn_like(values) if torch.equal(values, tensor) else values


def _on(call: UnitCall, change: Callable[[Tensor], Tensor]) -> UnitCall:
    def changed(tensor: Tensor) -> Tensor:
        return change(tensor.detach()).requires_grad_(tensor.requires_grad)

    args, kwargs = map_tensors(changed, (call.args, call.kwargs))
    return replace(call, args=args, kwargs=kwargs)
