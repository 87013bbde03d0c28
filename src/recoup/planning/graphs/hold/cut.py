"""Minimum cuts in exact integers of any size, on scipy's 32-bit maximum flow.

NOTE [ Exact flow in digits ]
scipy's maximum flow wraps capacities to 32 bits without a word, and capacities here are products of bytes and
nanoseconds. So the flow is found digit by digit (capacity scaling: Gabow, "Scaling algorithms for network
problems", JCSS 1985):
 1. Shift all capacities right until what leaves the source sums to less than 2**30. No flow is larger, so any
    capacity may be cut down to 2**30.
 2. Given a maximum flow of the capacities shifted by k, double it d times: it fits the capacities shifted by
    k - d. The cut that was full gains less than 2**d per edge, so what is missing is less than edges * 2**d;
    residual capacities may be cut down to that, and d is chosen so that it is less than 2**30.
 3. At shift 0 the flow is exact. It is proven by the cut that it fills.
 4. Where the network consists of parts without an edge between them, "what leaves the source" and "edges"
    are those of the largest part: flows of different parts never meet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recoup.planning.lazy import LazyModule

sparse: Any = LazyModule("scipy.sparse")
csgraph: Any = LazyModule("scipy.sparse.csgraph")

__all__ = ["Network", "NodeSet"]

NodeSet = NDArray[np.bool_]
Indices = NDArray[np.int32]

_LIMIT = 2**30


@dataclass(frozen=True, eq=False)
class Network:
    """A network's edges; node ``num_nodes`` is the source, the next the sink.

    Capacities come with each question: the same edges are asked about for many prices.

    Attributes:
        num_nodes: nodes beside source and sink.
        tails: the node where each edge begins; at most one edge runs from a node to another.
        heads: the node where it ends.
        part: a number for each node; edges join nodes of one part only, or source and sink.
    """

    num_nodes: int
    tails: Indices
    heads: Indices
    part: Indices

    @property
    def source(self) -> int:
        """The node that flow leaves."""
        return self.num_nodes

    @property
    def sink(self) -> int:
        """The node that flow reaches."""
        return self.num_nodes + 1

    def smallest_cut(self, capacities: NDArray[Any]) -> NodeSet:
        """The source's side of the minimum cut that has the fewest nodes there; capacities of any size.

        >>> edges = np.array([[2, 0], [0, 1], [1, 3]], dtype=np.int32)
        >>> network = Network(2, edges[:, 0], edges[:, 1], np.zeros(2, np.int32))
        >>> network.smallest_cut(np.array([2**80, 2**70, 2**75], dtype=object))
        array([ True, False])
        """
        flow = self._exact_flow(capacities)
        return self._reached(capacities - flow, flow, from_source=True)

    def largest_cut(self, capacities: NDArray[Any]) -> NodeSet:
        """The source's side of the minimum cut that has the most nodes there."""
        flow = self._exact_flow(capacities)
        return ~self._reached(capacities - flow, flow, from_source=False)

    def _exact_flow(self, capacities: NDArray[Any]) -> NDArray[Any]:
        """A maximum flow along the edges; see NOTE [ Exact flow in digits ]."""
        if not self.num_nodes:
            return capacities
        is_first = self.tails == self.source
        leaving = np.zeros(int(self.part.max()) + 1, dtype=capacities.dtype)
        np.add.at(leaving, self.part[self.heads[is_first]], capacities[is_first])
        owner = self.part[np.where(is_first, self.heads, self.tails)]
        shift = max(0, int(leaving.max()).bit_length() - 30)
        step = 30 - int(np.bincount(owner).max()).bit_length()
        layout = _Layout(self)
        flow = layout.push(capacities >> shift, np.zeros_like(capacities))
        while shift:
            digits = min(step, shift)
            shift -= digits
            flow = flow << digits
            flow = flow + layout.push((capacities >> shift) - flow, flow)
        return flow

    def _reached(self, forward: NDArray[Any], backward: NDArray[Any], *, from_source: bool) -> NodeSet:
        """Nodes that the source reaches, or that reach the sink, where capacity is left."""
        ahead, back = (forward > 0).astype(bool), (backward > 0).astype(bool)
        tails = np.concatenate([self.tails[ahead], self.heads[back]])
        heads = np.concatenate([self.heads[ahead], self.tails[back]])
        size = self.num_nodes + 2
        if not from_source:
            tails, heads = heads, tails
        start = self.source if from_source else self.sink
        links = sparse.csr_array((np.ones(len(tails), dtype=np.int8), (tails, heads)), shape=(size, size))
        reached = np.zeros(size, dtype=bool)
        reached[csgraph.breadth_first_order(links, start, return_predecessors=False)] = True
        return reached[: self.num_nodes]


class _Layout:
    """The compressed rows of a network with an entry for both directions of every edge."""

    def __init__(self, network: Network) -> None:
        size = network.num_nodes + 2
        self._network = network
        rows = np.concatenate([network.tails, network.heads])
        columns = np.concatenate([network.heads, network.tails])
        # Stable, so that scipy finds rows and columns sorted and keeps our order of entries.
        self._order = np.lexsort((columns, rows))
        self._starts = np.zeros(size + 1, dtype=np.int32)
        self._starts[1:] = np.cumsum(np.bincount(rows, minlength=size))
        self._columns = columns[self._order].astype(np.int32)
        self._shape = (size, size)

    def push(self, forward: NDArray[Any], backward: NDArray[Any]) -> NDArray[Any]:
        """A maximum flow where this much capacity is left each way; nets both directions of an edge."""
        both = np.minimum(np.concatenate([forward, backward]), _LIMIT).astype(np.int32)
        matrix = sparse.csr_array((both[self._order], self._columns, self._starts), shape=self._shape)
        result = csgraph.maximum_flow(matrix, self._network.source, self._network.sink).flow
        entries = np.empty(len(both), dtype=np.int64)
        entries[self._order] = result.data
        return entries[: len(forward)].astype(forward.dtype)
