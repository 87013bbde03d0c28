"""The operations of a captured unit under a cut: bytes, seconds, kept or recomputed, and the user's line of code."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch.fx import Node

from recoup.capture.cut import Cut
from recoup.capture.graph import UnitGraph
from recoup.capture.masks import PACKING, is_packed

__all__ = ["OperationFate", "fates_of"]


@dataclass(frozen=True, slots=True)
class OperationFate:
    """What becomes of an operation's result between forward and backward.

    Attributes:
        name: in the graph.
        operation: such as ``"aten.addmm"``.
        num_bytes: of its result; of a dropout's mask, as it is kept.
        seconds: measured by itself.
        fate: ``"kept"``, ``"recomputed"``, or ``"not needed"`` by the backward; ``"backward"`` if only that runs it.
        line: of the user's code that made it, such as ``"model.py:31: y = self.out(y)"``; empty if not known.
    """

    name: str
    operation: str
    num_bytes: int
    seconds: float
    fate: str
    line: str


def fates_of(graph: UnitGraph, cut: Cut) -> tuple[OperationFate, ...]:
    """All operations of a unit that do not depend on a gradient, in order."""
    kept, again = graph.recomputed(graph.own_saves if cut.saves is None else cut.saves)
    found, forward = [], _run_by_forward(graph)
    needed_later = kept & {graph.makers[value] for value in _read_later(graph, again)}
    for node, op in zip(graph.nodes, graph.operations, strict=True):
        needed = needed_later & {graph.makers[value] for value in op.outputs}
        # torch makes constants again, whatever it is told.
        if node in again or (needed and not op.inputs and op.is_replayable):
            fate = "recomputed" if node in forward else "backward"
        else:
            fate = "kept" if needed else "not needed"
        size = sum(_kept_bytes(graph, cut, value) for value in op.outputs)
        seconds = graph.seconds.get(node.name, 0.0)
        found.append(OperationFate(node.name, _operation(node), size, seconds, fate, _line(node)))
    return tuple(found)


def _kept_bytes(graph: UnitGraph, cut: Cut, value: int) -> int:
    packing = PACKING if cut.saves is not None and is_packed(graph.makers[value]) else 1
    return graph.value_bytes[value] // packing


def _read_later(graph: UnitGraph, again: set[Node]) -> set[int]:
    """Values that the backward reads, or an operation that it runs again."""
    read = set(graph.needed)
    for node, op in zip(graph.nodes, graph.operations, strict=True):
        if node in again:
            read.update(op.inputs)
    return read


def _run_by_forward(graph: UnitGraph) -> set[Node]:
    """The operations that the unit's outputs depend on. The others run for the backward only."""
    found, read = set(), set(graph.resident)
    for node, op in zip(reversed(graph.nodes), reversed(graph.operations), strict=True):
        if read.intersection(op.outputs):
            found.add(node)
            read.update(op.inputs)
    return found


def _operation(node: Node) -> str:
    # A dropout's result, made from its mask, is a part of what the operation returns.
    made_by = node.args[0] if node.target is operator.getitem else node
    name = str(made_by.target)  # type: ignore[union-attr]
    return name.removesuffix(".default")


def _line(node: Node) -> str:
    """The innermost line of the user's code: torch's own is left out of stack traces."""
    trace = (node.meta.get("stack_trace") or "").rstrip().splitlines()
    places = [index for index, line in enumerate(trace) if line.lstrip().startswith("File ")]
    if not places:
        return ""
    where = trace[places[-1]].split('"')
    number = where[2].split("line ")[1].split(",")[0].strip()
    code = trace[places[-1] + 1].strip() if places[-1] + 1 < len(trace) else ""
    return f"{where[1].rpartition('/')[2]}:{number}: {code}"
