"""Ordered graphs under a peak limit, values recomputed as often as it pays: Checkmate's problem.

From quick to exact, each step with the best so far in hand:

1. ``first``: the offline next-use greedy (``greedy``), pruned (``prune``); for graphs up to 400
   operations, and where it finds nothing, also peak shaving (``shave``), which is better on wide graphs;
2. ``search``: both again with random weights, and for graphs up to 400 operations annealing over orders
   (``search``);
3. ``exact``: for graphs up to 128 operations Checkmate's integer program on HiGHS (``milp``), cut off
   at the best so far, until it proves it or improves on it.

Two lower bounds come with every plan: one for every schedule (``bound``) and one for staged schedules,
the class of the integer program. The work of each step is counted, not timed, so that the same input gives
the same plan; only where the time limit cuts a step short can the plan depend on the machine.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from recoup.errors import BudgetError, GraphError
from recoup.planning.checks import check_seconds
from recoup.planning.graphs import Compute, Drop, OrderedGraph, actions_of, simulate_actions
from recoup.planning.graphs.dag.bound import gap_bound_s
from recoup.planning.graphs.dag.greedy import Weights, greedy_order
from recoup.planning.graphs.dag.milp import solve_staged
from recoup.planning.graphs.dag.prune import pruned_order
from recoup.planning.graphs.dag.search import Cooling, annealed_order
from recoup.planning.graphs.dag.shave import shaved_order
from recoup.sizes import format_bytes, parse_bytes

__all__ = ["DagPlan", "Effort", "dag_frontier", "minimum_dag_budget", "solve_dag"]

Effort = Literal["first", "search", "exact"]

_EFFORTS = ("first", "search", "exact")
_MAX_ANNEALED, _MAX_EXACT = 400, 128
_MAX_SHAVED = 400
_NUM_FIRST_TRIES, _NUM_PROBE_TRIES = 12, 4
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class DagPlan:
    """A schedule of an ordered graph within a budget, with proof of how good it is.

    Attributes:
        graph: the graph that it runs.
        order: the operations in the order in which they are computed, repeats included.
        budget_bytes: the limit that it was made for.
        peak_bytes: its simulated peak.
        compute_s: its simulated seconds.
        bound_s: no schedule at all within the budget takes fewer seconds.
        staged_bound_s: no staged schedule (see ``milp``) within the budget takes fewer seconds.
        solver: the step that found it: "plain", "greedy", "shave", "search" or "program".
    """

    graph: OrderedGraph
    order: tuple[int, ...]
    budget_bytes: int
    peak_bytes: int
    compute_s: float
    bound_s: float
    staged_bound_s: float
    solver: str

    @property
    def actions(self) -> tuple[Compute | Drop, ...]:
        """The schedule with its drops."""
        return actions_of(self.graph, self.order)

    @property
    def gap(self) -> float:
        """How far the seconds can lie above the best staged schedule, as a share of its bound."""
        return max(0.0, self.compute_s - self.staged_bound_s) / (self.staged_bound_s or 1.0)

    @property
    def claim(self) -> str:
        """What is proven, in words."""
        if self.compute_s <= self.bound_s * (1 + _TOLERANCE):
            return "optimal among all schedules"
        if self.compute_s < self.staged_bound_s * (1 - _TOLERANCE):
            return "cheaper than every staged schedule"
        if self.compute_s <= self.staged_bound_s * (1 + _TOLERANCE):
            return "optimal among staged schedules"
        return f"at most {self.gap:.2%} above the best staged schedule"

    def __str__(self) -> str:
        repeats = len(self.order) - len(self.graph)
        return (
            f"{self.compute_s:g} s ({repeats} repeats), peak {format_bytes(self.peak_bytes)} of "
            f"{format_bytes(self.budget_bytes)}; {self.claim} ({self.solver})"
        )


def solve_dag(
    graph: OrderedGraph,
    *,
    budget_bytes: int | str,
    effort: Effort = "exact",
    time_limit_s: float = 10.0,
    seed: int = 0,
) -> DagPlan:
    """Finds a schedule with few seconds whose peak stays within the budget.

    Args:
        graph: operations in their fixed order.
        budget_bytes: limit on the live bytes of the graph's values; a number or text such as "8GiB".
        effort: "first" for a plan at once, "search" for a good one, "exact" for a proven one where possible.
        time_limit_s: seconds after which the best so far is returned. A first plan is always made.
        seed: of the random restarts and the annealing.

    Raises:
        BudgetError: if no schedule was found; it names the smallest budget for which one was.

    >>> graph = OrderedGraph((4, 4, 2, 1), (1.0, 3.0, 1.0, 1.0), ((), (), (1,), (0, 2)))
    >>> print(solve_dag(graph, budget_bytes=8))
    7 s (1 repeats), peak 7 B of 8 B; optimal among all schedules (greedy)
    """
    if effort not in _EFFORTS:
        raise GraphError(f"effort must be one of {', '.join(_EFFORTS)}; got {effort!r}.")
    check_seconds("solve_dag", error=GraphError, time_limit_s=time_limit_s)
    budget = parse_bytes(budget_bytes)
    search = _Search(graph, budget=budget, seed=seed, deadline=time.perf_counter() + time_limit_s)
    search.offer(range(len(graph)), "plain")
    if search.order is None and graph.floor_bytes <= budget:
        search.run(effort)
    if search.order is None:
        raise _budget_error(graph, budget, seed=seed)
    return search.plan()


def dag_frontier(
    graph: OrderedGraph,
    *,
    budgets_bytes: Iterable[int | str],
    effort: Effort = "search",
    time_limit_s: float = 10.0,
    seed: int = 0,
) -> tuple[DagPlan, ...]:
    """Plans for several budgets, ascending; more bytes never cost more seconds.

    A plan for fewer bytes also serves a larger budget, so the better of the two is taken. Budgets for which
    no schedule was found are left out. The time limit is for each budget.

    >>> graph = OrderedGraph((4, 4, 2, 1), (1.0, 3.0, 1.0, 1.0), ((), (), (1,), (0, 2)))
    >>> [(plan.budget_bytes, plan.compute_s) for plan in dag_frontier(graph, budgets_bytes=[10, 6, 8])]
    [(8, 7.0), (10, 6.0)]
    """
    plans: list[DagPlan] = []
    floor = graph.floor_bytes
    for budget in sorted({parse_bytes(size) for size in budgets_bytes}):
        if budget < floor:
            continue
        try:
            plan = solve_dag(graph, budget_bytes=budget, effort=effort, time_limit_s=time_limit_s, seed=seed)
        except BudgetError:
            continue
        if plans and plans[-1].compute_s < plan.compute_s:
            bounds = (plan.bound_s, plan.staged_bound_s)
            plan = replace(plans[-1], budget_bytes=budget, bound_s=bounds[0], staged_bound_s=bounds[1])
        plans.append(plan)
    return tuple(plans)


def minimum_dag_budget(graph: OrderedGraph, *, seed: int = 0) -> int:
    """Returns the smallest budget for which a schedule was found, at least the graph's ``floor_bytes``.

    It is the true minimum where it equals the floor; elsewhere a smaller one may exist.

    >>> minimum_dag_budget(OrderedGraph((4, 4, 2, 1), (1.0, 3.0, 1.0, 1.0), ((), (), (1,), (0, 2))))
    7
    """
    return _smallest(graph, seed=seed)[0]


class _Search:
    """The best order so far, and the steps that look for a better one."""

    def __init__(self, graph: OrderedGraph, *, budget: int, seed: int, deadline: float) -> None:
        self._graph, self._budget, self._seed, self._deadline = graph, budget, seed, deadline
        self.order: tuple[int, ...] | None = None
        self._compute_s, self._peak_bytes, self._solver = math.inf, 0, ""
        self._bound_s = self._staged_bound_s = graph.plain_s

    def offer(self, order: Iterable[int] | None, solver: str) -> None:
        """Takes an order if its simulation is within the budget and cheaper than the best so far."""
        if order is None:
            return
        steps = tuple(order)
        cost = simulate_actions(self._graph, actions_of(self._graph, steps))
        if cost.peak_bytes <= self._budget and cost.compute_s < self._compute_s:
            self.order, self._solver = steps, solver
            self._compute_s, self._peak_bytes = cost.compute_s, cost.peak_bytes

    def run(self, effort: Effort) -> None:
        """Runs the steps that the effort names, until the best is proven or the time is over."""
        for index, weights in zip(range(_NUM_FIRST_TRIES), _weights(self._seed), strict=False):
            if self.order is None or (index == 1 and len(self._graph) <= _MAX_SHAVED):
                self._try(index, weights)
        if self.order is None:
            self.offer(_smallest(self._graph, seed=self._seed)[1], "greedy")
        self._bound_s = gap_bound_s(self._graph, budget_bytes=self._budget, time_limit_s=self._left_s())
        if effort == "first" or self._is_proven():
            return
        self._restart()
        self._anneal()
        if effort == "exact" and len(self._graph) <= _MAX_EXACT and not self._is_proven():
            answer = solve_staged(
                self._graph, budget_bytes=self._budget, known_s=self._compute_s, time_limit_s=self._left_s()
            )
            self._staged_bound_s = answer.bound_s
            if answer.order is not None:
                self.offer(pruned_order(self._graph, answer.order, budget_bytes=self._budget), "program")

    def plan(self) -> DagPlan:
        """The best so far as a value."""
        assert self.order is not None
        # A bound cannot pass what a schedule of its class attains; the solvers' tolerances may.
        bound_s = min(self._bound_s, self._compute_s)
        return DagPlan(
            graph=self._graph,
            order=self.order,
            budget_bytes=self._budget,
            peak_bytes=self._peak_bytes,
            compute_s=self._compute_s,
            bound_s=bound_s,
            staged_bound_s=max(bound_s, self._staged_bound_s),
            solver=self._solver,
        )

    def _restart(self) -> None:
        num_restarts = min(120, max(4, 12_000 // len(self._graph)))
        for index, weights in enumerate(_weights(self._seed)):
            if index == num_restarts or self._left_s() <= 0 or self._is_proven():
                return
            # On graphs this long one shaving takes seconds: only a first plan may need it.
            if len(self._graph) <= 4 * _MAX_SHAVED or not _is_shaving(self._graph, index):
                self._try(index, weights)

    def _anneal(self) -> None:
        size = len(self._graph)
        if size > _MAX_ANNEALED:
            return
        for index, (price, hot) in enumerate(((1.0, 0.5), (0.3, 0.5), (3.0, 0.5), (3.0, 5.0))):
            # A price and a heat that force feasibility, only where those that cost less found nothing.
            if self._left_s() <= 0 or self._is_proven() or (index >= 2 and self.order is not None):
                return
            num_moves = min(2_000 * size, 3_000_000 // size)
            cooling = Cooling(num_moves=num_moves, price=price, hot=hot, seed=self._seed + index)
            order = annealed_order(self._graph, budget_bytes=self._budget, start=range(size), cooling=cooling)
            if order is not None:
                self.offer(pruned_order(self._graph, order, budget_bytes=self._budget), "search")

    def _try(self, index: int, weights: Weights) -> None:
        order = _attempt(self._graph, self._budget, index=index, weights=weights)
        if order is not None:
            solver = "shave" if _is_shaving(self._graph, index) else "greedy"
            self.offer(pruned_order(self._graph, order, budget_bytes=self._budget), solver)

    def _left_s(self) -> float:
        return max(0.0, self._deadline - time.perf_counter())

    def _is_proven(self) -> bool:
        return self._compute_s <= self._bound_s * (1 + _TOLERANCE)


def _weights(seed: int) -> Iterator[Weights]:
    """The plain rule first, then random exponents without end."""
    yield Weights()
    rng = random.Random(seed)
    while True:
        seconds, size, distance = (2 * rng.random() for _ in range(3))
        shuffle_seed = rng.randrange(2**31) if rng.random() < 0.5 else None
        yield Weights(seconds, size, distance, looks_ahead=rng.random() < 0.5, shuffle_seed=shuffle_seed)


def _is_shaving(graph: OrderedGraph, index: int) -> bool:
    # Its work grows with the square of the length, so long graphs see it less often.
    if len(graph) <= _MAX_SHAVED:
        return index % 2 == 1
    return index % 8 == 1 and len(graph) <= 8 * _MAX_SHAVED


def _attempt(graph: OrderedGraph, budget: int, *, index: int, weights: Weights) -> list[int] | None:
    """The greedy and, on graphs that are not too long for it, shaving in turn; the plain rules first."""
    if not _is_shaving(graph, index):
        return greedy_order(graph, budget_bytes=budget, weights=weights)
    if index == 1:
        return shaved_order(graph, budget_bytes=budget)
    return shaved_order(graph, budget_bytes=budget, seconds_power=weights.seconds, seed=index)


def _smallest(graph: OrderedGraph, *, seed: int) -> tuple[int, tuple[int, ...]]:
    """Bisects for the smallest peak that greedy walks, then short annealings, reach."""
    low, high = graph.floor_bytes, graph.plain_peak_bytes
    best = tuple(range(len(graph)))
    num_probes = 20
    for attempt in (_walked, _annealed) if len(graph) <= _MAX_ANNEALED else (_walked,):
        while low < high and num_probes:
            num_probes -= 1
            middle = (low + high) // 2
            order = attempt(graph, middle, seed)
            if order is None:
                low = middle + 1
            else:
                best = tuple(order)
                # A walk keeps what it may; its order alone may need less.
                high = min(middle, simulate_actions(graph, actions_of(graph, order)).peak_bytes)
        low, num_probes = graph.floor_bytes, 6
    return high, best


def _walked(graph: OrderedGraph, budget: int, seed: int) -> list[int] | None:
    for index, weights in zip(range(_NUM_PROBE_TRIES), _weights(seed), strict=False):
        order = _attempt(graph, budget, index=index, weights=weights)
        if order is not None:
            return order
    return None


def _annealed(graph: OrderedGraph, budget: int, seed: int) -> list[int] | None:
    cooling = Cooling(num_moves=600_000 // max(len(graph), 50), price=3.0, seed=seed)
    return annealed_order(graph, budget_bytes=budget, start=range(len(graph)), cooling=cooling)


def _budget_error(graph: OrderedGraph, budget: int, *, seed: int) -> BudgetError:
    least, order = _smallest(graph, seed=seed)
    cause = simulate_actions(graph, actions_of(graph, order)).peak_op
    return BudgetError(
        f"No schedule found within {format_bytes(budget)} ({budget} bytes). Smallest budget with a schedule: "
        f"{least} bytes, set by operation {cause}; no budget below {graph.floor_bytes} bytes can work.",
        budget_bytes=budget,
        smallest_bytes=least,
        unit=str(cause),
    )
