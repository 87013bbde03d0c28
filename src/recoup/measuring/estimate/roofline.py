"""Seconds of one operation by its roofline: the longest of computing, moving bytes and launching.

Where the seconds of its class of kernels were measured, the roofline only says how large the operation is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from recoup.measuring.estimate.classes import allows_tf32, kernel_class
from recoup.measuring.estimate.machine import Hardware

__all__ = ["argument_tensors", "ideal_s", "is_free", "num_flops", "num_moved_bytes", "operation_s"]

# Operations that only allocate or relabel memory, though their schemas do not say so.
_FREE = frozenset(
    {
        "_local_scalar_dense", "_unsafe_view", "empty", "empty_like", "empty_strided", "lift", "lift_fresh",
        "lift_fresh_copy", "new_empty", "new_empty_strided", "resize_", "set_",
    }
)  # fmt: skip
# Operations that write their first argument without reading it.
_WRITES = frozenset(["copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_"])
# Operations that read no more of their first argument than they return.
_PICKS = frozenset(["embedding", "gather", "index", "index_select", "take", "_unsafe_index"])
_ATTENTION = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_", "_cudnn_attention_")
# A backward makes five products where the forward makes two.
_ATTENTION_BACKWARD = 2.5


def operation_s(func: Any, args: Any, kwargs: Any, result: Any, hardware: Hardware) -> float:
    """Seconds of an operation on some hardware; views are free.

    Args:
        func: the operation, as a dispatch mode sees it.
        args: its positional arguments.
        kwargs: its keyword arguments.
        result: that it returned; only shapes are read.
        hardware: on which it would run.
    """
    if is_free(func):
        return 0.0
    peak_s = ideal_s(func, args, kwargs, result, hardware)
    curve = hardware.curve(kernel_class(func, args)) if hardware.kernels else None
    return max(peak_s / hardware.efficiency, hardware.latency_s) if curve is None else curve.seconds(peak_s)


def ideal_s(func: Any, args: Any, kwargs: Any, result: Any, hardware: Hardware) -> float:
    """Seconds of an operation at the peak of some hardware: the longer one of computing and moving bytes."""
    moved_s = num_moved_bytes(func, args, kwargs, result) / hardware.bandwidth_bytes_per_s
    flops = num_flops(func, args, kwargs, result)
    if not flops:
        return moved_s
    dtype = next(tensor.dtype for tensor in argument_tensors(args) if tensor.is_floating_point())
    rate = hardware.peak_flops_per_s(dtype, allow_tf32=allows_tf32(func._schema.name))
    return max(moved_s, flops / rate)


def num_flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Floating-point operations of products, convolutions and attention; 0 for everything else."""
    name = _name(func)
    if name.startswith(_ATTENTION):
        return _attention_flops(func, name, args, kwargs)
    formula = flop_registry.get(func._overloadpacket)
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=result))


def _attention_flops(func: Any, name: str, args: Any, kwargs: Any) -> float:
    is_backward = name.endswith("_backward")
    query, key, value = args[is_backward : 3 + is_backward]
    num_rows = query.numel() // query.shape[-1]
    pairs = num_rows * key.shape[-2]
    if _argument(func, "is_causal", args, kwargs):
        pairs /= 2
    flops = 2 * pairs * (query.shape[-1] + value.shape[-1])
    return float(flops * (_ATTENTION_BACKWARD if is_backward else 1))


def num_moved_bytes(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Bytes that an operation reads and writes, each tensor once."""
    name = _name(func)
    made = _num_bytes((result,))
    if name in _WRITES or name in _PICKS:
        return _num_bytes(args[1:]) + made * (2 if name in _PICKS else 1)
    return made + _num_bytes((args, kwargs))


def _num_bytes(values: Iterable[Any]) -> int:
    """Bytes of the tensors among some values. Expanded tensors are read once."""
    return sum(
        min(tensor.nbytes, tensor.untyped_storage().nbytes())
        if tensor.layout is torch.strided
        else tensor.numel() * tensor.element_size()
        for tensor in argument_tensors(values)
    )


def argument_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among an operation's arguments. Faster than `tensors_in`: operations know no other containers."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from argument_tensors(value)
        elif isinstance(value, dict):
            yield from argument_tensors(value.values())


@cache
def _name(func: Any) -> str:
    return str(func._schema.name).rpartition("::")[2]


@cache
def is_free(func: Any) -> bool:
    """Whether an operation only allocates or relabels memory."""
    if _name(func) in _FREE:
        return True
    aliases = [argument.alias_info for argument in func._schema.arguments if argument.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


@cache
def _position(func: Any, name: str) -> tuple[int, Any] | None:
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return index, argument.default_value
    return None


def _argument(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    place = _position(func, name)
    if place is None:
        return None
    index, default = place
    return args[index] if index < len(args) else kwargs.get(name, default)
