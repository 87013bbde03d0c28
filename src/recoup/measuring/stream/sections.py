"""The autograd graph of the code between units, stretch by stretch: what its backward reaches and what that needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import grad as run_grad
from torch.autograd.graph import GradientEdge

from recoup.devices.meter import Meter
from recoup.measuring.stream.gradient_views import GradientViews
from recoup.model.cut_graph import copied_as_accumulated, described, seeded

__all__ = ["Section", "Sections"]

_LIVE = "bytes that live when a node's backward begins"


@dataclass
class Section:
    """What one stretch of code added to the graph.

    Attributes:
        heads: tensors that it made and handed on, which need a gradient.
        edges: where its graph ends: at outputs of units, at earlier code, at parameters.
        numbers: of the storages among those ends, for each; None for parameters and the like.
        origins: for each of those ends, the number of the earlier section that it belongs to; None for others.
        parameters: among those ends.
        saving: the nodes of its graph that save their own results, such as that of a ReLU. Results of others are free
            as a rule when their nodes run.
        gradients: after its backward has run, bytes of the gradients of those storages, by number.
        views: after its backward has run, the storages that these gradients are views of.
        to_code: after its backward has run, by an earlier section's number, bytes of the gradients of what that made.
        sums: after its backward has run, by the same number, the most that lives in that one's backward beside such a
            gradient that is a view: what is added to it is not added in place, and the sum takes room of its own.
        copies: after its backward has run, whether gradients of parameters were copied, which lie otherwise.
    """

    heads: Sequence[Tensor]
    edges: Sequence[GradientEdge]
    numbers: Sequence[int | None]
    origins: Sequence[int | None]
    parameters: Sequence[Tensor]
    saving: Sequence[Any] = ()
    gradients: dict[int, int] = field(default_factory=dict)
    views: GradientViews = field(default_factory=GradientViews)
    to_code: dict[int, int] = field(default_factory=dict)
    sums: dict[int, int] = field(default_factory=dict)
    copies: bool = False

    def backward_bytes(self, meter: Meter, *, frees: bool, adds: bool) -> int:
        """The most that lives in its backward, with the gradients of what it handed on; nothing earlier runs.

        Args:
            meter: of the device.
            frees: whether each of its operations may let go of what it saved, as in a real step.
            adds: whether gradients of parameters are there when it begins, and are added to.
        """
        seed = seeded(self.heads)
        if seed is None or not self.edges:
            return 0
        before = meter.begin()

        def note_live(node: Any, _: Any) -> None:
            _marks(node)[_LIVE] = meter.live_bytes() - before

        hooks = [node.register_prehook(partial(note_live, node)) for node in self.saving]
        # Added gradients are not copied.
        with copied_as_accumulated(() if adds else self.parameters) as copied:
            found = run_grad(seed, self.edges, torch.empty(0), retain_graph=not frees, allow_unused=True)
        for hook in hooks:
            hook.remove()
        self._note_gradients(found)
        self.copies = bool(copied)
        return meter.peak_bytes() - before

    def _note_gradients(self, found: Sequence[Tensor | None]) -> None:
        gradients = described(found)
        self.views = GradientViews.of(self.numbers, gradients)
        known: set[int] = set()
        ends = zip(self.edges, self.numbers, self.origins, gradients, strict=True)
        for edge, number, origin, gradient in ends:
            if gradient is None:
                continue
            live_bytes = _marks(edge.node).get(_LIVE)
            if origin is not None and live_bytes is not None and gradient.owner_bytes != gradient.num_bytes:
                self.sums[origin] = max(self.sums.get(origin, 0), live_bytes + gradient.num_bytes)
            if origin is not None and gradient.owner not in known:
                self.to_code[origin] = self.to_code.get(origin, 0) + gradient.owner_bytes
            known.add(gradient.owner)
            if number is not None:
                self.gradients[number] = self.gradients.get(number, 0) + gradient.num_bytes


class Sections:
    """Tells each stretch of the graph from those before it.

    Nodes are marked by their metadata, which goes with them: nothing lives longer for having been seen.
    """

    def __init__(self) -> None:
        self.number = 0

    def note(self, numbers: Iterable[tuple[Tensor, int | None]]) -> None:
        """Lets later sections know by which number's storage they begin, and that they begin there."""
        for tensor, number in numbers:
            if tensor.grad_fn is not None:
                marks = _marks(tensor.grad_fn)
                marks.setdefault(self, self.number)
                marks[self, tensor.output_nr] = number

    def next(self, tensors: Iterable[Tensor]) -> Section:
        """What the code since the last call added below these tensors."""
        self.number += 1
        heads = [tensor for tensor in tensors if tensor.grad_fn is not None and self._is_new(tensor.grad_fn)]
        edges: dict[tuple[Any, int], GradientEdge] = {}
        waiting = [tensor.grad_fn for tensor in heads]
        saving: list[Any] = []
        while waiting:
            node = waiting.pop()
            assert node is not None
            if self in _marks(node):
                continue
            _marks(node)[self] = self.number
            saving += [node] if hasattr(node, "_saved_result") else []
            for below, index in node.next_functions:
                if below is None:
                    continue
                if self._is_new(below) and below.next_functions:
                    waiting.append(below)
                else:
                    edges[below, index] = GradientEdge(below, index)
        numbers = [_marks(node).get((self, index)) for node, index in edges]
        origins = [self._origin(node, index) for node, index in edges]
        parameters = [node.variable for node, _ in edges if hasattr(node, "variable")]
        return Section(heads, list(edges.values()), numbers, origins, parameters, saving)

    def _origin(self, node: Any, index: int) -> int | None:
        """The earlier section that a node belongs to; None for outputs of units and for leaves."""
        marks = _marks(node)
        return None if (self, index) in marks or not node.next_functions else marks.get(self)

    def _is_new(self, node: Any) -> bool:
        section = _marks(node).get(self)
        return section is None or section == self.number


def _marks(node: Any) -> dict[Any, Any]:
    """A node's metadata, which torch's stubs take for a method."""
    return node.metadata  # type: ignore[no-any-return]
