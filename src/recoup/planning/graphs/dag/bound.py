"""A lower bound on the seconds of *every* schedule of an ordered graph, staged or not.

Between two uses of a value in the graph's order (its making counts as the first) lies a gap. If the value
is missing while operation ``t`` of a gap runs for the first time, it is computed again between ``t`` and
the end of the gap, and computations of different gaps are different ones. So for every ``t``, with
``x[v,g] = 1`` if value v is missing at some time in its gap g,

    sum over gaps that hold t of bytes[v] * x[v,g]  >=  plain live bytes at t - budget
    minimise  sum of seconds[v] * x[v,g]

Solved in integers for small graphs and relaxed for long ones, it bounds every schedule. It leaves out that
a recomputation needs inputs, so it is tight where these live anyway and weak for long recompute chains. For
long graphs only some times ``t`` are used, the fullest ones: fewer rows make a weaker bound, never a wrong
one.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from recoup.planning.graphs import OrderedGraph, actions_of, simulate_actions
from recoup.planning.graphs.dag.greedy import consumers_of
from recoup.planning.program import Program

__all__ = ["gap_bound_s"]

_MAX_NONZEROS = 400_000
_MAX_BINARIES = 600


def gap_bound_s(graph: OrderedGraph, *, budget_bytes: int, time_limit_s: float = 10.0) -> float:
    """Returns seconds below which no schedule within the budget exists; at least the plain seconds.

    >>> graph = OrderedGraph((4, 4, 2, 1), (1.0, 3.0, 1.0, 1.0), ((), (), (1,), (0, 2)))
    >>> gap_bound_s(graph, budget_bytes=10), gap_bound_s(graph, budget_bytes=8)
    (6.0, 7.0)
    """
    live = np.array(simulate_actions(graph, actions_of(graph, range(len(graph)))).live_bytes, dtype=np.int64)
    excess = live - budget_bytes
    if not len(live) or excess.max() <= 0:
        return graph.plain_s
    gaps = [
        (value, start, end)
        for value, readers in enumerate(consumers_of(graph))
        for start, end in zip([value, *readers], readers, strict=False)
        if end - start > 1 and graph.value_bytes[value]
    ]
    times = _busiest(excess, num_columns=len(gaps))
    unit_s = max(graph.compute_s) or 1.0
    unit_bytes = max(graph.value_bytes) or 1
    program = Program()
    rows: dict[int, list[tuple[int, float]]] = {time: [] for time in times.tolist()}
    for value, start, end in gaps:
        inside = times[np.searchsorted(times, start + 1) : np.searchsorted(times, end)]
        if len(inside):
            column = program.column(cost=graph.compute_s[value] / unit_s)
            for time in inside.tolist():
                rows[time].append((column, graph.value_bytes[value] / unit_bytes))
    for time, terms in rows.items():
        program.row(terms, lower=float(excess[time]) / unit_bytes)
    is_relaxed = len(gaps) > _MAX_BINARIES
    solution = program.solve(time_limit_s=time_limit_s, is_relaxed=is_relaxed)
    # Infeasible: an operation that does not fit at all, which the graph's floor says better.
    if not math.isfinite(solution.bound):
        return graph.plain_s
    extra = max(0.0, solution.bound)
    # A relaxation is solved to a tolerance; what it might have overstated is given back.
    return graph.plain_s + (max(0.0, extra * (1 - 1e-9) - 1e-9) if is_relaxed else extra) * unit_s


def _busiest(excess: NDArray[np.int64], *, num_columns: int) -> NDArray[np.int64]:
    """Times over the budget, ascending: all of them, or as many of the fullest as the size limit allows."""
    over = np.flatnonzero(excess > 0)
    limit = max(16, _MAX_NONZEROS // max(1, num_columns))
    if len(over) > limit:
        over = over[np.argsort(-excess[over], kind="stable")[:limit]]
    return np.sort(over)
