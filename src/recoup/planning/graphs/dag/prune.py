"""Takes out of an order of computations every repeat that the budget does not need.

Taking out a repeat lets the copy before it live on to serve its uses: the value's bytes are added between
that copy's last use and the repeat, and the repeat's inputs may be freed earlier. Positions stay as they are
while repeats are taken out, so that each try costs a few slices of the memory profile.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from recoup.planning.graphs import OrderedGraph
from recoup.planning.graphs.dag.profile import Profile

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
    profile = _Pruning(graph, order)
    repeated = [position for copies in profile.copies for position in copies[1:]]
    repeats = sorted(repeated, key=lambda position: (-graph.compute_s[order[position]], position))
    found = True
    while found:
        found = False
        for position in repeats:
            if profile.is_present[position] and profile.take_out(position, budget_bytes):
                found = True
        repeats = [position for position in repeats if profile.is_present[position]]
    return [op for op, present in zip(order, profile.is_present, strict=True) if present]


class _Pruning(Profile):
    """An order from which repeats are taken out one by one; positions stay as they are."""

    def __init__(self, graph: OrderedGraph, order: Sequence[int]) -> None:
        super().__init__(graph, order)
        self.is_present = [True] * len(order)

    def take_out(self, position: int, budget_bytes: int) -> bool:
        """Takes out a repeat if the budget allows it, and any repeat that only it used."""
        size, copies = self.size(position), self.copies[self.order[position]]
        before = copies[bisect_left(copies, position) - 1]
        gap = slice(self.end(before) + 1, position)
        if self.uses[position]:
            self.live[gap] += size
        else:
            self.live[position] -= size
        self._release_inputs(position)
        if self.uses[position] and gap.stop > gap.start and self.live[gap].max() > budget_bytes:
            self._retain_inputs(position)
            self.live[gap] -= size
            return False
        self.is_present[position] = False
        copies.remove(position)
        for user in self.uses[position]:
            sources = self.sources[user]
            sources[sources.index(position)] = before
        self.uses[before].extend(self.uses[position])
        for source in self.sources[position]:
            if not self.uses[source] and source != self.copies[self.order[source]][0]:
                self.take_out(source, budget_bytes)
        return True

    def _release_inputs(self, position: int) -> None:
        for source in self.sources[position]:
            old_end = self.end(source)
            self.uses[source].remove(position)
            self.live[self.end(source) + 1 : old_end + 1] -= self.size(source)

    def _retain_inputs(self, position: int) -> None:
        for source in self.sources[position]:
            old_end = self.end(source)
            insort(self.uses[source], position)
            self.live[old_end + 1 : self.end(source) + 1] += self.size(source)
