"""Which cuts of a captured unit are worth measuring: corners of the frontier of its operations.

NOTE [ Two frontiers ]
    1. Corners of the frontier of bytes against measured seconds make fast plans. They vary from measurement to
       measurement, since seconds do.
    2. Corners of the frontier of bytes against the number of operations that run again depend on the graph alone.
    3. The smallest budget that a refusal names has to hold in another process. It is therefore found without the
       corners of 1 (`recoup.plans.tightest`), and those of 2 are all measured where nothing else fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.fx import Node

from recoup.capture.cut import Cut
from recoup.capture.graph import UnitGraph
from recoup.planning.graphs.hold import HoldPoint, hold_frontier

__all__ = ["cuts_of", "recompute_s", "with_steady_cuts"]

_MOST_CUTS = 4
_FUSED_SHARE = 0.1
"""Share of its own seconds that an operation takes which generated code fuses with others. It only ranks candidates:
those chosen are compiled and measured."""
_BY_THEMSELVES = ("mm", "conv", "attention", "attn", "sort", "scatter", "index", "embedding", "fft", "topk")
"""Parts of the names of operations that generated code does not fuse with others."""


def cuts_of(
    graph: UnitGraph, engine: str, seconds_of: Callable[[Node], float], settings: str = ""
) -> list[Cut]:
    """The engine's own cut, then corners of the frontier, from the most bytes to the fewest."""

    def price(node: Node) -> float:
        graph.seconds[node.name] = seconds_of(node)
        return _price(graph, node, engine)

    own = Cut(engine, graph.digest, settings=settings, draws=graph.draws)
    held = enumerate(_corners(graph, price), start=1)
    return [own, *(replace(own, saves=saves, number=number, by_seconds=True) for number, saves in held)]


def with_steady_cuts(graph: UnitGraph, cuts: Sequence[Cut]) -> list[Cut]:
    """Cuts by seconds, the engine's own first, and those that depend on the graph alone: NOTE [ Two frontiers ]."""
    own, *fast = cuts
    steady = _corners(graph, lambda _: 1.0)
    found = dict.fromkeys([*steady, *(cut.saves or () for cut in fast)])
    held = enumerate(sorted(found, key=graph.num_bytes, reverse=True), start=1)
    return [
        own,
        *(replace(own, saves=saves, number=number, by_seconds=saves not in steady) for number, saves in held),
    ]


def _corners(graph: UnitGraph, price: Callable[[Node], float]) -> list[tuple[str, ...]]:
    """What some corners of the frontier keep, from the most bytes to the fewest."""
    frontier = hold_frontier(graph.to_planner(price))
    # The first corner recomputes nothing that takes time, as the engine's own cut does.
    return [graph.names(frontier.held(index)) for index in _spread(frontier.points, _MOST_CUTS)[1:]]


def recompute_s(graph: UnitGraph, cut: Cut) -> float:
    """Seconds of what a cut's backward runs again, as `cuts_of` has priced it."""
    _, again = graph.recomputed(graph.own_saves if cut.saves is None else cut.saves)
    return sum(_price(graph, node, cut.engine) for node in again)


def _price(graph: UnitGraph, node: Node, engine: str) -> float:
    """Views, which are not among the graph's operations, take no time."""
    share = _FUSED_SHARE if engine == "compiled" and _is_fused(node) else 1.0
    return share * graph.seconds.get(node.name, 0.0)


def _is_fused(node: Node) -> bool:
    name = str(node.target)
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or not any(
        part in name for part in _BY_THEMSELVES
    )


def _spread(points: Sequence[HoldPoint], most: int) -> list[int]:
    """The corners whose lines deviate least from the whole frontier: the ends, then the farthest, one by one.

    >>> corners = [HoldPoint(90, 0.0, ()), HoldPoint(50, 1.0, ()), HoldPoint(20, 2.0, ()), HoldPoint(10, 9.0, ())]
    >>> _spread(corners, 3)
    [0, 2, 3]
    """
    chosen = sorted({0, len(points) - 1})
    while len(chosen) < min(most, len(points)):
        gains = {index: _above(points, chosen, index) for index in range(len(points)) if index not in chosen}
        chosen = sorted([*chosen, max(gains, key=lambda index: gains[index])])
    return chosen


def _above(points: Sequence[HoldPoint], chosen: Sequence[int], index: int) -> float:
    """Seconds by which the line between the chosen neighbours of a corner lies above it."""
    before = points[max(one for one in chosen if one < index)]
    after = points[min(one for one in chosen if one > index)]
    share = (before.held_bytes - points[index].held_bytes) / (before.held_bytes - after.held_bytes)
    return before.recompute_s + share * (after.recompute_s - before.recompute_s) - points[index].recompute_s
