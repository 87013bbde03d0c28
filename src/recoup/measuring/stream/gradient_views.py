"""Gradients that one backward gives as views of larger storages, or of storages that they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd import grad as run_grad
from torch.autograd.graph import get_gradient_edge

from recoup.model.cut_graph import Gradient, described, seeded
from recoup.model.streaming import UnitCall
from recoup.tensors import needing_gradient, tensors_in

__all__ = ["GradientViews", "argument_gradients"]


@dataclass(frozen=True)
class GradientViews:
    """The storages behind the gradients that one backward gives.

    Attributes:
        owners: the storage that each gradient is a view of, by the number of the storage that it is the gradient of.
        strided: numbers of those whose gradients are no contiguous views: a backward copies them.
        storages: bytes of the storages that gradients are views of.
        gradients: how each lies in its storage, by the same number; without those that are sums.
    """

    owners: dict[int, int] = field(default_factory=dict)
    strided: set[int] = field(default_factory=set)
    storages: dict[int, int] = field(default_factory=dict)
    gradients: dict[int, Gradient] = field(default_factory=dict)

    @classmethod
    def of(cls, numbers: Sequence[int | None], gradients: Sequence[Gradient | None]) -> GradientViews:
        """Those of some gradients, given the number of the storage that each is the gradient of."""
        found = cls()
        owners, storages = found.owners, found.storages
        summed: dict[int, int] = {}
        for number, gradient in zip(numbers, gradients, strict=True):
            if number is None or gradient is None:
                continue
            if number in owners:
                # Several gradients, which autograd adds up: a storage of their own.
                summed[number] += gradient.num_bytes
                owners[number] = -1 - number
                storages[-1 - number] = summed[number]
                found.gradients.pop(number, None)
            else:
                summed[number] = gradient.num_bytes
                owners[number] = gradient.owner
                storages[gradient.owner] = gradient.owner_bytes
                found.gradients[number] = gradient
            if not gradient.is_contiguous:
                found.strided.add(number)
        return found

    def owner_of(self, storage: int, full_bytes: int) -> int | None:
        """Among `storages`, the one that a storage's gradient is a view of; None if it has one of its own.

        Args:
            storage: that the backward gives a gradient.
            full_bytes: of that gradient.
        """
        owner = self.owners.get(storage)
        if owner is None:
            return None
        is_shared = sum(other == owner for other in self.owners.values()) > 1
        return owner if is_shared or self.storages[owner] != full_bytes else None


def argument_gradients(call: UnitCall, wanted: Sequence[bool]) -> list[Gradient | None]:
    """The gradients that a call's backward gives the tensors among its arguments.

    Args:
        call: to run.
        wanted: for each tensor among its outputs, whether the step gives it a gradient.
    """
    args, kwargs, _ = call.fresh()
    given = tensors_in((args, kwargs))
    # Before it runs: it may change an argument in place, which is then another tensor of the graph.
    edges = {id(tensor): get_gradient_edge(tensor) for tensor in needing_gradient(given)}
    seed = seeded(call.fn(*args, **kwargs), wanted) if edges else None
    if seed is None:
        return [None] * len(given)
    found = run_grad(seed, list(edges.values()), torch.empty(0), allow_unused=True)
    gradients = dict(zip(edges, described(found), strict=True))
    return [gradients.get(id(tensor)) for tensor in given]
