"""Forwards whose backward has not begun yet.

NOTE [ Where a step ends ]
    1. A `Mark` is owned by hooks on the nodes that made a call's output. The hooks set it when a backward reaches them,
       and it is freed with the nodes. So a call waits for its backward as long as its mark lives and is not set.
    2. A step may call the model several times before its backward, or parts of it and never the model itself. A call
       belongs to the step of the call before it as long as that one waits.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from recoup.tensors import contents

__all__ = ["Mark", "Waiting", "outputs_in", "waits"]


class Mark:
    """Stands for the graph of one forward, and lives as long as it."""

    __slots__ = ("__weakref__", "has_run")

    def __init__(self) -> None:
        self.has_run = False

    def at_backward(self, gradients: Any) -> None:
        """A hook of the nodes that made the output."""
        self.has_run = True

    def put_on(self, output: Any) -> None:
        """Gives the nodes that made an output this mark."""
        for node in {tensor.grad_fn for tensor in outputs_in(output)}:
            node.register_prehook(self.at_backward)  # type: ignore[union-attr]


def waits(mark: weakref.ref[Any]) -> bool:
    """Whether a forward may still get its backward."""
    found = mark()
    return found is not None and not found.has_run


def outputs_in(value: Any) -> Iterator[Tensor]:
    """The tensors of an output that have a graph."""
    if isinstance(value, Tensor):
        if value.grad_fn is not None:
            yield value
    else:
        found = contents(value)
        for item in () if found is None else found[1]:
            yield from outputs_in(item)


class Waiting:
    """The last call of a step; true while it waits for its backward."""

    def __init__(self) -> None:
        self._last: weakref.ref[Mark] | None = None

    def add(self, output: Any) -> None:
        """A call has returned."""
        mark = Mark()
        mark.put_on(output)
        self._last = weakref.ref(mark)

    def __bool__(self) -> bool:
        return self._last is not None and waits(self._last)
