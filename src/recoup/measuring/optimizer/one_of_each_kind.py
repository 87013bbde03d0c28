"""The rehearsal of an optimizer with many alike parameters, on a few of them.

NOTE [ A few of many ]
    1. State is made for each parameter by itself: that of one parameter of each kind, times their number.
    2. The scratch of a step is that of its largest parameter, if it takes them one by one, or that of all together, if
       it takes them at once. Two of each kind tell which.
    3. If it takes them at once, one parameter as large as all of a kind stands for them. Whether it may is tried with
       one as large as two. If it takes them one by one, such a parameter must need scratch in proportion to its size.
    4. An optimizer that does not agree with this is rehearsed with all parameters. So is one that has several groups of
       parameters, a state already, tensors elsewhere, or another optimizer inside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from recoup.model.optimizer_state import parameters_of, with_optimizers_inside
from recoup.tensors import tensors_in

__all__ = ["rehearse_few"]

Rehearse = Callable[[Sequence[Tensor]], tuple[dict[Tensor, int], int] | None]
"""Takes a few steps with these parameters; returns the bytes of state of each, and the scratch of a step.

None if there is state that belongs to none of them.
"""
_WORTH = 4
"""How many parameters of the average kind are worth it."""


def rehearse_few(
    optimizer: Optimizer, make: Callable[[Tensor, int], Tensor], rehearse: Rehearse
) -> tuple[int, int] | None:
    """Bytes of state, and the scratch of a step, by NOTE [ A few of many ]; None if that does not work.

    Args:
        optimizer: whose parameters have no state yet.
        make: makes a parameter as large as several of a given one.
        rehearse: takes two steps.
    """
    kinds = _Kinds(optimizer, make)
    if not kinds.are_worth_it:
        return None
    single, double = rehearse(kinds.parameters(num_each=1)), rehearse(kinds.parameters(num_each=2))
    if single is None or double is None:
        return None
    state = {kinds.kind_of[parameter]: size for parameter, size in single[0].items()}
    if any(state[kinds.kind_of[parameter]] != size for parameter, size in double[0].items()):
        return None
    twice, at_once = rehearse(kinds.parameters(times=2)), rehearse(kinds.parameters(times=None))
    if twice is None or at_once is None:
        return None
    state_bytes = sum(size * kinds.counts[kind] for kind, size in state.items())
    if double[1] != single[1]:
        return (state_bytes, at_once[1]) if twice[1] == double[1] else None
    is_one_by_one = at_once[1] * kinds.largest_bytes() == single[1] * kinds.largest_bytes(times=None)
    return (state_bytes, single[1]) if is_one_by_one else None


class _Kinds:
    """Parameters that an optimizer treats alike: of one shape and type."""

    def __init__(self, optimizer: Optimizer, make: Callable[[Tensor, int], Tensor]) -> None:
        self.optimizer, self.make = optimizer, make
        self.counts: Counter[Hashable] = Counter()
        self.first: dict[Hashable, Tensor] = {}
        self.kind_of: dict[Tensor, Hashable] = {}
        for parameter in parameters_of(optimizer):
            place = (parameter.dtype, parameter.device, parameter.requires_grad)
            kind = (parameter.shape, parameter.stride(), *place)
            self.counts[kind] += 1
            self.first.setdefault(kind, parameter)

    @property
    def are_worth_it(self) -> bool:
        """Whether there are many of each, and nothing but the one group refers to them."""
        optimizer = self.optimizer
        if len(optimizer.param_groups) > 1 or optimizer.state:
            return False
        others = {**vars(optimizer), "param_groups": {**optimizer.param_groups[0], "params": []}}
        is_plain = all(
            type(p) in (Tensor, nn.Parameter) and p.layout is torch.strided for p in self.first.values()
        )
        is_alone = len(with_optimizers_inside(optimizer)) == 1
        is_known = is_plain and is_alone and not tensors_in(list(others.values()))
        return is_known and self.counts.total() >= _WORTH * len(self.counts)

    def largest_bytes(self, times: int | None = 1) -> int:
        """The largest parameter, where each is as large as so many; as all of its kind if that is None."""
        sizes = ((p.nbytes, self.counts[kind]) for kind, p in self.first.items() if p.requires_grad)
        return max((size * (count if times is None else times) for size, count in sizes), default=0)

    def parameters(self, *, num_each: int = 1, times: int | None = 1) -> list[Tensor]:
        """So many parameters of each kind, each as large as so many; as all of its kind if that is None."""
        made: list[Tensor] = []
        for kind, original in self.first.items():
            size = self.counts[kind] if times is None else min(times, self.counts[kind])
            for _ in range(min(num_each, self.counts[kind])):
                parameter = nn.Parameter(self.make(original, size), original.requires_grad)
                if original.requires_grad:
                    parameter.grad = self.make(original, size)
                self.kind_of[parameter] = kind
                made.append(parameter)
        return made
