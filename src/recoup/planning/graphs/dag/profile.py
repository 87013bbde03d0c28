"""Orders of computations with their live bytes, for those who change them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from recoup.planning.graphs import OrderedGraph

__all__ = ["Profile"]


class Profile:
    """An order of computations: which copy of a value serves which uses, and the live bytes at each position.

    Attributes:
        copies: of each operation, the positions that compute it, ascending.
        uses: of each position, the positions that read its copy, ascending.
        sources: of each position, the positions whose copies it reads.
        live: bytes at each position.
    """

    def __init__(self, graph: OrderedGraph, order: Sequence[int]) -> None:
        self.graph, self.order = graph, order
        self.copies: list[list[int]] = [[] for _ in range(len(graph))]
        self.uses: list[list[int]] = [[] for _ in order]
        self.sources: list[list[int]] = []
        for position, op in enumerate(order):
            sources = [self.copies[value][-1] for value in graph.inputs[op]]
            for source in sources:
                self.uses[source].append(position)
            self.sources.append(sources)
            self.copies[op].append(position)
        change = np.zeros(len(order) + 1, dtype=np.int64)
        for position, op in enumerate(order):
            change[position] += graph.value_bytes[op]
            change[self.end(position) + 1] -= graph.value_bytes[op]
        self.live: NDArray[np.int64] = np.cumsum(change)[:-1]

    def end(self, position: int) -> int:
        """The last position at which a copy is read; its own if it never is."""
        uses = self.uses[position]
        return uses[-1] if uses else position

    def size(self, position: int) -> int:
        """Bytes of the copy made at a position."""
        return self.graph.value_bytes[self.order[position]]
