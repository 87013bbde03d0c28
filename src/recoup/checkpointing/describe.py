"""What the checkpointed calls behind a tensor hold until the backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from recoup.checkpointing.replayable import Replayable, Sought, seeking

__all__ = ["describe"]


def describe(tensor: Tensor) -> str:
    """Lists the checkpointed calls in a tensor's graph: their functions, what they hold, give and replay.

    For debugging: it looks at every node of the graph. Nothing is replayed by it.

    >>> import torch
    >>> from recoup import checkpoint
    >>> x = torch.ones(2, 3, requires_grad=True)
    >>> print(describe(checkpoint(torch.nn.functional.gelu, x * 2).sum()))
    <checkpoint of gelu: holds [float32[2, 3]], gives [float32[2, 3]], 1 saved tensor to replay, no RNG state>
    """
    frames: list[Replayable] = []
    with seeking():
        for node in _nodes(tensor):
            for frame in _frames(node):
                if not any(frame is known for known in frames):
                    frames.append(frame)
    return "\n".join(map(repr, frames)) or "no checkpointed call"


def _nodes(tensor: Tensor) -> Iterator[Any]:
    stack, seen = [tensor.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            stack.extend(parent for parent, _ in node.next_functions)


def _frames(node: Any) -> Iterator[Replayable]:
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            try:
                getattr(node, name)
            except Sought as found:
                yield found.found
            except RuntimeError:  # already freed by a backward
                continue
