"""The joint graph of a captured unit, forward and backward, as a graph of operations for the planner.

NOTE [ What is a value, and what an operation ]
    1. A value is a storage: views of a result are the same value, and cost nothing to make again.
    2. What does not depend on a gradient of an output belongs to the forward. What the rest reads is needed.
    3. Arguments, parameters and constants live anyway, and so do the unit's outputs, which its caller has.
    4. An operation that draws random numbers is never run again: its results are kept. A dropout counts as two
       operations: one draws the mask, and the other makes the result from it, which can be made again. The mask is
       kept as bits.
    5. An operation that decides (top-k indices, a comparison of floating-point values), or that the user keeps, is not
       run again either. Of decisions only those that are small beside the unit's outputs: see NOTE [ Decisions are
       kept, values are recomputed ].
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from recoup.checkpointing.deciding_operations import ALWAYS_KEPT_BYTES, KEEP, SHARE, decides
from recoup.planning.graphs import Operation, OpGraph, evaluate_held
from recoup.tensors import tensors_in
from recoup.torch_private import OpOverload

__all__ = [
    "DROPOUT",
    "UnitGraph",
    "changed_inputs",
    "digest_of",
    "is_random",
    "is_view",
    "masked_result",
    "sized_by_values",
]

DROPOUT = torch.ops.aten.native_dropout.default
_RANDOM = torch.Tag.nondeterministic_seeded
_GIVEN = ("placeholder", "get_attr")
"""Nodes that no operation makes: arguments and parameters, and constants in the unit's code (`torch.tensor(4.0)`)."""


def is_random(node: Node) -> bool:
    """Whether an operation draws random numbers; attention does so with dropout only."""
    if _RANDOM not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0.0


def masked_result(node: Node) -> Node | None:
    """The node of a dropout's result, which can be made again from its mask; None for everything else."""
    if node.target is not DROPOUT or not 0.0 < node.args[1] < 1.0:  # type: ignore[operator]
        return None
    parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    return parts[0] if parts.keys() == {0, 1} and node.args[2] is not False else None


def changed_inputs(graph: Graph) -> list[Node]:
    """The inputs that the forward changes in place, such as the running statistics of a normalization."""
    outputs = graph.find_nodes(op="output")[0].meta.get("desc", ())
    changed = [output.mutated_input for output in outputs if hasattr(output, "mutated_input")]
    return [node for node in graph.find_nodes(op="placeholder") if node.meta.get("desc") in changed]


def sized_by_values(graph: Graph) -> Node | None:
    """The first operation whose result has a size that is not known before it runs."""
    for node in graph.nodes:
        value = node.meta.get("val") if node.op == "call_function" else None
        sizes = value.shape if isinstance(value, Tensor) else (value,)
        if any(isinstance(size, torch.SymInt) for size in sizes):
            return node  # type: ignore[no-any-return]
    return None


def is_view(node: Node) -> bool:
    """Whether a node's results are views of what it reads."""
    return getattr(node.target, "is_view", False)


def digest_of(graph: Graph) -> str:
    """Identifies a joint graph by its operations, their arguments and shapes."""
    lines = []
    for node in graph.nodes:
        value = node.meta.get("val")
        is_tensor = isinstance(value, Tensor) and value.layout is torch.strided
        shape = f"{value.dtype}{list(value.shape)}{list(value.stride())}{value.device}" if is_tensor else ""
        lines.append(f"{node.name} {node.target} {node.args} {node.kwargs} {shape}")
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


@dataclass
class UnitGraph:
    """A joint graph with its values numbered.

    Attributes:
        digest: identifies the graph.
        nodes: the operations of the forward that allocate something, in order.
        makers: for each value, the node whose result it is.
        operations: what each of ``nodes`` reads and makes, with seconds of 0.
        value_bytes: of each value.
        needed: the values that the backward reads.
        resident: the values that live anyway.
        views: further nodes whose results are views of one value, with that value.
        labels: names of the makers that are the same where sizes are symbolic.
        seconds: of operations, by the names of their nodes, once they are measured.
        own_saves: what the engine's own cut keeps.
    """

    digest: str
    nodes: list[Node] = field(repr=False)
    makers: list[Node] = field(repr=False)
    operations: list[Operation] = field(repr=False)
    value_bytes: list[int] = field(repr=False)
    needed: tuple[int, ...]
    resident: tuple[int, ...]
    views: dict[Node, int] = field(repr=False)
    labels: dict[Node, str] = field(repr=False)
    seconds: dict[str, float] = field(default_factory=dict, repr=False)
    own_saves: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, graph: Graph, num_outputs: int) -> UnitGraph:
        """Reads a joint graph whose first ``num_outputs`` outputs are the forward's."""
        return _Reader(graph, num_outputs).read()

    @property
    def draws(self) -> bool:
        """Whether an operation draws random numbers."""
        return any(map(is_random, self.nodes))

    def to_planner(self, seconds_of: Callable[[Node], float]) -> OpGraph:
        """The graph for the planner, with the seconds of its operations."""
        operations = [
            Operation(seconds_of(node), op.inputs, op.outputs, op.is_replayable)
            for node, op in zip(self.nodes, self.operations, strict=True)
        ]
        return OpGraph(tuple(self.value_bytes), tuple(operations), self.needed, self.resident)

    def names(self, values: Iterable[int]) -> tuple[str, ...]:
        """The names of the operations that make some values, but for values that live anyway."""
        resident = set(self.resident)
        return tuple(self.labels[self.makers[value]] for value in values if value not in resident)

    def num_bytes(self, names: Iterable[str]) -> int:
        """Bytes of the results of the operations named."""
        wanted = set(names)
        makers = zip(self.makers, self.value_bytes, strict=True)
        return sum(num_bytes for node, num_bytes in makers if self.labels[node] in wanted)

    def saved_by(self, forward: GraphModule, num_outputs: int) -> tuple[str, ...]:
        """The names of the operations whose results a forward returns for its backward."""
        outputs = forward.graph.find_nodes(op="output")[0].args[0][num_outputs:]
        names = {node.name for node in outputs if isinstance(node, Node)}
        value_of = {node.name: value for value, node in enumerate(self.makers)}
        value_of |= {node.name: value for node, value in self.views.items()}
        return self.names(sorted({value_of[name] for name in names if name in value_of}))

    def recomputed(self, saves: Iterable[str]) -> tuple[set[Node], set[Node]]:
        """The nodes that are kept if the results named are, and those that the backward runs again, with their views.

        Results that cannot be computed again are kept as well. Names that the graph does not have are left out.
        """
        wanted = set(saves)
        held = {value for value, node in enumerate(self.makers) if self.labels[node] in wanted}
        held |= {value for op in self.operations if not op.is_replayable for value in op.outputs}
        again = evaluate_held(self.to_planner(lambda _: 0.0), held=held).recomputed
        made = {value for index in again for value in self.operations[index].outputs}
        views = {node for node, value in self.views.items() if value in made}
        return {self.makers[value] for value in held}, views | {self.nodes[index] for index in again}


class _Reader:
    def __init__(self, graph: Graph, num_outputs: int) -> None:
        self.graph = graph
        outputs = graph.find_nodes(op="output")[0].args[0]
        self.outputs = [node for node in outputs[:num_outputs] if isinstance(node, Node)]
        self.forward = _ancestors(self.outputs)
        self.value_of: dict[int, int] = {}
        """Numbers of values by the identity of their storages."""
        self.makers: list[Node] = []
        self.value_bytes: list[int] = []

    def read(self) -> UnitGraph:
        later = _depending_on_tangents(self.graph)
        nodes, operations = [], []
        views: dict[Node, int] = {}
        needed: set[int] = set()
        most_bytes = max(ALWAYS_KEPT_BYTES, self._output_bytes() // SHARE)
        for node in self.graph.nodes:
            if node.op in _GIVEN and node not in later:
                self._values(node)
            elif node.op == "call_function" and node not in later:
                inputs = {value for read in node.all_input_nodes for value in self._values(read)}
                outputs = [value for value in self._values(node) if value not in inputs]
                made = tuple(value for value in outputs if self.makers[value] in (node, *node.users))
                result = masked_result(node)
                if result is not None:
                    (mask,) = (value for value in made if self.makers[value] is not result)
                    (made_of_it,) = (value for value in made if self.makers[value] is result)
                    nodes += [node, result]
                    operations.append(Operation(0.0, tuple(sorted(inputs)), (mask,), False))
                    operations.append(Operation(0.0, (*sorted(inputs), mask), (made_of_it,)))
                elif made and node.target is not operator.getitem:
                    nodes.append(node)
                    is_replayable = not is_random(node) and not self._is_kept(node, most_bytes)
                    operations.append(Operation(0.0, tuple(sorted(inputs)), made, is_replayable))
                elif len(values := set(self._values(node))) == 1 and self.makers[min(values)] is not node:
                    views[node] = min(values)
            elif node.op != "output":
                reads = [read for read in node.all_input_nodes if read not in later]
                needed |= {value for read in reads for value in self._values(read)}
        resident = {value for value, node in enumerate(self.makers) if node.op in _GIVEN}
        resident |= {value for node in self.outputs if node not in later for value in self._values(node)}
        return UnitGraph(
            digest_of(self.graph),
            nodes,
            self.makers,
            operations,
            self.value_bytes,
            tuple(sorted(needed)),
            tuple(sorted(resident)),
            views,
            _labels(self.graph),
        )

    def _output_bytes(self) -> int:
        tensors = [tensor for node in self.outputs for _, tensor in _tensors_of(node)]
        return sum(_known_bytes(tensor.untyped_storage().nbytes()) for tensor in tensors)

    def _is_kept(self, node: Node, most_bytes: int) -> bool:
        """Whether an operation decides, or its result is kept by the user.

        Where sizes are symbolic, those that the cut names are kept.
        """
        if (
            node not in self.forward
        ):  # such as the mask of a ReLU, which follows from what is kept or recomputed
            return False
        given = [tensor for read in node.all_input_nodes for tensor in tensors_in(read.meta.get("val"))]
        result = node.meta.get("val")
        if not isinstance(node.target, OpOverload) or not decides(node.target, given, result):
            return False
        sizes = [tensor.untyped_storage().nbytes() for tensor in tensors_in(result)]
        return node.target is KEEP or all(isinstance(size, int) and size <= most_bytes for size in sizes)

    def _values(self, node: Node) -> list[int]:
        """The values of a node's result, numbered when first met."""
        found = []
        for part, tensor in _tensors_of(node):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self.value_of:
                self.value_of[key] = len(self.makers)
                self.makers.append(part)
                self.value_bytes.append(_known_bytes(storage.nbytes()))
            found.append(self.value_of[key])
        return found


def _labels(graph: Graph) -> dict[Node, str]:
    """Names of nodes whose results have tensors, numbered among these.

    Nodes that compute with symbolic sizes are not counted: the names are those of the graph without symbolic sizes.
    """
    labels: dict[Node, str] = {}
    numbers: dict[str, int] = {}
    for node in graph.nodes:
        if not tensors_in(node.meta.get("val")):
            labels[node] = node.name
            continue
        stem = re.sub(r"_\d+$", "", node.name)
        number = numbers[stem] = numbers.get(stem, -1) + 1
        labels[node] = f"{stem}_{number}" if number else stem
    return labels


def _ancestors(nodes: Iterable[Node]) -> set[Node]:
    """Nodes, and all that they depend on."""
    found, waiting = set(), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _tensors_of(node: Node) -> Iterator[tuple[Node, Tensor]]:
    """The tensors of a result; those of a tuple by the nodes that take it apart."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        yield node, value
    elif isinstance(value, (tuple, list)):
        for user in node.users:
            if user.target is operator.getitem and isinstance(user.meta.get("val"), Tensor):
                yield user, user.meta["val"]


def _known_bytes(num_bytes: Any) -> int:
    """Bytes; 0 where a dimension is symbolic, when a cut is applied to sizes other than the sample's."""
    return num_bytes if isinstance(num_bytes, int) else 0


def _depending_on_tangents(graph: Graph) -> set[Node]:
    """The nodes of the backward proper: those that depend on the gradient of an output."""
    found: set[Node] = set()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if is_tangent or any(read in found for read in node.all_input_nodes):
            found.add(node)
    return found
