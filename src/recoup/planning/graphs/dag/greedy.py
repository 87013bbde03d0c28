"""The offline next-use greedy for ordered graphs: walk the order, drop what is cheapest to miss.

When bytes are short, the value with the least

    (seconds to recompute it with its missing ancestors)^a  /  (bytes^b * distance to its next use^c)

goes; a missing input is recomputed on demand, its own missing inputs first. The rule is that of DTR (Kirisame
et al., "Dynamic Tensor Rematerialization", ICLR 2021) with two departures: the next use is known, so that it
replaces the time since the last use, and values that nothing in the order reads again go first.

NOTE [ Lazy recompute cost ]
 1. The seconds of a value grow as its ancestors are dropped. A cached figure that is too small is harmless:
    it is brought up to date when the value would be chosen, and the choice is made again.
 2. They shrink when an ancestor comes back. Direct consumers of a recomputed value are set back to their
    own seconds, a lower bound, so that rule 1 applies again; deeper ones keep their figure until they are
    recomputed.
 3. At most ``_MAX_CLOSURE`` missing ancestors are summed: beyond that the value is dear enough.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recoup.planning.graphs import OrderedGraph

__all__ = ["Weights", "consumers_of", "greedy_order"]

_MAX_CLOSURE = 256
_MAX_REFRESHED = 16


@dataclass(frozen=True)
class Weights:
    """The exponents of the greedy's rule, and the order in which missing inputs are recomputed.

    Attributes:
        seconds: exponent of the recompute seconds.
        size: exponent of the bytes.
        distance: exponent of the distance to the next use, in operations.
        looks_ahead: count an ancestor as missing also if the order reads it for the last time before the
            value's next use, as it is likely to be gone by then.
        shuffle_seed: recompute missing inputs in a random order with this seed; in graph order when None.
    """

    seconds: float = 1.0
    size: float = 1.0
    distance: float = 1.0
    looks_ahead: bool = True
    shuffle_seed: int | None = None


def consumers_of(graph: OrderedGraph) -> list[list[int]]:
    """Lists for each value the operations that read it, ascending.

    >>> consumers_of(OrderedGraph((4, 2, 1), (1.0, 3.0, 1.0), ((), (0,), (0, 1))))
    [[1, 2], [2], []]
    """
    consumers: list[list[int]] = [[] for _ in range(len(graph))]
    for op, read in enumerate(graph.inputs):
        for value in read:
            consumers[value].append(op)
    return consumers


def greedy_order(
    graph: OrderedGraph, *, budget_bytes: int, weights: Weights | None = None
) -> list[int] | None:
    """Returns an order of computations whose peak stays within the budget, or None if the greedy finds none.

    >>> graph = OrderedGraph((4, 4, 2, 1), (1.0, 3.0, 1.0, 1.0), ((), (), (1,), (0, 2)))
    >>> greedy_order(graph, budget_bytes=8)
    [0, 1, 2, 0, 3]
    >>> greedy_order(graph, budget_bytes=6) is None
    True
    """
    walk = _Walk(graph, budget_bytes, weights or Weights())
    for op in range(len(graph)):
        if not walk.advance(op):
            return None
    return walk.order


class _Walk:
    """The state of one greedy walk: what is held, what is pinned, and what each value is worth."""

    def __init__(self, graph: OrderedGraph, budget_bytes: int, weights: Weights) -> None:
        size = len(graph)
        self._graph, self._budget, self._weights = graph, budget_bytes, weights
        self._consumers = consumers_of(graph)
        self._num_read = [0] * size
        self._next_use = np.array([read[0] if read else size for read in self._consumers], dtype=np.float64)
        self._last_use = [read[-1] if read else -1 for read in self._consumers]
        self._sizes = np.maximum(np.array(graph.value_bytes, dtype=np.float64), 1e-9) ** weights.size
        # Values of no seconds still differ in bytes and distance.
        smallest = min((s for s in graph.compute_s if s > 0), default=1.0)
        self._seconds = [max(s, smallest * 1e-3) for s in graph.compute_s]
        self._closure = list(self._seconds)
        self._worth: NDArray[np.float64] = np.full(size, np.inf)
        self._held = bytearray(size)
        self._pins = [0] * size
        self._used = 0
        self._now = 0
        # On wide graphs near their minimum, recomputations can evict each other's inputs without end.
        self._max_steps = 4 * size + 2_000
        self._random = None if weights.shuffle_seed is None else random.Random(weights.shuffle_seed)
        self.order: list[int] = []

    def advance(self, op: int) -> bool:
        """Runs the next operation of the graph's order; False if its inputs and value do not fit."""
        self._now = op
        if not self._compute(op):
            return False
        for value in self._graph.inputs[op]:
            read = self._num_read[value] = self._num_read[value] + 1
            users = self._consumers[value]
            self._next_use[value] = users[read] if read < len(users) else len(self._graph)
            self._update(value)
        return True

    def _compute(self, target: int) -> bool:
        """Computes an operation and what it misses; with a stack, as chains may be thousands long."""
        stack = [(target, self._open(target))]
        while stack:
            op, missing = stack[-1]
            while missing and self._held[missing[-1]]:
                self._pin(missing.pop())
            if missing:
                stack.append((missing[-1], self._open(missing[-1])))
                continue
            if len(self.order) == self._max_steps or not self._make_room(self._graph.value_bytes[op]):
                return False
            self._hold(op)
            for value in self._graph.inputs[op]:
                self._pins[value] -= 1
                self._update(value)
            stack.pop()
        return True

    def _open(self, op: int) -> list[int]:
        """Pins the inputs that are there; returns the missing ones, the first to compute last."""
        missing = []
        for value in reversed(self._graph.inputs[op]):
            if self._held[value]:
                self._pin(value)
            else:
                missing.append(value)
        if self._random is not None:
            self._random.shuffle(missing)
        return missing

    def _pin(self, value: int) -> None:
        self._pins[value] += 1
        self._worth[value] = np.inf

    def _hold(self, op: int) -> None:
        self._held[op] = 1
        self._used += self._graph.value_bytes[op]
        self._closure[op] = self._seconds[op]
        self._update(op)
        is_repeat = op < self._now
        self.order.append(op)
        if is_repeat and len(self._consumers[op]) <= _MAX_REFRESHED:
            for user in self._consumers[op]:
                if self._held[user]:
                    self._closure[user] = self._seconds[user]
                    self._update(user)

    def _update(self, value: int) -> None:
        if not self._held[value] or self._pins[value]:
            self._worth[value] = np.inf
        elif self._num_read[value] >= len(self._consumers[value]):
            self._worth[value] = 0.0
        else:
            self._worth[value] = self._closure[value] ** self._weights.seconds / self._sizes[value]

    def _make_room(self, needed_bytes: int) -> bool:
        if self._used + needed_bytes <= self._budget:
            return True
        top = self._now + 1
        distance = self._next_use[:top] - (self._now - 1)
        if self._weights.distance != 1.0:
            distance **= self._weights.distance
        score = self._worth[:top] / distance
        while self._used + needed_bytes > self._budget:
            value = int(score.argmin())
            if score[value] == np.inf:
                return False
            seconds = self._missing_seconds(value)
            if seconds > self._closure[value] and score[value] > 0:
                self._closure[value] = seconds
                self._update(value)
                score[value] = self._worth[value] / distance[value]
                continue
            self._held[value] = 0
            self._used -= self._graph.value_bytes[value]
            self._worth[value] = score[value] = np.inf
        return True

    def _missing_seconds(self, value: int) -> float:
        inputs, held, seconds = self._graph.inputs, self._held, self._seconds
        total, seen, stack = 0.0, {value}, [value]
        until = self._next_use[value] if self._weights.looks_ahead else -1
        while stack and len(seen) <= _MAX_CLOSURE:
            op = stack.pop()
            total += seconds[op]
            for item in inputs[op]:
                if (not held[item] or self._last_use[item] < until) and item not in seen:
                    seen.add(item)
                    stack.append(item)
        return total
