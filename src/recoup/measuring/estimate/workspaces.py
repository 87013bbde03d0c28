"""Workspaces: scratch that kernels allocate inside, which no tensor shows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recoup.measuring.estimate.classes import allows_tf32, has_channels_last

__all__ = ["workspace_bytes"]

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default


def workspace_bytes(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Bytes that a GPU's kernel for an operation allocates beside its arguments and its results.

    Tensor cores need channels last: for a convolution of tensors with channels first, cuDNN copies input and output (in
    the backward, the output's gradient and the one of the other two that it reads or writes). On an H200 this agrees
    with the measured workspaces to a few megabytes.

    >>> x, weight = torch.empty(2, 8, 16, 16), torch.empty(4, 8, 3, 3)
    >>> args = (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    >>> workspace_bytes(_FORWARD, args, _FORWARD(*args)) == x.nbytes + 2 * 4 * 16 * 16 * 4
    True
    >>> workspace_bytes(torch.ops.aten.mm.default, (weight, weight), weight)
    0
    """
    if func is _FORWARD:
        source, output, groups = args[0], result, args[8]
    elif func is _BACKWARD:
        output, source, groups = args[0], args[1], args[9]
    else:
        return 0
    if groups != 1 or not _uses_tensor_cores(source) or has_channels_last(source):
        return 0
    return int(source.nbytes + output.nbytes)


def _uses_tensor_cores(tensor: Tensor) -> bool:
    if tensor.dtype is torch.float32:
        return allows_tf32("convolution")
    return tensor.dtype in (torch.float16, torch.bfloat16)
