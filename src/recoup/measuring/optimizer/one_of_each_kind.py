"""The rehearsal of an optimizer with many parameters that are alike, on a few of them.

NOTE [ A few of many ]
    1. State is made for each parameter by itself: that of one of each kind, times their number.
    2. What a step needs for a moment is what its largest parameter asks for, if it goes through them one by one, or all
       together, if it works on them at once. Two of each kind tell which.
    3. If it is all together, one parameter as large as all of a kind stands for them; that it may is tried with one as
       large as two of each kind. If it is one by one, such a parameter must ask for more in proportion to its size.
    4. Whatever does not agree with this is rehearsed with all parameters. So is an optimizer that has several groups of
       them or a state already, or holds tensors elsewhere.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from recoup.tensors import tensors_in

__all__ = ["copy_with", "own_attributes", "rehearse_few"]

Rehearse = Callable[[Optimizer], tuple[dict[Tensor, int], int] | None]
"""Takes two steps; returns the bytes of state of each parameter, and what a step needs for a moment.

None if it has a state of another kind.
"""
_WORTH = 4
"""How often the average kind must occur for it to pay."""


def rehearse_few(
    optimizer: Optimizer, make: Callable[[Tensor, int], Tensor], rehearse: Rehearse
) -> tuple[int, int] | None:
    """Bytes of state, and what a step needs for a moment, by NOTE [ A few of many ]; None if that does not work.

    Args:
        optimizer: whose parameters have no state yet.
        make: makes a parameter that is as large as several of a given one.
        rehearse: takes two steps.
    """
    kinds = _Kinds(optimizer, make)
    if not kinds.are_worth_it:
        return None
    single, double = rehearse(kinds.optimizer(num_each=1)), rehearse(kinds.optimizer(num_each=2))
    if single is None or double is None:
        return None
    state = {kinds.kind_of[parameter]: size for parameter, size in single[0].items()}
    if any(state[kinds.kind_of[parameter]] != size for parameter, size in double[0].items()):
        return None
    twice, at_once = rehearse(kinds.optimizer(times=2)), rehearse(kinds.optimizer(times=None))
    if twice is None or at_once is None:
        return None
    state_bytes = sum(size * kinds.counts[kind] for kind, size in state.items())
    if double[1] != single[1]:
        return (state_bytes, at_once[1]) if twice[1] == double[1] else None
    is_one_by_one = at_once[1] * kinds.largest_bytes() == single[1] * kinds.largest_bytes(times=None)
    return (state_bytes, single[1]) if is_one_by_one else None


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """What a copy is made of: neither hooks, nor bound methods set on the instance, as learning rate schedulers do."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if not name.startswith("_optimizer_") and not callable(getattr(type(optimizer), name, None))
    }


def copy_with(optimizer: Optimizer, attributes: dict[str, Any]) -> Optimizer:
    """Another optimizer of the same class. Not by way of `Optimizer.__setstate__`, which patches the class itself."""
    made: Optimizer = object.__new__(type(optimizer))
    hooks: dict[str, Any] = {
        name: OrderedDict() for name in vars(optimizer) if name.startswith("_optimizer_")
    }
    made.__dict__.update(hooks | attributes)
    made.defaults.setdefault("differentiable", False)
    return made


class _Kinds:
    """Parameters that an optimizer treats alike: of one shape and type."""

    def __init__(self, optimizer: Optimizer, make: Callable[[Tensor, int], Tensor]) -> None:
        self.original, self.make = optimizer, make
        self.counts: Counter[Hashable] = Counter()
        self.first: dict[Hashable, Tensor] = {}
        self.kind_of: dict[Tensor, Hashable] = {}
        for parameter in tensors_in([group["params"] for group in optimizer.param_groups]):
            place = (parameter.dtype, parameter.device, parameter.requires_grad)
            kind = (parameter.shape, parameter.stride(), *place)
            self.counts[kind] += 1
            self.first.setdefault(kind, parameter)

    @property
    def are_worth_it(self) -> bool:
        """Whether there are many of each, and nothing but the groups refers to them."""
        if len(self.original.param_groups) > 1 or self.original.state:
            return False
        others = {**vars(self.original), "param_groups": {**self.original.param_groups[0], "params": []}}
        is_plain = all(
            type(p) in (Tensor, nn.Parameter) and p.layout is torch.strided for p in self.first.values()
        )
        is_known = is_plain and not any(True for _ in tensors_in(list(others.values())))
        return is_known and self.counts.total() >= _WORTH * len(self.counts)

    def largest_bytes(self, times: int | None = 1) -> int:
        """Of one parameter, as large as so many; as all of its kind if that is None."""
        sizes = (
            (p.numel() * p.element_size(), self.counts[kind])
            for kind, p in self.first.items()
            if p.requires_grad
        )
        return max((size * (count if times is None else times) for size, count in sizes), default=0)

    def optimizer(self, *, num_each: int = 1, times: int | None = 1) -> Optimizer:
        """A copy with so many parameters of each kind, each as large as so many; as all of them if that is None."""
        parameters = []
        for kind, parameter in self.first.items():
            size = self.counts[kind] if times is None else min(times, self.counts[kind])
            for _ in range(min(num_each, self.counts[kind])):
                made = nn.Parameter(self.make(parameter, size), parameter.requires_grad)
                if parameter.requires_grad:
                    made.grad = self.make(parameter, size)
                self.kind_of[made] = kind
                parameters.append(made)
        (group,) = self.original.param_groups
        emptied = [{**group, "params": []}]
        attributes = copy.deepcopy({**own_attributes(self.original), "param_groups": emptied})
        attributes["param_groups"][0]["params"] = parameters
        return copy_with(self.original, attributes)
