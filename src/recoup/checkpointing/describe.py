"""What the checkpointed calls behind a tensor hold until the backward."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from recoup.tensors import graph_nodes

if TYPE_CHECKING:
    from recoup.checkpointing.segment import Segment

__all__ = ["SEEKING", "Sought", "describe"]


class Sought(BaseException):
    """Carries a segment out of its unpack hook."""

    def __init__(self, found: Segment) -> None:
        self.found = found


class _Seeking(threading.local):
    active = False


SEEKING = _Seeking()
"""While it is active, unpack hooks on this thread raise `Sought` instead of replaying."""


def describe(tensor: Tensor) -> str:
    """Lists the checkpointed calls in a tensor's graph: their functions, what they hold, give and replay.

    For debugging: it looks at every node of the graph. Nothing is replayed by it.

    >>> import torch
    >>> from recoup import checkpoint
    >>> x = torch.ones(2, 3, requires_grad=True)
    >>> print(describe(checkpoint(torch.nn.functional.gelu, x * 2).sum()))
    <checkpoint of gelu: holds [float32[2, 3]], gives [float32[2, 3]], 1 saved tensor to replay, no RNG state>
    """
    found: list[Segment] = []
    SEEKING.active = True
    try:
        for node in graph_nodes(tensor):
            found += _segments(node)
    finally:
        SEEKING.active = False
    segments = {id(segment): segment for segment in found}.values()
    return "\n".join(map(repr, segments)) or "no checkpointed call"


def _segments(node: Any) -> Iterator[Segment]:
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            try:
                getattr(node, name)
            except Sought as found:
                yield found.found
            except RuntimeError:  # already freed by a backward
                continue
