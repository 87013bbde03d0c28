"""Simulated annealing over orders of computations, for wide graphs and tight budgets.

An order of computations determines the least memory that it needs (each copy is dropped after the last use
that it serves), and taking a repeat out, putting one in or moving one leaves it legal as long as first
computations keep their places. So a plain local search does: minimise seconds plus a price on the bytes
over the budget, summed over time, and cool down. Retention intervals as the search space are Moccasin's
idea (Bartan et al., ICML 2023), which hands them to a constraint solver; here they follow from the order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from recoup.planning.graphs import OrderedGraph

__all__ = ["Cooling", "annealed_order"]

_MAX_SHIFT = 8
_MAX_LEAD = 10


@dataclass(frozen=True)
class Cooling:
    """How an annealing runs.

    Attributes:
        num_moves: moves to try; the work is this times the length of the order.
        price: price of a byte-step over the budget, in mean seconds per mean bytes of the graph's values.
        hot: temperature at the start, in mean seconds of an operation.
        cold: temperature at the end, in the same unit.
        seed: of the random moves.
    """

    num_moves: int
    price: float = 1.0
    hot: float = 0.5
    cold: float = 0.02
    seed: int = 0


def annealed_order(
    graph: OrderedGraph, *, budget_bytes: int, start: Sequence[int], cooling: Cooling
) -> list[int] | None:
    """Returns the cheapest order within the budget that the search passed, or None if it passed none.

    >>> graph = OrderedGraph((4, 4, 2, 1), (1.0, 3.0, 1.0, 1.0), ((), (), (1,), (0, 2)))
    >>> annealed_order(graph, budget_bytes=8, start=range(4), cooling=Cooling(num_moves=200))
    [0, 1, 2, 0, 3]
    """
    mean_s = math.fsum(graph.compute_s) / max(1, len(graph)) or 1.0
    mean_bytes = sum(graph.value_bytes) / max(1, len(graph)) or 1.0
    price = cooling.price * mean_s / mean_bytes
    rng = random.Random(cooling.seed)
    current = list(start)
    seconds = math.fsum(graph.compute_s[op] for op in current)
    value = seconds + price * _excess(graph, current, budget_bytes)
    best: tuple[float, list[int]] | None = None
    temperature = cooling.hot * mean_s
    for step in range(cooling.num_moves):
        if step % 64 == 0:
            temperature = cooling.hot * mean_s * (cooling.cold / cooling.hot) ** (step / cooling.num_moves)
        moved = _neighbour(graph, current, rng)
        if moved is None:
            continue
        order, change_s = moved
        excess = _excess(graph, order, budget_bytes)
        new = seconds + change_s + price * excess
        if new <= value or rng.random() < math.exp((value - new) / temperature):
            current, seconds, value = order, seconds + change_s, new
            if excess == 0 and (best is None or seconds < best[0]):
                best = (seconds, order)
    return None if best is None else best[1]


def _excess(graph: OrderedGraph, order: list[int], budget_bytes: int) -> int:
    """Bytes over the budget, summed over the computations. The hot loop: locals and lists only."""
    inputs, sizes = graph.inputs, graph.value_bytes
    latest = [0] * len(sizes)
    end = [0] * len(order)
    for position, op in enumerate(order):
        for value in inputs[op]:
            end[latest[value]] = position
        latest[op] = position
        end[position] = position
    change = [0] * (len(order) + 1)
    for position, op in enumerate(order):
        size = sizes[op]
        change[position] += size
        change[end[position] + 1] -= size
    live = excess = 0
    for step in change:
        live += step
        if live > budget_bytes:
            excess += live - budget_bytes
    return excess


def _neighbour(graph: OrderedGraph, order: list[int], rng: random.Random) -> tuple[list[int], float] | None:
    """A random legal neighbour and the seconds by which it is dearer, or None if the draw gave none."""
    draw = rng.random()
    if draw < 0.35:
        return _with_repeat(graph, order, rng)
    repeats = _repeats(order)
    if not repeats:
        return None
    position = repeats[int(rng.random() * len(repeats))]
    op = order[position]
    rest = order[:position] + order[position + 1 :]
    if draw < 0.6:
        return rest, -graph.compute_s[op]
    if draw < 0.85:
        shift = int(rng.random() * (2 * _MAX_SHIFT + 1)) - _MAX_SHIFT
        place = min(max(position + shift, 0), len(rest))
        if rest.index(op) >= place:
            return None
        return [*rest[:place], op, *rest[place:]], 0.0
    added = _with_repeat(graph, rest, rng)
    return None if added is None else (added[0], added[1] - graph.compute_s[op])


def _with_repeat(graph: OrderedGraph, order: list[int], rng: random.Random) -> tuple[list[int], float] | None:
    """Puts a repeat of some operation's input in front of it, at once or a few steps earlier."""
    position = int(rng.random() * len(order))
    read = graph.inputs[order[position]]
    if not read:
        return None
    op = read[int(rng.random() * len(read))]
    if rng.random() < 0.3:
        position = max(position - int(rng.random() * _MAX_LEAD), 0)
        if order.index(op) >= position:
            return None
    return [*order[:position], op, *order[position:]], graph.compute_s[op]


def _repeats(order: list[int]) -> list[int]:
    seen: set[int] = set()
    found = []
    for position, op in enumerate(order):
        if op in seen:
            found.append(position)
        else:
            seen.add(op)
    return found
