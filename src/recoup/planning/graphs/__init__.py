"""Graphs of operations: their cost models here, their solvers in ``hold`` and ``dag``."""

from recoup.planning.graphs.graph import (
    Compute,
    Drop,
    HoldCost,
    Operation,
    OpGraph,
    OrderedCost,
    OrderedGraph,
    actions_of,
    evaluate_held,
    simulate_actions,
)

__all__ = [
    "Compute",
    "Drop",
    "HoldCost",
    "OpGraph",
    "Operation",
    "OrderedCost",
    "OrderedGraph",
    "actions_of",
    "evaluate_held",
    "simulate_actions",
]
