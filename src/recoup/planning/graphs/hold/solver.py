"""Which values of a forward pass to hold for the backward, and which to recompute.

``hold_frontier`` gives the whole lower convex hull of recompute seconds against held bytes: every corner is
a hold set that is best at some price of a byte, and no hold set lies below the hull. ``hold_plan`` gives a
plan for one limit in bytes, which may lie between two corners, with a lower bound.

See ``priced_cut`` for the cut and its proof, ``hull`` for the search over prices, ``between``
for limits between corners. What is *not* modelled here: the peak while the backward recomputes. Use it
inside a unit, where replay is local, or give the ordered graph to :mod:`recoup.planning.graphs.dag`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby

import numpy as np

from recoup.errors import BudgetError, GraphError
from recoup.planning.checks import check_seconds
from recoup.planning.graphs import OpGraph, evaluate_held
from recoup.planning.graphs.hold.between import best_within
from recoup.planning.graphs.hold.hull import switches
from recoup.planning.graphs.hold.priced_cut import PricedCut, priced_cut
from recoup.sizes import format_bytes, parse_bytes

__all__ = ["HoldFrontier", "HoldPlan", "HoldPoint", "hold_frontier", "hold_plan", "hold_plans"]


@dataclass(frozen=True)
class HoldPoint:
    """A corner of the hull.

    Attributes:
        held_bytes: bytes held between the passes.
        recompute_s: seconds of the operations that run again.
        changed: operations that are recomputed here and not at the corner before, or the other way round.
    """

    held_bytes: int
    recompute_s: float
    changed: tuple[int, ...]


@dataclass(frozen=True)
class HoldFrontier:
    """The lower convex hull of recompute seconds against held bytes.

    Attributes:
        graph: the graph that it is of.
        points: its corners, from the most bytes and the fewest seconds to the fewest bytes.
    """

    graph: OpGraph
    points: tuple[HoldPoint, ...]

    def recomputed(self, index: int) -> tuple[int, ...]:
        """The operations that run again at a corner."""
        again: set[int] = set()
        for point in self.points[: range(len(self.points))[index] + 1]:
            again.symmetric_difference_update(point.changed)
        return tuple(sorted(again))

    def held(self, index: int) -> tuple[int, ...]:
        """The values held at a corner."""
        return _held_with(self.graph, self.recomputed(index))

    def bound_s(self, limit_bytes: int) -> float:
        """The hull's seconds at a limit: no hold set within it takes fewer."""
        index = self._first_within(limit_bytes)
        if index is None:
            return math.inf
        if index == 0:
            return self.points[0].recompute_s
        above, below = self.points[index - 1], self.points[index]
        share = (limit_bytes - below.held_bytes) / (above.held_bytes - below.held_bytes)
        return below.recompute_s - share * (below.recompute_s - above.recompute_s)

    def _first_within(self, limit_bytes: int) -> int | None:
        index = bisect_left(self.points, -limit_bytes, key=lambda point: -point.held_bytes)
        return index if index < len(self.points) else None


@dataclass(frozen=True)
class HoldPlan:
    """Values to hold within a limit, with proof of how good that is.

    Attributes:
        held: the values to hold between the passes.
        recomputed: the operations that run again, in order.
        limit_bytes: the limit that it was made for.
        held_bytes: bytes of the held values.
        recompute_s: seconds of the operations that run again.
        bound_s: no hold set within the limit takes fewer seconds.
        solver: "corner" of the hull, or "program" for a point between.
    """

    held: tuple[int, ...]
    recomputed: tuple[int, ...]
    limit_bytes: int
    held_bytes: int
    recompute_s: float
    bound_s: float
    solver: str

    @property
    def is_optimal(self) -> bool:
        """Whether no hold set within the limit is faster, up to one part in a million (HiGHS's tolerance)."""
        return self.recompute_s <= self.bound_s * (1 + 1e-6) + 1e-9

    def __str__(self) -> str:
        proof = "optimal" if self.is_optimal else f"at least {self.bound_s:.6g} s needed"
        return (
            f"hold {format_bytes(self.held_bytes)} of {format_bytes(self.limit_bytes)}, recompute "
            f"{len(self.recomputed)} operations in {self.recompute_s:.6g} s; {proof} ({self.solver})"
        )


def hold_frontier(graph: OpGraph) -> HoldFrontier:
    """Finds every corner of the hull, in exact bytes and nanoseconds.

    >>> from recoup.planning.graphs import Operation
    >>> ops = (Operation(1.0, (0,), (1,)), Operation(2.0, (1,), (2,)), Operation(4.0, (1,), (3,)))
    >>> graph = OpGraph((9, 4, 5, 6), ops, needed=(2, 3), resident=(0,))
    >>> frontier = hold_frontier(graph)
    >>> [(point.held_bytes, point.recompute_s) for point in frontier.points]
    [(11, 0.0), (6, 3.0), (0, 7.0)]
    >>> frontier.held(1)
    (3,)
    """
    cut = priced_cut(graph)
    first, changes = switches(cut)
    num_ops = len(graph.operations)
    start = tuple(node for node in cut.nodes[first].tolist() if node < num_ops)
    cost = evaluate_held(graph, held=_held_with(graph, start))
    size, nanoseconds = cost.held_bytes, round(cost.recompute_s * 1e9)
    points = [HoldPoint(size, nanoseconds / 1e9, start)]
    carried: set[int] = set()
    for _, group in groupby(changes, key=lambda change: change.price):
        before = size
        for change in group:
            size, nanoseconds = size - change.saved_bytes, nanoseconds + change.added_ns
            nodes = (*change.joining.tolist(), *change.leaving.tolist())
            carried.symmetric_difference_update(node for node in nodes if node < num_ops)
        # A change of no bytes makes no corner; it waits for the next one.
        if size != before:
            points.append(HoldPoint(size, nanoseconds / 1e9, tuple(sorted(carried))))
            carried = set()
    return HoldFrontier(graph, tuple(points))


def hold_plan(
    graph: OpGraph,
    *,
    limit_bytes: int | str,
    frontier: HoldFrontier | None = None,
    time_limit_s: float = 2.0,
) -> HoldPlan:
    """Chooses what to hold within a limit: a corner of the hull, or something better between two.

    Args:
        graph: the forward pass and what the backward needs.
        limit_bytes: bytes that may be held between the passes; a number or text such as "1GiB".
        frontier: the graph's frontier, if it is known already.
        time_limit_s: for the integer program between two corners.

    Raises:
        BudgetError: if even recomputing all that can be leaves more bytes to hold than the limit.

    >>> from recoup.planning.graphs import Operation
    >>> ops = (Operation(1.0, (0,), (1,)), Operation(2.0, (1,), (2,)), Operation(4.0, (1,), (3,)))
    >>> graph = OpGraph((9, 4, 5, 6), ops, needed=(2, 3), resident=(0,))
    >>> print(hold_plan(graph, limit_bytes=5))
    hold 5 B of 5 B, recompute 2 operations in 5 s; optimal (program)
    """
    check_seconds("hold_plan", error=GraphError, time_limit_s=time_limit_s)
    limit = parse_bytes(limit_bytes)
    frontier = frontier or hold_frontier(graph)
    index = frontier._first_within(limit)
    if index is None:
        least = frontier.points[-1].held_bytes
        raise BudgetError(
            f"The backward needs at least {least} bytes held, however much is recomputed; the limit is "
            f"{limit} bytes. Raise it to {least} bytes, or make values resident or replayable.",
            budget_bytes=limit,
            smallest_bytes=least,
        )
    plan = _plan_of(
        graph, frontier.recomputed(index), limit=limit, bound_s=frontier.bound_s(limit), solver="corner"
    )
    if plan.is_optimal:
        return plan
    return _improved(graph, plan, frontier=frontier, index=index, time_limit_s=time_limit_s)


def hold_plans(
    graph: OpGraph, *, limits_bytes: Iterable[int | str], time_limit_s: float = 2.0
) -> tuple[HoldPlan, ...]:
    """Plans for several limits, ascending; more bytes never cost more seconds. Limits too small are left out.

    >>> from recoup.planning.graphs import Operation
    >>> graph = OpGraph((9, 4, 5), (Operation(1.0, (0,), (1,)), Operation(2.0, (1,), (2,))), (1, 2), (0,))
    >>> [plan.recompute_s for plan in hold_plans(graph, limits_bytes=[0, 4, 5, 9])]
    [3.0, 2.0, 1.0, 0.0]
    """
    frontier = hold_frontier(graph)
    plans: list[HoldPlan] = []
    for limit in sorted({parse_bytes(size) for size in limits_bytes}):
        if limit < frontier.points[-1].held_bytes:
            continue
        plan = hold_plan(graph, limit_bytes=limit, frontier=frontier, time_limit_s=time_limit_s)
        if plans and plans[-1].recompute_s < plan.recompute_s:
            plan = replace(plans[-1], limit_bytes=limit, bound_s=plan.bound_s)
        plans.append(plan)
    return tuple(plans)


def _improved(
    graph: OpGraph, plan: HoldPlan, *, frontier: HoldFrontier, index: int, time_limit_s: float
) -> HoldPlan:
    """Looks for a better plan than the corner, between it and the one before."""
    cut = priced_cut(graph)
    above, below = frontier.points[index - 1], frontier.points[index]
    added = round(below.recompute_s * 1e9) - round(above.recompute_s * 1e9)
    known = _chosen_of(cut, graph, plan.recomputed)
    own_bytes = int(cut.costs(known, num_parts=1)[0][0])
    core = best_within(
        cut,
        # The cut leaves out what must be held anyway.
        limit_bytes=plan.limit_bytes - (plan.held_bytes - own_bytes),
        price=Fraction(added, above.held_bytes - below.held_bytes),
        known=known,
        time_limit_s=time_limit_s,
    )
    bound_s = plan.bound_s
    if core.bound_ns is not None:
        # What the program's tolerance may have overstated is given back.
        bound_s = max(bound_s, core.bound_ns * (1 - 1e-7) / 1e9)
    best = replace(plan, bound_s=min(bound_s, plan.recompute_s))
    if core.chosen is not None:
        again = tuple(node for node in cut.nodes[core.chosen].tolist() if node < len(graph.operations))
        other = _plan_of(graph, again, limit=plan.limit_bytes, bound_s=bound_s, solver="program")
        # HiGHS works with tolerances: what it found counts only if exact evaluation agrees.
        if other.held_bytes <= plan.limit_bytes and other.recompute_s < plan.recompute_s:
            best = replace(other, bound_s=min(bound_s, other.recompute_s))
    return best


def _plan_of(graph: OpGraph, again: Iterable[int], *, limit: int, bound_s: float, solver: str) -> HoldPlan:
    held = _held_with(graph, again)
    cost = evaluate_held(graph, held=held)
    return HoldPlan(
        held=held,
        recomputed=cost.recomputed,
        limit_bytes=limit,
        held_bytes=cost.held_bytes,
        recompute_s=cost.recompute_s,
        bound_s=bound_s,
        solver=solver,
    )


def _held_with(graph: OpGraph, again: Iterable[int]) -> tuple[int, ...]:
    """The values that must be held if these operations run again: what is read and not made by them."""
    operations = [graph.operations[index] for index in again]
    wanted = set(graph.needed).union(*(op.inputs for op in operations))
    made = {value for op in operations for value in op.outputs}
    return tuple(sorted(wanted - made - set(graph.resident)))


def _chosen_of(
    cut: PricedCut, graph: OpGraph, again: Iterable[int]
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """The nodes of a set of replays: the operations, and the values that these read."""
    num_ops = len(graph.operations)
    rerun = set(again)
    inside = rerun | {num_ops + value for index in rerun for value in graph.operations[index].inputs}
    return np.array([node in inside for node in cut.nodes.tolist()], dtype=bool)
