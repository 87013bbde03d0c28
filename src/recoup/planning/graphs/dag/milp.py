"""Checkmate's integer program for ordered graphs, on HiGHS: the certificate for small graphs.

Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020, section
4. Stage ``t`` ends with the first computation of operation ``t``. Before it, in the same stage, earlier
operations may run again, each at most once and in graph order. ``R[t,i]``: operation i runs again in stage t;
``S[t,i]``: value i is there when stage t begins.

    R[t,j] <= R[t,i] + S[t,i]            for every input i of j          (eq. 1b)
    S[t,i] <= R[t-1,i] + S[t-1,i]                                        (eq. 1c)

**Staged schedules** are those of this program. Schedules outside it (an operation run twice in one stage, or
recomputed out of graph order) may be cheaper still; what is proven here is proven among staged ones.

Departures from the paper:

* Memory. The paper counts freed bytes by products of variables. Here ``L[t,i,k]`` says that value i is
  there when slot k of stage t runs: it must be if some reader j >= k runs in the stage or if stage t+1
  begins with it, ``L[t,i,k] >= R[t,j]``, ``L[t,i,k] >= S[t+1,i]``, one variable per reader, each bounding
  the one before. Before slot i itself, the value is there iff the stage began with it and does not compute
  it: ``R[t,i] + S[t,i] <= 1`` loses nothing, because computing what is there is never needed.
* A known cost bounds the search: the recomputations together may not cost more, and an operation that costs
  more alone gets no variables. On the three test graphs this makes minutes into seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from recoup.planning.graphs import OrderedGraph
from recoup.planning.graphs.dag.greedy import consumers_of
from recoup.planning.program import Program

__all__ = ["StagedAnswer", "solve_staged"]

_ALWAYS = -1
_SLACK = 1e-6


@dataclass(frozen=True)
class StagedAnswer:
    """What the program proved about staged schedules within its limits.

    Attributes:
        order: the cheapest staged order found, or None if none at most as dear as the known cost was found.
        bound_s: no staged schedule within the budget takes fewer seconds.
    """

    order: tuple[int, ...] | None
    bound_s: float


def solve_staged(
    graph: OrderedGraph, *, budget_bytes: int, known_s: float = math.inf, time_limit_s: float = 60.0
) -> StagedAnswer:
    """Looks for the cheapest staged schedule that takes at most ``known_s`` seconds.

    The order may pass the budget by what HiGHS's tolerance allows: simulate before use.

    >>> graph = OrderedGraph((4, 4, 2, 1), (1.0, 3.0, 1.0, 1.0), ((), (), (1,), (0, 2)))
    >>> solve_staged(graph, budget_bytes=8)
    StagedAnswer(order=(0, 1, 2, 0, 3), bound_s=7.0)
    >>> solve_staged(graph, budget_bytes=6)
    StagedAnswer(order=None, bound_s=inf)
    """
    builder = _Builder(graph, budget_bytes=budget_bytes, spare_s=known_s - graph.plain_s)
    if not builder.is_possible:
        return StagedAnswer(order=None, bound_s=math.inf)
    solution = builder.program.solve(time_limit_s=time_limit_s, cutoff=builder.cutoff)
    if solution.is_infeasible:
        # Nothing at most as dear as the known cost: that cost is itself the bound.
        return StagedAnswer(order=None, bound_s=known_s)
    bound_s = graph.plain_s + max(0.0, solution.bound) * builder.unit_s
    if solution.values is None:
        return StagedAnswer(order=None, bound_s=bound_s)
    order: list[int] = []
    for stage in range(len(graph)):
        order.extend(
            op
            for op in range(stage)
            if (stage, op) in builder.again and solution.values[builder.again[stage, op]] > 0.5
        )
        order.append(stage)
    return StagedAnswer(order=tuple(order), bound_s=bound_s)


class _Builder:
    """Writes the program down, one stage after the other."""

    def __init__(self, graph: OrderedGraph, *, budget_bytes: int, spare_s: float) -> None:
        self.program = Program()
        self.again: dict[tuple[int, int], int] = {}
        self.unit_s = max(graph.compute_s, default=0.0) or 1.0
        self._unit_bytes = max(graph.value_bytes, default=0) or 1
        self._graph, self._budget_bytes = graph, budget_bytes
        self._consumers = consumers_of(graph)
        self._there: dict[tuple[int, int], int] = {}
        self.is_possible = graph.floor_bytes <= budget_bytes
        if not self.is_possible:
            return
        self.cutoff = spare_s / self.unit_s * (1 + _SLACK) + _SLACK
        for stage in range(len(graph)):
            for op in range(stage):
                self._there[stage, op] = self.program.column()
                if graph.compute_s[op] / self.unit_s <= self.cutoff:
                    self.again[stage, op] = self.program.column(cost=graph.compute_s[op] / self.unit_s)
        for stage in range(len(graph)):
            self._add_flow(stage)
            self._add_memory(stage)

    def _runs(self, stage: int) -> list[int]:
        return [op for op in range(stage) if (stage, op) in self.again] + [stage]

    def _add_flow(self, stage: int) -> None:
        """Inputs must be there (1b); what a stage begins with was there before (1c)."""
        again, there = self.again, self._there
        for op in self._runs(stage):
            for value in self._graph.inputs[op]:
                terms = [(there[stage, value], 1.0)]
                if (stage, value) in again:
                    terms.append((again[stage, value], 1.0))
                if op != stage:
                    terms.append((again[stage, op], -1.0))
                self.program.row(terms, lower=1.0 if op == stage else 0.0)
        for op in range(stage):
            if (stage, op) in again:
                self.program.row([(again[stage, op], 1.0), (there[stage, op], 1.0)], upper=1.0)
            if op < stage - 1:
                terms = [(there[stage, op], -1.0), (there[stage - 1, op], 1.0)]
                if (stage - 1, op) in again:
                    terms.append((again[stage - 1, op], 1.0))
                self.program.row(terms, lower=0.0)

    def _tail(self, stage: int, value: int) -> list[tuple[int, int]]:
        """Pairs (reader, column): the column is 1 if the value must be there when that reader's slot comes.

        The last pair stands for all slots behind the last reader.
        """
        column = self._there.get((stage + 1, value))
        pairs = [] if column is None else [(len(self._graph), column)]
        for reader in reversed(self._consumers[value]):
            if reader == stage:
                column = _ALWAYS
            elif reader > stage or (stage, reader) not in self.again:
                continue
            elif column is None:
                column = self.again[stage, reader]
            elif column != _ALWAYS:
                joint = self.program.column(is_binary=False)
                for below in (column, self.again[stage, reader]):
                    self.program.row([(joint, 1.0), (below, -1.0)], lower=0.0)
                column = joint
            pairs.append((reader, column))
        return pairs[::-1]

    def _add_memory(self, stage: int) -> None:
        tails = [self._tail(stage, value) for value in range(stage + 1)]
        for slot in self._runs(stage):
            free = self._budget_bytes
            sizes: dict[int, int] = {}
            if slot == stage:
                free -= self._graph.value_bytes[slot]
            else:
                sizes[self.again[stage, slot]] = self._graph.value_bytes[slot]
            for value in range(stage + 1):
                size = self._graph.value_bytes[value]
                if value == slot or size == 0:
                    continue
                if value > slot:
                    column = self._there.get((stage, value))
                else:
                    column = next((column for reader, column in tails[value] if reader >= slot), None)
                if column == _ALWAYS:
                    free -= size
                elif column is not None:
                    sizes[column] = sizes.get(column, 0) + size
            if sum(sizes.values()) > free:
                terms = [(column, size / self._unit_bytes) for column, size in sizes.items()]
                self.program.row(terms, upper=free / self._unit_bytes)
