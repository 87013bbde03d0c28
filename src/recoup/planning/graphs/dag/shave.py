"""Peak shaving: from the plain order, put in the repeat that takes most off the peak for its seconds.

The greedy walk decides at the moment when bytes run out, and on wide graphs what it drops then can need
ancestors that are gone by the time it comes back. Shaving sees the whole profile: at the fullest step it
looks at each value that waits there for a later use, and asks what computing it again just before that use
would do to the bytes over the budget, its inputs' longer lives included. The best change for its seconds is
made, and the next fullest step is taken, until all fit or no change helps. An input that has to live too
long for a repeat is itself a value that waits, so chains of repeats build up one by one.
"""

from __future__ import annotations

import random
from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from recoup.planning.graphs import OrderedGraph

__all__ = ["shaved_order"]


def shaved_order(
    graph: OrderedGraph, *, budget_bytes: int, seconds_power: float = 1.0, seed: int | None = None
) -> list[int] | None:
    """Returns an order of computations within the budget, or None if shaving gets stuck.

    Args:
        graph: operations in their fixed order.
        budget_bytes: limit on the live bytes.
        seconds_power: how much the seconds of a repeat count against the bytes that it takes off.
        seed: vary each candidate's worth at random with this seed; not at all when None.

    >>> graph = OrderedGraph((4, 4, 2, 1), (1.0, 3.0, 1.0, 1.0), ((), (), (1,), (0, 2)))
    >>> shaved_order(graph, budget_bytes=8)
    [0, 1, 2, 0, 3]
    """
    rng = None if seed is None else random.Random(seed)
    smallest = min((seconds for seconds in graph.compute_s if seconds > 0), default=1.0)
    order = list(range(len(graph)))
    for _ in range(2 * len(graph) + 1):
        profile = _Profile(graph, order, budget_bytes)
        if profile.excess_at_most_zero:
            return order
        best: tuple[float, int, int] | None = None
        for op, place, gain in profile.candidates():
            worth = gain / (graph.compute_s[op] + smallest * 1e-3) ** seconds_power
            worth *= 1.0 if rng is None else 0.5 + rng.random()
            if best is None or worth > best[0]:
                best = (worth, op, place)
        if best is None:
            return None
        order.insert(best[2], best[1])
    return None


class _Profile:
    """Live bytes over the budget at each step of an order, and what each copy is waiting for."""

    def __init__(self, graph: OrderedGraph, order: list[int], budget_bytes: int) -> None:
        self._graph, self._order = graph, order
        self._uses: list[list[int]] = [[] for _ in order]
        self._sources: list[tuple[int, ...]] = []
        self._copies: list[list[int]] = [[] for _ in range(len(graph))]
        latest = [0] * len(graph)
        for position, op in enumerate(order):
            sources = tuple(latest[value] for value in graph.inputs[op])
            self._sources.append(sources)
            for source in sources:
                self._uses[source].append(position)
            latest[op] = position
            self._copies[op].append(position)
        change = np.zeros(len(order) + 1, dtype=np.int64)
        for position, op in enumerate(order):
            change[position] += graph.value_bytes[op]
            change[self._end(position) + 1] -= graph.value_bytes[op]
        self._over: NDArray[np.int64] = np.cumsum(change)[:-1] - budget_bytes

    @property
    def excess_at_most_zero(self) -> bool:
        """Whether every step fits."""
        return bool(self._over.max(initial=-1) <= 0)

    def candidates(self) -> list[tuple[int, int, int]]:
        """(operation, place of its repeat, bytes over the budget that it takes off), only where it does."""
        peak = int(self._over.argmax())
        found = []
        for start in range(peak):
            op = self._order[start]
            if self._end(start) <= peak or not self._graph.value_bytes[op]:
                continue
            uses = self._uses[start]
            index = bisect_right(uses, peak)
            before = uses[index - 1] if index else start
            if before == peak:
                continue
            gain = self._gain(op, before, uses[index])
            if gain > 0:
                found.append((op, uses[index], gain))
        return found

    def _end(self, position: int) -> int:
        uses = self._uses[position]
        return uses[-1] if uses else position

    def _gain(self, op: int, before: int, place: int) -> int:
        """What leaving a value out after step ``before`` and repeating it before step ``place`` takes off."""
        sizes = self._graph.value_bytes
        first = before + 1
        sources = [
            self._copies[value][bisect_right(self._copies[value], place - 1) - 1]
            for value in self._graph.inputs[op]
        ]
        ends = [(self._end(source), sizes[self._order[source]]) for source in sources]
        first = min([first, *(end + 1 for end, _ in ends)])
        old = self._over[first:place]
        new = old.copy()
        new[before + 1 - first :] -= sizes[op]
        longer = 0
        for end, size in ends:
            if end < place:
                new[end + 1 - first :] += size
                longer += size
        # The repeat's own step: what step ``place`` holds but its result, and the inputs kept for the repeat.
        step = int(self._over[place]) - sizes[self._order[place]] + longer
        return int(np.maximum(old, 0).sum() - np.maximum(new, 0).sum()) - max(step, 0)
