"""Classes of kernels: operations that reach about the same share of a device's peak."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["allows_tf32", "has_channels_last", "kernel_class", "wider_classes"]

# By words in an operation's name; the first that occurs decides.
_FAMILIES = (
    ("attention", ("scaled_dot_product", "flash_attention", "efficient_attention", "cudnn_attention")),
    ("convolution", ("conv",)),
    ("batch norm", ("batch_norm",)),
    ("group norm", ("group_norm",)),
    ("rms norm", ("rms_norm",)),
    ("layer norm", ("layer_norm",)),
    ("log softmax", ("log_softmax",)),
    ("softmax", ("softmax",)),
    ("resampling", ("pool", "upsample", "interpolate", "grid_sampler")),
    ("scatter", ("embedding_dense_backward", "index_put", "index_add", "scatter")),
    ("gather", ("embedding", "gather", "index", "take")),
)
_WHOLE_NAMES = {
    "matmul": ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "mv", "addmv", "dot", "linear", "matmul"),
    "reduction": (
        "sum", "mean", "var", "var_mean", "std", "amax", "amin", "max", "min", "argmax", "argmin", "norm",
        "linalg_vector_norm", "logsumexp", "cumsum", "all", "any", "prod",
    ),
    "copy": ("clone", "_to_copy", "copy_", "copy", "cat", "stack", "repeat", "constant_pad_nd"),
}  # fmt: skip
_COMPUTES = ("attention", "convolution", "matmul")
_BY_LAYOUT = ("convolution", "batch norm", "group norm", "resampling")
_BY_STRIDES = ("copy", "layer norm")
_HALF = (torch.bfloat16, torch.float16)
_WIDER = (
    (" of few", ""), (" of some", ""), (" narrow", ""), (" wide", ""), (" strided", ""), (" channels last", ""),
    (" half", ""), ("log softmax", "softmax"), ("rms norm", "layer norm"),
)  # fmt: skip
# Scores cost the same whatever the width of a head; and one channel is one block of a batch norm's kernel.
_NARROW_HEAD, _WIDE_HEAD, _FEW_CHANNELS, _SOME_CHANNELS = 32, 64, 64, 128


def kernel_class(func: Any, args: tuple[Any, ...]) -> str:
    """The class of an operation, in words: the family, and what decides about the kernel.

    >>> left = torch.empty(4, 4, dtype=torch.bfloat16)
    >>> kernel_class(torch.ops.aten.mm.default, (left, left))
    'matmul half'
    >>> kernel_class(torch.ops.aten.add.Tensor, (left, left))
    'elementwise half'
    """
    family, is_backward = _family(func)
    words = [family]
    tensors = [value for value in args if isinstance(value, Tensor)]
    if family == "convolution":
        words.append(_kind_of_convolution(tensors[1 + is_backward], args[-2] if is_backward else args[-1]))
    if family == "attention":
        words += _width_of_heads(tensors[0].shape[-1])
    if family == "batch norm":
        words += _number_of_channels(tensors[0])
    if family in _COMPUTES:
        words.append(_precision(tensors[0], family))
    elif tensors and tensors[0].dtype in _HALF:
        # Numbers of half the bytes take as long to compute.
        words.append("half")
    if is_backward:
        words.append("backward")
    if family in _BY_LAYOUT and tensors and has_channels_last(tensors[0]):
        words.append("channels last")
    if family in _BY_STRIDES and tensors and not _input(family, tensors, is_backward).is_contiguous():
        words.append("strided")
    if family == "elementwise" and len({(t.shape, t.stride()) for t in tensors if t.dim()}) > 1:
        words.append("strided")
    if family == "attention" and _is_sequence_first(tensors[int(is_backward)]):
        words.append("strided")
    return " ".join(words)


def wider_classes(kind: str) -> Iterator[str]:
    """A class, and those that it is a part of, the closest first.

    >>> list(wider_classes("layer norm half strided"))
    ['layer norm half strided', 'layer norm half', 'layer norm']
    """
    yield kind
    for words, fewer in _WIDER:
        if words in kind:
            kind = kind.replace(words, fewer)
            yield kind


def _width_of_heads(width: int) -> list[str]:
    return ["narrow"] if width <= _NARROW_HEAD else [] if width <= _WIDE_HEAD else ["wide"]


def _is_sequence_first(query: Tensor) -> bool:
    """Whether rows of one sequence are further apart than sequences, as in `torch.nn.MultiheadAttention`."""
    return query.dim() == 4 and query.stride(0) < query.stride(2)


def _number_of_channels(tensor: Tensor) -> list[str]:
    number = tensor.shape[1] if tensor.dim() > 1 else 0
    return ["of few"] if number <= _FEW_CHANNELS else ["of some"] if number <= _SOME_CHANNELS else []


def _input(family: str, tensors: list[Tensor], is_backward: bool) -> Tensor:
    """What was read in the forward; of copies, what is read last."""
    return tensors[-1] if family == "copy" else tensors[min(int(is_backward), len(tensors) - 1)]


@cache
def _family(func: Any) -> tuple[str, bool]:
    name = str(func._schema.name).rpartition("::")[2]
    is_backward = "backward" in name
    for family, parts in _FAMILIES:
        if any(part in name for part in parts):
            return family, is_backward
    for family, names in _WHOLE_NAMES.items():
        if name in names:
            return family, is_backward
    return "elementwise", False


def _kind_of_convolution(weight: Tensor, groups: Any) -> str:
    if isinstance(groups, int) and groups > 1:
        return "grouped"
    return "1x1" if all(size == 1 for size in weight.shape[2:]) else "spatial"


def _precision(tensor: Tensor, family: str) -> str:
    if tensor.dtype in _HALF:
        return "half"
    if tensor.dtype is torch.float32:
        return "tf32" if family != "attention" and allows_tf32(family) else "float32"
    return str(tensor.dtype).removeprefix("torch.")


def has_channels_last(tensor: Tensor) -> bool:
    """Whether a tensor of images or volumes has its channels last in memory."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = formats.get(tensor.dim())
    return layout is not None and tensor.is_contiguous(memory_format=layout) and not tensor.is_contiguous()


def allows_tf32(name: str) -> bool:
    """Whether torch's settings allow TF32 for the float32 products of an operation."""
    try:
        if "conv" in name:
            return bool(torch.backends.cudnn.allow_tf32)
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:  # set through torch's other interface for this
        return False
