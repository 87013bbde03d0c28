"""Which cuts of a captured unit are worth measuring: corners of the frontier of its operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.fx import Node

from recoup.capture.cut import Cut
from recoup.capture.graph import UnitGraph
from recoup.planning.graphs.hold import HoldPoint, hold_frontier

__all__ = ["cuts_of", "recompute_s"]

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

    frontier = hold_frontier(graph.to_planner(price))
    own = Cut(engine, graph.digest, settings=settings, draws=graph.draws)
    # The first corner recomputes nothing that takes time, as the engine's own cut does.
    corners = _spread(frontier.points, _MOST_CUTS)[1:]
    held = [graph.names(frontier.held(index)) for index in corners]
    return [own, *(replace(own, saves=saves, number=number) for number, saves in enumerate(held, start=1))]


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
