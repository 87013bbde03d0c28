"""What kernels take for themselves while they run: no tensor shows it, and only a run on the hardware tells it all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recoup.measuring.estimate.roofline import allows_tf32

__all__ = ["workspace_bytes"]

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default


def workspace_bytes(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Bytes that a GPU's kernel for an operation takes beside its arguments and its results.

    Tensor cores want channels last: for a convolution of tensors whose channels come first, cuDNN makes copies of input
    and output (in the backward, of the output's gradient and of whichever it reads or writes of the other two). On an
    H200 that is what its workspaces measure, to a few megabytes.

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
    if groups != 1 or not _uses_tensor_cores(source) or _has_channels_last(source):
        return 0
    return _num_bytes(source) + _num_bytes(output)


def _uses_tensor_cores(tensor: Tensor) -> bool:
    if tensor.dtype is torch.float32:
        return allows_tf32("convolution")
    return tensor.dtype in (torch.float16, torch.bfloat16)


def _has_channels_last(tensor: Tensor) -> bool:
    if tensor.dim() == 4:
        return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
    if tensor.dim() == 5:
        return tensor.is_contiguous(memory_format=torch.channels_last_3d) and not tensor.is_contiguous()
    return False


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
