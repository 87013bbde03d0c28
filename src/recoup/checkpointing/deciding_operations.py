"""Which operations decide: whose results are integers or booleans that depend on floating-point values.

See NOTE [ Decisions are kept, values are recomputed ].
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from recoup.torch_private import local_scalar

__all__ = [
    "ALWAYS_KEPT_BYTES",
    "KEEP",
    "SHARE",
    "decides",
    "has_values",
    "may_select",
    "selects",
    "values_at",
]

ALWAYS_KEPT_BYTES = 1 << 16
SHARE = 16
"""A decision may have this part of the bytes that it is compared with."""

# For graphs, and for what runs graphs: an operation instead of `recoup.keep`.
torch.library.define("recoup::keep", "(Tensor x) -> Tensor")


@torch.library.impl("recoup::keep", "CompositeExplicitAutograd")
def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone()


torch.library.register_fake("recoup::keep", _copy)


def _pass_on(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient


torch.library.register_autograd("recoup::keep", _pass_on)
KEEP = torch.ops.recoup.keep.default

_aten = torch.ops.aten
_SELECTING = frozenset(
    {_aten.topk, _aten.sort, _aten.max, _aten.min, _aten.median, _aten.nanmedian, _aten.mode, _aten.kthvalue}
)
"""They return values and their indices along one dimension."""
_READING = frozenset({local_scalar.overloadpacket, _aten.equal, _aten.is_nonzero, _aten.allclose, _aten.item})
_SHAPED_ALIKE = frozenset(
    {_aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.new_empty, _aten.new_zeros}
    | {_aten.new_ones, _aten.new_full, _aten.new_empty_strided}
)


def decides(func: Any, given: Iterable[Tensor], result: Any) -> bool:
    """Whether an operation that was given some tensors has decided something with its result."""
    if func is KEEP:
        return True
    if isinstance(result, (tuple, list)):
        return selects(func, next(iter(given), None))
    if isinstance(result, Tensor):
        may_decide = not has_values(result) and _may_decide(func)
    else:
        may_decide = type(result) in (bool, int, float) and _reads_values(func)
    return may_decide and any(map(has_values, given))


def may_select(func: Any) -> bool:
    """Whether an operation returns values of a tensor, and their indices."""
    return _index_of_dim(func) is not None


def selects(func: Any, tensor: Tensor | None) -> bool:
    """Whether it does, and the tensor has floating-point numbers."""
    return tensor is not None and may_select(func) and has_values(tensor)


def values_at(indices: Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The values of a selecting operation's input at indices along its dimension."""
    tensor: Tensor = args[0]
    if tensor.dim() == 0:
        return tensor.clone()
    place = _index_of_dim(func)
    assert place is not None
    dim = args[place] if place < len(args) else kwargs.get("dim", func._schema.arguments[place].default_value)
    if indices.dim() == tensor.dim():
        return tensor.gather(dim, indices)
    return tensor.gather(dim, indices.unsqueeze(dim)).squeeze(dim)


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor's numbers may differ in the last bit."""
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


@cache
def _reads_values(func: Any) -> bool:
    """Whether an operation that returns a number looks at values; torch's others tell sizes, strides and layouts."""
    return func.namespace not in ("aten", "prim") or func.overloadpacket in _READING


@cache
def _may_decide(func: Any) -> bool:
    return not (func.is_view or func._schema.is_mutable or func.overloadpacket in _SHAPED_ALIKE)


@cache
def _index_of_dim(func: Any) -> int | None:
    """The place of ``dim`` among a selecting operation's arguments; None for all others."""
    schema = func._schema
    if func.overloadpacket not in _SELECTING or len(schema.returns) != 2 or schema.is_mutable:
        return None
    return next((place for place, one in enumerate(schema.arguments) if one.name == "dim"), None)
