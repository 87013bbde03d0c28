"""Graphs of operations with their exact cost models, apart from every solver.

Two problems, two types:

* :class:`OrderedGraph`: operations in a fixed order, one value each; a value may be dropped and computed
  again. :func:`simulate_actions` is the one judge of what a schedule costs.
* :class:`OpGraph`: the operations of a forward pass and the values that the backward needs;
  :func:`evaluate_held` says what holding a given set of values costs.

NOTE [ Memory of an ordered graph ]
 1. While an operation runs, its inputs and its own value are live together with everything else held.
 2. A value may be dropped between two operations, never during one: an input is freed after the operation
    that used it last, and a value that nobody uses after the operation that made it.
 3. The peak is the largest number of live bytes while an operation runs. Bytes outside the graph
    (parameters, optimizer state) are the caller's: subtract them from the budget.
With these rules the plain schedule (every operation once) gives the published plain peak of all three graphs
in ``tests/planning/instances``; freeing the inputs before the output exists would not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from recoup.errors import GraphError
from recoup.planning.checks import check_bytes, check_seconds, check_total

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


@dataclass(frozen=True)
class OrderedGraph:
    """Operations in the order in which they run; operation ``i`` makes value ``i``.

    Attributes:
        value_bytes: bytes of each operation's value.
        compute_s: seconds that each operation takes, each time it runs.
        inputs: for each operation the values that it reads; all must come earlier in the order.

    Raises:
        GraphError: if the lengths differ, a number is negative, or an input does not come earlier.

    A value that must still be there at the end is one that a last operation of no bytes and no seconds reads.

    >>> graph = OrderedGraph(value_bytes=(4, 2), compute_s=(1.0, 3.0), inputs=((), (0,)))
    >>> graph.plain_peak_bytes, graph.plain_s
    (6, 4.0)
    """

    value_bytes: tuple[int, ...]
    compute_s: tuple[float, ...]
    inputs: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        lengths = (len(self.value_bytes), len(self.compute_s), len(self.inputs))
        if len(set(lengths)) != 1:
            raise GraphError(
                f"value_bytes, compute_s and inputs must have one entry per operation; got {lengths} entries."
            )
        for op, (size, seconds, read) in enumerate(
            zip(self.value_bytes, self.compute_s, self.inputs, strict=True)
        ):
            check_bytes(f"Operation {op}", error=GraphError, value_bytes=size)
            check_seconds(f"Operation {op}", error=GraphError, compute_s=seconds)
            if any(not 0 <= value < op for value in read) or len(set(read)) != len(read):
                raise GraphError(
                    f"Operation {op} reads {read}: its inputs must be distinct earlier operations "
                    f"(0 to {op - 1}). Number the operations in execution order."
                )
        check_total("OrderedGraph", sum(self.value_bytes), error=GraphError)

    @classmethod
    def from_edges(
        cls, value_bytes: Sequence[int], compute_s: Sequence[float], *, edges: Iterable[tuple[int, int]]
    ) -> OrderedGraph:
        """Builds a graph from ``(producer, consumer)`` pairs; a pair that repeats counts once.

        >>> OrderedGraph.from_edges([4, 2, 1], [1.0, 3.0, 1.0], edges=[(0, 1), (1, 2), (0, 2)]).inputs
        ((), (0,), (0, 1))
        """
        reads: list[set[int]] = [set() for _ in value_bytes]
        for producer, consumer in edges:
            if not 0 <= consumer < len(reads):
                raise GraphError(f"Edge ({producer}, {consumer}) points outside the {len(reads)} operations.")
            reads[consumer].add(producer)
        return cls(tuple(value_bytes), tuple(compute_s), tuple(tuple(sorted(read)) for read in reads))

    def __len__(self) -> int:
        return len(self.value_bytes)

    @property
    def plain_peak_bytes(self) -> int:
        """The peak when every operation runs once."""
        return simulate_actions(self, actions_of(self, range(len(self)))).peak_bytes

    @property
    def plain_s(self) -> float:
        """The seconds when every operation runs once."""
        return math.fsum(self.compute_s)

    @property
    def floor_bytes(self) -> int:
        """What the largest operation needs with its inputs: no schedule peaks lower."""
        sizes = self.value_bytes
        return max(
            (sizes[op] + sum(sizes[value] for value in read) for op, read in enumerate(self.inputs)),
            default=0,
        )


@dataclass(frozen=True)
class Compute:
    """Run an operation, for the first time or again."""

    op: int

    def __str__(self) -> str:
        return f"C{self.op}"


@dataclass(frozen=True)
class Drop:
    """Free a value."""

    value: int

    def __str__(self) -> str:
        return f"D{self.value}"


@dataclass(frozen=True)
class OrderedCost:
    """What a schedule of an ordered graph costs.

    Attributes:
        peak_bytes: the largest number of live bytes.
        peak_op: the operation that ran at the peak (the first one, on a tie).
        compute_s: seconds of all computations, repeats included.
        num_recomputed: computations beyond the first of each operation.
        live_bytes: live bytes while each computation runs, in order.
    """

    peak_bytes: int
    peak_op: int
    compute_s: float
    num_recomputed: int
    live_bytes: tuple[int, ...]


def actions_of(graph: OrderedGraph, order: Iterable[int]) -> tuple[Compute | Drop, ...]:
    """Turns an order of computations into a schedule in which each value is dropped as soon as it can be.

    A computation serves the uses up to the next computation of the same operation, so the order alone
    determines the least memory: every copy goes after the last use that it serves.

    >>> graph = OrderedGraph((4, 2, 1), (1.0, 3.0, 1.0), ((), (0,), (0, 1)))
    >>> " ".join(map(str, actions_of(graph, [0, 1, 0, 2])))
    'C0 C1 D0 C0 C2 D0 D1 D2'
    """
    steps = list(order)
    latest: dict[int, int] = {}
    last_use = list(range(len(steps)))
    for position, op in enumerate(steps):
        if not 0 <= op < len(graph):
            raise GraphError(f"Step {position} computes operation {op}; the graph has {len(graph)}.")
        for value in graph.inputs[op]:
            if value not in latest:
                raise GraphError(f"Step {position} computes operation {op} before its input {value} exists.")
            last_use[latest[value]] = position
        latest[op] = position
    ends: list[list[int]] = [[] for _ in steps]
    for start, end in enumerate(last_use):
        ends[end].append(steps[start])
    actions: list[Compute | Drop] = []
    for position, op in enumerate(steps):
        actions.append(Compute(op))
        actions.extend(Drop(value) for value in sorted(ends[position]))
    return tuple(actions)


def simulate_actions(graph: OrderedGraph, actions: Iterable[Compute | Drop]) -> OrderedCost:
    """Runs a schedule and returns its exact cost; see NOTE [ Memory of an ordered graph ].

    Raises:
        GraphError: if a value is used or dropped that is not there, computed while it is there, left at the
            end, or if the first computations are not all there in the graph's order.

    >>> graph = OrderedGraph((4, 2, 1), (1.0, 3.0, 1.0), ((), (0,), (0, 1)))
    >>> cost = simulate_actions(graph, actions_of(graph, [0, 1, 0, 2]))
    >>> cost.peak_bytes, cost.peak_op, cost.compute_s, cost.live_bytes
    (7, 2, 6.0, (4, 6, 6, 7))
    """
    held: set[int] = set()
    live, reached = 0, 0
    live_bytes: list[int] = []
    ops: list[int] = []
    for action in actions:
        match action:
            case Drop(value):
                if value not in held:
                    raise GraphError(f"{action} drops a value that is not there.")
                held.discard(value)
                live -= graph.value_bytes[value]
            case Compute(op):
                _check_runnable(graph, op, held=held, reached=reached)
                reached = max(reached, op + 1)
                held.add(op)
                live += graph.value_bytes[op]
                live_bytes.append(live)
                ops.append(op)
    if reached != len(graph):
        raise GraphError(f"The schedule ends before operation {reached} of {len(graph)} has run.")
    if held:
        raise GraphError(f"The schedule ends with values {sorted(held)} still held; drop them.")
    peak = max(live_bytes, default=0)
    return OrderedCost(
        peak_bytes=peak,
        peak_op=ops[live_bytes.index(peak)] if ops else -1,
        compute_s=math.fsum(graph.compute_s[op] for op in ops),
        num_recomputed=len(ops) - len(graph),
        live_bytes=tuple(live_bytes),
    )


def _check_runnable(graph: OrderedGraph, op: int, *, held: set[int], reached: int) -> None:
    if not 0 <= op <= min(reached, len(graph) - 1):
        raise GraphError(f"C{op} comes too early: operation {reached} has not run yet, and order is fixed.")
    missing = [value for value in graph.inputs[op] if value not in held]
    if missing:
        raise GraphError(f"C{op} needs values {missing}, which are not there; compute them first.")
    if op in held:
        raise GraphError(f"C{op} computes a value that is still there; drop it first.")


@dataclass(frozen=True)
class Operation:
    """One operation of a forward pass.

    Attributes:
        seconds: its run time; counted in whole nanoseconds, so that sums are exact.
        inputs: the values that it reads.
        outputs: the values that it makes, all of them each time it runs.
        is_replayable: whether it may run again (False for random or mutating operations).
    """

    seconds: float
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    is_replayable: bool = True

    @property
    def nanoseconds(self) -> int:
        """Its run time as the solvers count it."""
        return round(self.seconds * 1e9)


@dataclass(frozen=True)
class OpGraph:
    """The operations of a forward pass, and what the backward needs of their values.

    Attributes:
        value_bytes: bytes of each value. Views and aliases of one storage are one value.
        operations: in execution order; each value is made by at most one of them. A value that none makes
            is an input of the pass: it cannot be recomputed.
        needed: the values that the backward reads.
        resident: values that live anyway (parameters, the batch, the pass's outputs): free to hold.

    Raises:
        GraphError: if a value is outside the graph, made twice, or read before it is made.

    >>> graph = OpGraph((8, 4), (Operation(1e-3, (0,), (1,)),), needed=(1,), resident=(0,))
    >>> evaluate_held(graph, held=[]).recompute_s
    0.001
    """

    value_bytes: tuple[int, ...]
    operations: tuple[Operation, ...]
    needed: tuple[int, ...]
    resident: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for value, size in enumerate(self.value_bytes):
            check_bytes(f"Value {value}", error=GraphError, value_bytes=size)
        check_total("OpGraph", sum(self.value_bytes), error=GraphError)
        known = {value for op in self.operations for value in op.outputs}
        made: set[int] = set()
        for index, op in enumerate(self.operations):
            check_seconds(f"Operation {index}", error=GraphError, seconds=op.seconds)
            self._check_values(f"Operation {index}", (*op.inputs, *op.outputs))
            late = [value for value in op.inputs if value in known and value not in made]
            if late:
                raise GraphError(f"Operation {index} reads values {late} before they are made; sort them.")
            twice = [value for value in op.outputs if value in made]
            if twice or len(set(op.outputs)) != len(op.outputs):
                raise GraphError(f"Operation {index} makes values {twice or op.outputs} a second time.")
            made.update(op.outputs)
        if sum(op.seconds for op in self.operations) > 1e9:
            raise GraphError(
                "OpGraph: its operations take more than 1e9 seconds; nanoseconds are counted, up to 2**63."
            )
        self._check_values("needed", self.needed)
        self._check_values("resident", self.resident)

    @classmethod
    def from_joint(
        cls,
        value_bytes: Sequence[int],
        operations: Sequence[Operation],
        *,
        num_forward: int,
        resident: Iterable[int] = (),
    ) -> OpGraph:
        """Cuts a joint graph after its first ``num_forward`` operations: the rest are the backward.

        What the backward reads and does not make itself is needed.

        >>> forward, backward = Operation(1e-3, (0,), (1,)), Operation(1e-3, (1,), (2,))
        >>> OpGraph.from_joint((8, 4, 8), (forward, backward), num_forward=1, resident=[0]).needed
        (1,)
        """
        if not 0 <= num_forward <= len(operations):
            raise GraphError(f"num_forward must be 0 to {len(operations)}; got {num_forward}.")
        backward = operations[num_forward:]
        made = {value for op in backward for value in op.outputs}
        needed = sorted({value for op in backward for value in op.inputs} - made)
        return cls(tuple(value_bytes), tuple(operations[:num_forward]), tuple(needed), tuple(resident))

    def _check_values(self, where: str, values: Iterable[int]) -> None:
        outside = [value for value in values if not 0 <= value < len(self.value_bytes)]
        if outside:
            raise GraphError(f"{where} names values {outside}; the graph has {len(self.value_bytes)} values.")


@dataclass(frozen=True)
class HoldCost:
    """What a hold set costs.

    Attributes:
        held_bytes: bytes held between the passes (resident values count nothing).
        recompute_s: seconds of the operations that run again.
        recomputed: those operations, in order.
    """

    held_bytes: int
    recompute_s: float
    recomputed: tuple[int, ...]


def evaluate_held(graph: OpGraph, *, held: Iterable[int]) -> HoldCost:
    """Says what it costs to hold exactly these values between the passes.

    Every needed value that is not held is recomputed, with all that this takes: recompute chains are charged
    in full, and an operation that several need is charged once.

    Raises:
        GraphError: if the backward needs a value that is neither held nor recomputable from what is.

    >>> ops = (Operation(1.0, (0,), (1,)), Operation(2.0, (1,), (2,)), Operation(4.0, (1,), (3,)))
    >>> graph = OpGraph((9, 4, 5, 6), ops, needed=(2, 3), resident=(0,))
    >>> evaluate_held(graph, held=[]).recompute_s, evaluate_held(graph, held=[1]).recompute_s
    (7.0, 6.0)
    """
    resident = set(graph.resident)
    kept = set(held)
    graph._check_values("held", kept)
    maker = {value: index for index, op in enumerate(graph.operations) for value in op.outputs}
    ready = kept | resident
    rerun: set[int] = set()
    waiting = [value for value in graph.needed if value not in ready]
    while waiting:
        value = waiting.pop()
        index = maker.get(value)
        if index is None or not graph.operations[index].is_replayable:
            raise GraphError(
                f"Value {value} is needed and cannot be recomputed: hold it or make it resident."
            )
        if index in rerun:
            continue
        rerun.add(index)
        waiting.extend(item for item in graph.operations[index].inputs if item not in ready)
    nanoseconds = sum(graph.operations[index].nanoseconds for index in rerun)
    size = sum(graph.value_bytes[value] for value in kept - resident)
    return HoldCost(held_bytes=size, recompute_s=nanoseconds / 1e9, recomputed=tuple(sorted(rerun)))
