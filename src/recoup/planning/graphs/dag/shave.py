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
from recoup.planning.graphs.dag.profile import Profile

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
        profile = Profile(graph, order)
        over = profile.live - budget_bytes
        if over.max(initial=-1) <= 0:
            return order
        best: tuple[float, int, int] | None = None
        for op, place, gain in _candidates(profile, over):
            worth = gain / (graph.compute_s[op] + smallest * 1e-3) ** seconds_power
            worth *= 1.0 if rng is None else 0.5 + rng.random()
            if best is None or worth > best[0]:
                best = (worth, op, place)
        if best is None:
            return None
        order.insert(best[2], best[1])
    return None


def _candidates(profile: Profile, over: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """(operation, place of its repeat, bytes over the budget that it takes off), only where it does."""
    peak = int(over.argmax())
    found = []
    for start in range(peak):
        if profile.end(start) <= peak or not profile.size(start):
            continue
        uses = profile.uses[start]
        index = bisect_right(uses, peak)
        before = uses[index - 1] if index else start
        if before == peak:
            continue
        op = profile.order[start]
        gain = _gain(profile, over, op, before=before, place=uses[index])
        if gain > 0:
            found.append((op, uses[index], gain))
    return found


def _gain(profile: Profile, over: NDArray[np.int64], op: int, *, before: int, place: int) -> int:
    """What leaving a value out after step ``before`` and repeating it before step ``place`` takes off."""
    copies = [profile.copies[value] for value in profile.graph.inputs[op]]
    sources = [own[bisect_right(own, place - 1) - 1] for own in copies]
    ends = [(profile.end(source), profile.size(source)) for source in sources]
    first = min([before + 1, *(end + 1 for end, _ in ends)])
    old = over[first:place]
    new = old.copy()
    new[before + 1 - first :] -= profile.graph.value_bytes[op]
    longer = 0
    for end, size in ends:
        if end < place:
            new[end + 1 - first :] += size
            longer += size
    # The repeat's own step: what step ``place`` holds but its result, and the inputs kept for the repeat.
    step = int(over[place]) - profile.size(place) + longer
    return int(np.maximum(old, 0).sum() - np.maximum(new, 0).sum()) - max(step, 0)
