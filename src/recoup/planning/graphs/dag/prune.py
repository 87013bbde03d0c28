"""Takes out of an order of computations every repeat that the budget does not need.

Taking out a repeat lets the copy before it live on to serve its uses: the value's bytes are added between
that copy's last use and the repeat, and the repeat's inputs may be freed earlier. Positions stay as they are
while repeats are taken out, so that each try costs a few slices of the memory profile.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from recoup.planning.graphs import OrderedGraph

__all__ = ["pruned_order"]


def pruned_order(graph: OrderedGraph, order: Sequence[int], *, budget_bytes: int) -> list[int]:
    """Returns the order without the repeats that it can do without, dearest tried first.

    The result costs no more than the order and, if the order kept to the budget, so does the result.

    >>> graph = OrderedGraph((4, 4, 2, 1), (1.0, 3.0, 1.0, 1.0), ((), (), (1,), (0, 2)))
    >>> pruned_order(graph, [0, 1, 0, 2, 0, 3], budget_bytes=8)
    [0, 1, 2, 0, 3]
    >>> pruned_order(graph, [0, 1, 0, 2, 0, 3], budget_bytes=10)
    [0, 1, 2, 3]
    """
    profile = _Profile(graph, order)
    repeats = sorted(profile.repeats(), key=lambda position: (-graph.compute_s[order[position]], position))
    found = True
    while found:
        found = False
        for position in repeats:
            if profile.is_present[position] and profile.take_out(position, budget_bytes):
                found = True
        repeats = [position for position in repeats if profile.is_present[position]]
    return [op for op, present in zip(order, profile.is_present, strict=True) if present]


class _Profile:
    """Live bytes at each position, with the uses that each copy serves."""

    def __init__(self, graph: OrderedGraph, order: Sequence[int]) -> None:
        self._graph, self._order = graph, order
        self.is_present = [True] * len(order)
        self._uses: list[list[int]] = [[] for _ in order]
        self._sources: list[list[int]] = [[] for _ in order]
        self._copies: list[list[int]] = [[] for _ in range(len(graph))]
        for position, op in enumerate(order):
            for value in graph.inputs[op]:
                source = self._copies[value][-1]
                self._uses[source].append(position)
                self._sources[position].append(source)
            self._copies[op].append(position)
        change = np.zeros(len(order) + 1, dtype=np.int64)
        for position, op in enumerate(order):
            change[position] += graph.value_bytes[op]
            change[self._end(position) + 1] -= graph.value_bytes[op]
        self._live = np.cumsum(change)[:-1]

    def repeats(self) -> list[int]:
        """The positions that compute an operation again."""
        return [position for copies in self._copies for position in copies[1:]]

    def take_out(self, position: int, budget_bytes: int) -> bool:
        """Takes out a repeat if the budget allows it, and any repeat that only it used."""
        op = self._order[position]
        copies = self._copies[op]
        before = copies[bisect_left(copies, position) - 1]
        gap = slice(self._end(before) + 1, position)
        if self._uses[position]:
            self._live[gap] += self._graph.value_bytes[op]
        else:
            self._live[position] -= self._graph.value_bytes[op]
        self._release_inputs(position)
        if self._uses[position] and gap.stop > gap.start and self._live[gap].max() > budget_bytes:
            self._retain_inputs(position)
            self._live[gap] -= self._graph.value_bytes[op]
            return False
        self.is_present[position] = False
        copies.remove(position)
        for user in self._uses[position]:
            sources = self._sources[user]
            sources[sources.index(position)] = before
        self._uses[before].extend(self._uses[position])
        for source in self._sources[position]:
            if not self._uses[source] and source != self._copies[self._order[source]][0]:
                self.take_out(source, budget_bytes)
        return True

    def _end(self, position: int) -> int:
        uses = self._uses[position]
        return uses[-1] if uses else position

    def _release_inputs(self, position: int) -> None:
        for source in self._sources[position]:
            old_end = self._end(source)
            self._uses[source].remove(position)
            self._live[self._end(source) + 1 : old_end + 1] -= self._graph.value_bytes[self._order[source]]

    def _retain_inputs(self, position: int) -> None:
        for source in self._sources[position]:
            old_end = self._end(source)
            uses = self._uses[source]
            uses.insert(bisect_left(uses, position), position)
            self._live[old_end + 1 : self._end(source) + 1] += self._graph.value_bytes[self._order[source]]
