"""The mask of a dropout as bits, an eighth of its bytes: packed in the forward, unpacked in the backward.

Eight booleans of a row are one 64-bit number. Multiplied by ``_GATHER``, the lowest bits of its bytes meet in the
highest byte, in order and without carries. The way back repeats the packed byte eight times, and takes another bit of
each.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from recoup.capture.graph import DROPOUT

__all__ = ["PACKING", "is_packed", "pack"]

PACKING = 8
_GATHER, _REPEAT = 0x0102040810204080, 0x0101010101010101
_SELECT = 0x8040201008040201 - 2**64  # as a signed number
_aten = torch.ops.aten
_PACK = (
    (_aten.view.dtype, torch.int64),
    (_aten.mul.Tensor, _GATHER),
    (_aten.bitwise_right_shift.Tensor_Scalar, 56),
    (_aten.to.dtype, torch.uint8),
)
_COPY = ((_aten.clone.default, {"memory_format": torch.contiguous_format}),)
_UNPACK = (
    (_aten.to.dtype, torch.int64),
    (_aten.mul.Tensor, _REPEAT),
    (_aten.bitwise_and.Scalar, _SELECT),
    (_aten.view.dtype, torch.uint8),
    (_aten.ne.Scalar, 0),
)


def is_packed(node: Node) -> bool:
    """Whether a node is a dropout's mask whose rows are whole bytes; the last dimension must not be symbolic."""
    if node.target is not operator.getitem or node.args[0].target is not DROPOUT or node.args[1] != 1:  # type: ignore[union-attr]
        return False
    mask: Tensor = node.meta["val"]
    width = mask.shape[-1] if mask.dim() else 1
    return isinstance(width, int) and width > 0 and width % PACKING == 0 and mask.is_contiguous()


def pack(joint: GraphModule, mask: Node) -> tuple[Node, set[Node]]:
    """The node of a mask's bits, and those that make the mask from them, which all operations read instead.

    >>> masks = torch.rand(3, 16) > 0.5
    >>> bits = (masks.view(torch.int64) * _GATHER >> 56).to(torch.uint8)
    >>> again = bits.to(torch.int64) * _REPEAT & _SELECT
    >>> torch.equal(again.view(torch.uint8) != 0, masks), bits.nbytes
    (True, 6)
    """
    before = set(mask.users)
    # A dimension of one element may have any stride, with which eight elements are not one number.
    has_any_stride = any(isinstance(size, int) and size == 1 for size in mask.meta["val"].shape[:-1])
    *_, bits = _chain(joint, mask, (*_COPY, *_PACK) if has_any_stride else _PACK)
    again = _chain(joint, bits, _UNPACK)
    mask.replace_all_uses_with(again[-1], lambda user: user in before and user.op != "output")
    return bits, set(again)


def _chain(joint: GraphModule, node: Node, steps: Iterable[tuple[Any, Any]]) -> list[Node]:
    """Nodes one after the other, each of an operation and its second argument, or its keywords."""
    made: list[Node] = []
    for target, second in steps:
        args, kwargs = ((), second) if isinstance(second, dict) else ((second,), {})
        with joint.graph.inserting_after(node):
            following = joint.graph.call_function(target, (node, *args), kwargs)
        following.meta = {**node.meta, "val": target(node.meta["val"], *args, **kwargs)}
        made.append(following)
        node = following
    return made
