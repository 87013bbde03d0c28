"""What to recompute, written as a family of cuts with a price on held bytes.

NOTE [ Hold or recompute as a cut ]
Let ``r[o] = 1`` if operation o runs again, ``q[v] = 1`` if value v must be there in the backward. Needed
values have q = 1; ``r[o] <= q[u]`` for every input u of o, since a replay reads its inputs. A value that
must be there is held unless its maker runs again, so at a price of p seconds a byte the cost is

    sum over o of seconds[o] * r[o]  +  p * sum over v of bytes[v] * q[v] * (1 - r[maker of v])

1. Each term is a cut's edge (source side = 1): ``o -> sink`` with the seconds, ``q[v] -> maker`` with p *
   bytes, and an endless edge ``o -> q[u]``; ``source -> q[v]`` is endless for needed v, so that such v need
   no node: the edge becomes ``source -> maker``. A value that cannot be recomputed pays at
   ``q[v] -> sink``. Resident values pay nothing and need no node.
2. Every finite cut names a set of replays closed under what replays read; holding the values with q = 1
   whose maker does not run is a legal hold set of exactly the cut's bytes and seconds. Conversely a hold
   set and the replays that it forces (``evaluate_held``) give a cut that costs no more. So the minimum cut
   is the minimum over all hold sets. An operation is one node however many read it: it is charged once;
   chains are charged in full, because each replay asks for its own inputs.
3. Minimum cuts over all prices p are exactly the corners of the lower convex hull of seconds against bytes.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, has the problem; min-cut
rematerialisation is due to functorch's ``min_cut_rematerialization_partition`` (He and Yu, "Transcending
runtime-memory tradeoffs in checkpointing by being fusion aware", MLSys 2023). There, a node has one split
edge with its bytes and operations judged too dear are banned from recomputation; here seconds and bytes are
traded at every price, in exact integers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recoup.planning.graphs import OpGraph
from recoup.planning.graphs.hold.cut import Indices, Network, NodeSet
from recoup.planning.lazy import LazyModule

sparse: Any = LazyModule("scipy.sparse")
csgraph: Any = LazyModule("scipy.sparse.csgraph")

__all__ = ["Amounts", "PricedCut", "priced_cut"]

Amounts = NDArray[np.int64]
Prices = NDArray[Any]


@dataclass(frozen=True, eq=False)
class PricedCut:
    """Undecided nodes of the cut with their terms; see NOTE [ Hold or recompute as a cut ].

    Several independent parts, each with its own price, lie side by side, so that one flow serves them all.

    Attributes:
        nodes: number of each node in the whole problem: operations first, values behind.
        part: the part that each node belongs to; no edge joins two parts.
        left_bytes: bytes paid if the node is on the sink's side (needed values of an operation).
        right_bytes: bytes paid if it is on the source's side (values that can only be held).
        right_ns: nanoseconds paid if it is on the source's side.
        pairs: ``(value, operation)`` rows: bytes are paid if the value is wanted and the operation does not
            run.
        pair_bytes: those bytes.
        wants: ``(operation, value)`` rows: if the operation runs, the value is wanted.
    """

    nodes: Indices
    part: Indices
    left_bytes: Amounts
    right_bytes: Amounts
    right_ns: Amounts
    pairs: Indices
    pair_bytes: Amounts
    wants: Indices

    def costs(self, chosen: NodeSet, *, num_parts: int) -> tuple[Amounts, Amounts]:
        """Bytes and nanoseconds of a closed set of nodes in each part, up to what is already decided."""
        size, nanoseconds = np.zeros(num_parts, np.int64), np.zeros(num_parts, np.int64)
        split = chosen[self.pairs[:, 0]] & ~chosen[self.pairs[:, 1]]
        np.add.at(size, self.part, np.where(chosen, self.right_bytes, self.left_bytes))
        np.add.at(size, self.part[self.pairs[split, 0]], self.pair_bytes[split])
        np.add.at(nanoseconds, self.part[chosen], self.right_ns[chosen])
        return size, nanoseconds

    def best(self, nums: Prices, dens: Prices) -> NodeSet:
        """The smallest best set when part k pays ``nums[k] / dens[k]`` nanoseconds a byte."""
        num, den = nums[self.part], dens[self.part]
        pair_num = num[self.pairs[:, 0]]
        largest = (
            ((self.left_bytes + self.right_bytes).astype(float) * num.astype(float)).sum()
            + (self.right_ns.astype(float) * den.astype(float)).sum()
            + (self.pair_bytes.astype(float) * pair_num.astype(float)).sum()
        )
        dtype: Any = object if largest >= 2.0**61 else np.int64
        num, den, pair_num = num.astype(dtype), den.astype(dtype), pair_num.astype(dtype)
        left = self.left_bytes.astype(dtype) * num
        right = self.right_bytes.astype(dtype) * num + self.right_ns.astype(dtype) * den
        capacities = self._capacities(left, right, self.pair_bytes.astype(dtype) * pair_num)
        return self._network().smallest_cut(capacities)

    def narrowed(self, lows: NDArray[np.float64], highs: NDArray[np.float64]) -> tuple[NodeSet, NodeSet]:
        """Nodes that are in every best set at every price between their part's two, and nodes in some.

        A cost that charges *more* for being in the set, whatever else is in it, has a smallest best set
        that is part of every best set of the true cost: adding it can only gain (submodularity). Write
        w = price * bytes and take e <= w <= f at every price of the range. Then a pair's ``w * q * (1 - r)``
        becomes ``e * q * (1 - r) + (f - e) * q``, ``w * (1 - r)`` becomes ``e * (1 - r)``, and what is paid
        on the source's side is taken at the high price. All are rounded in that direction, so 30 bits are
        enough. The other bound is the same with the directions exchanged; there a pair pays
        ``f * q * (1 - r) - (f - e) * q``.
        """
        floor, ceil = lows * (1 - 1e-9), highs * (1 + 1e-9)
        value = self.pairs[:, 0]
        # Each part is scaled so that less than 2**28 leaves the source: what is cut down to 2**29 has no end.
        entering = self.left_bytes * ceil[self.part] + np.bincount(
            value, self.pair_bytes * (ceil - floor)[self.part[value]], minlength=len(self.nodes)
        )
        total = np.bincount(self.part, entering, minlength=len(lows))
        scale = np.divide(2.0**28, total, out=np.ones_like(total), where=total > 0)
        at_node, at_pair = scale[self.part], scale[self.part[value]]
        low, high = floor[self.part], ceil[self.part]
        seconds = self.right_ns.astype(np.float64)
        pair_low = _down(self.pair_bytes * low[value] * at_pair)
        pair_high = _up(self.pair_bytes * high[value] * at_pair)
        # From the bytes, not from the rounded ends: these may both have been cut down to the limit.
        spread = np.zeros(len(self.nodes), np.int64)
        np.add.at(spread, value, _up(self.pair_bytes * (high - low)[value] * at_pair) + 2)
        network = self._network()
        right = _up((self.right_bytes * high + seconds * (1 + 1e-9)) * at_node)
        sure = self._capacities(_down(self.left_bytes * low * at_node), right + spread, pair_low)
        right = _down((self.right_bytes * low + seconds * (1 - 1e-9)) * at_node)
        maybe = self._capacities(_up(self.left_bytes * high * at_node) + spread, right, pair_high)
        return network.smallest_cut(sure), network.largest_cut(maybe)

    def without(self, sure: NodeSet, maybe: NodeSet) -> PricedCut:
        """What is left to decide once ``sure`` is in and everything outside ``maybe`` is out."""
        open_ = maybe & ~sure
        left, right = self.left_bytes.copy(), self.right_bytes.copy()
        value, op = self.pairs[:, 0], self.pairs[:, 1]
        forced = sure[value] & open_[op]
        np.add.at(left, op[forced], self.pair_bytes[forced])
        barred = open_[value] & ~maybe[op]
        np.add.at(right, value[barred], self.pair_bytes[barred])
        number = np.cumsum(open_, dtype=np.int32) - 1
        inner = open_[value] & open_[op]
        wants = open_[self.wants[:, 0]] & open_[self.wants[:, 1]]
        return PricedCut(
            nodes=self.nodes[open_],
            part=self.part[open_],
            left_bytes=left[open_],
            right_bytes=right[open_],
            right_ns=self.right_ns[open_],
            pairs=number[self.pairs[inner]],
            pair_bytes=self.pair_bytes[inner],
            wants=number[self.wants[wants]],
        )

    def taken_apart(self) -> tuple[PricedCut, Indices]:
        """The same nodes with a part for each connected component, and the old part of each new one."""
        size = len(self.nodes)
        ends = np.concatenate([self.pairs, self.wants])
        links = sparse.coo_array((np.ones(len(ends), np.int8), (ends[:, 0], ends[:, 1])), shape=(size, size))
        num_parts, part = csgraph.connected_components(links, directed=False)
        former = np.zeros(num_parts, np.int32)
        former[part] = self.part
        return replace(self, part=part.astype(np.int32)), former

    def twice(self, *, num_parts: int) -> PricedCut:
        """The same nodes two times side by side; the second ones' parts are numbered on from ``num_parts``."""
        size = len(self.nodes)
        shifts = {"part": num_parts, "pairs": size, "wants": size}
        columns = {item.name: getattr(self, item.name) for item in fields(self)}
        return PricedCut(
            **{
                name: np.concatenate([column, column + column.dtype.type(shifts.get(name, 0))])
                for name, column in columns.items()
            }
        )

    def _network(self) -> Network:
        size = len(self.nodes)
        every = np.arange(size, dtype=np.int32)
        source, sink = np.full(size, size, np.int32), np.full(size, size + 1, np.int32)
        # One edge a row; the order is that of _capacities.
        tails = np.concatenate([source, every, self.pairs[:, 0], self.wants[:, 0]])
        heads = np.concatenate([every, sink, self.pairs[:, 1], self.wants[:, 1]])
        return Network(size, tails, heads, self.part)

    def _capacities(self, left: NDArray[Any], right: NDArray[Any], pairs: NDArray[Any]) -> NDArray[Any]:
        endless = left.sum() + 1
        wants = np.full(len(self.wants), endless, dtype=left.dtype)
        return np.concatenate([left, right, pairs, wants])


def _down(values: NDArray[np.float64]) -> Amounts:
    return np.floor(np.minimum(values, 2.0**29)).astype(np.int64)


def _up(values: NDArray[np.float64]) -> Amounts:
    return np.ceil(np.minimum(values, 2.0**29)).astype(np.int64)


def priced_cut(graph: OpGraph) -> PricedCut:
    """Writes the whole problem down."""
    resident, needed = set(graph.resident), set(graph.needed) - set(graph.resident)
    num_ops = len(graph.operations)
    maker = {value: index for index, op in enumerate(graph.operations) for value in op.outputs}
    open_ops = {index for index, op in enumerate(graph.operations) if op.is_replayable}
    left, right = np.zeros(num_ops, np.int64), {}
    for value in needed:
        if maker.get(value) in open_ops:
            left[maker[value]] += graph.value_bytes[value]
    pairs, pair_bytes, wants = [], [], []
    number: dict[int, int] = {}
    for index in sorted(open_ops):
        for value in dict.fromkeys(graph.operations[index].inputs):
            if value in resident or value in needed:
                continue
            if value not in number:
                number[value] = num_ops + len(number)
                if maker.get(value) in open_ops:
                    pairs.append((number[value], maker[value]))
                    pair_bytes.append(graph.value_bytes[value])
                else:
                    right[number[value]] = graph.value_bytes[value]
            wants.append((index, number[value]))
    size = num_ops + len(number)
    right_bytes = np.zeros(size, np.int64)
    right_bytes[list(right)] = list(right.values())
    whole = PricedCut(
        nodes=np.array([*range(num_ops), *(num_ops + value for value in number)], dtype=np.int32),
        part=np.zeros(size, np.int32),
        left_bytes=np.concatenate([left, np.zeros(len(number), np.int64)]),
        right_bytes=right_bytes,
        right_ns=np.array([op.nanoseconds for op in graph.operations] + [0] * len(number), dtype=np.int64),
        pairs=np.array(pairs, dtype=np.int32).reshape(-1, 2),
        pair_bytes=np.array(pair_bytes, dtype=np.int64),
        wants=np.array(wants, dtype=np.int32).reshape(-1, 2),
    )
    can_be_in = np.ones(size, dtype=bool)
    can_be_in[[index for index in range(num_ops) if index not in open_ops]] = False
    return whole.without(np.zeros(size, dtype=bool), can_be_in)
