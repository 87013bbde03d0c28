"""Consecutive children of a Sequential as one unit.

NOTE [ Slices ]
    1. A plain Sequential only calls its children in a row, so consecutive children can be a unit, as if the user had
       put them into a Sequential of their own. The model does not change: a `Slice` holds the same children, and a
       stand-in for the Sequential's forward runs the slices.
    2. Children are called as modules, so that their hooks run. A slice is no module of the model: only its forward is
       called, and no hook sees it.
    3. The Sequential defines the children, also after the user has replaced one. If their number has changed, the
       slices are void, and the Sequential runs as it would without them.
    4. A slice refers to its Sequential by name only: following its attributes leads to its own children alone.
    5. Inside a slice the children are named by their positions, from 0: slices of one kind then share recipes, which
       name modules inside.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, TypeGuard

from torch import nn

from recoup.model.calls import module_names
from recoup.model.replace_forward import StandIn, intercepted, own_forward

__all__ = [
    "Slice",
    "SlicedForward",
    "find_module",
    "first_overlap",
    "is_plain_sequential",
    "make_slice",
    "sliced",
    "slices_by_sequential",
    "split_name",
    "unit_names",
]

_NOTATION = re.compile(r"(.*)\[(\d+):(\d+)\]")


class Slice(nn.Module):
    """Consecutive children of a Sequential.

    Args:
        sequential: whose children they are.
        name: of the Sequential in the model.
        first: the position of the first child.
        last: the position behind the last child.
    """

    def __init__(self, sequential: nn.Sequential, name: str, first: int, last: int) -> None:
        super().__init__()
        self.sequential_name, self.first, self.last = name, first, last
        self.renew(sequential.training, list(sequential))

    @property
    def name(self) -> str:
        """The slice's name in the model, such as ``"features[0:3]"``."""
        return f"{self.sequential_name}[{self.first}:{self.last}]"

    def renew(self, training: bool, children: Sequence[nn.Module]) -> None:
        """Takes over the mode and the children that the Sequential has now."""
        self.training = training
        own = children[self.first : self.last]
        if list(self._modules.values()) != own:
            self._modules.clear()
            self._modules.update((str(position), child) for position, child in enumerate(own))

    def forward(self, input: Any) -> Any:
        """Calls the children in a row."""
        for child in self._modules.values():
            assert child is not None
            input = child(input)
        return input


class SlicedForward(StandIn):
    """Stands in for a Sequential's forward: runs slices of it, and the children between them."""

    def __init__(self, module: nn.Sequential, slices: Iterable[Slice]) -> None:
        super().__init__(module)
        self.num_children = len(module)
        self.slices = tuple(sorted(slices, key=lambda part: part.first))

    def run(self, input: Any) -> Any:
        """Calls slices and children in a row."""
        children: list[Any] = list(self.module._modules.values())
        if len(children) != self.num_children:
            return self.original(input)
        position = 0
        for part in self.slices:
            for child in children[position : part.first]:
                input = child(input)
            part.renew(self.module.training, children)
            input = part.forward(input)
            position = part.last
        for child in children[position:]:
            input = child(input)
        return input


def is_plain_sequential(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether a module only calls its children in a row.

    >>> is_plain_sequential(nn.Sequential(nn.Tanh())), is_plain_sequential(nn.ModuleList([nn.Tanh()]))
    (True, False)
    """
    return (
        isinstance(module, nn.Sequential)
        and type(module).__iter__ is nn.Sequential.__iter__
        and getattr(own_forward(module), "__func__", None) is nn.Sequential.forward
    )


def make_slice(sequential: nn.Sequential, name: str, first: int, last: int) -> nn.Module:
    """The children from ``first`` to before ``last``: one is the child, all are the Sequential itself."""
    if (first, last) == (0, len(sequential)):
        return sequential
    return sequential[first] if last == first + 1 else Slice(sequential, name, first, last)


def split_name(name: str) -> tuple[str, int, int] | None:
    """The parts of a slice's name; ``None`` for other names.

    >>> split_name("features[0:3]")
    ('features', 0, 3)
    >>> split_name("features.0")
    """
    match = _NOTATION.fullmatch(name)
    return None if match is None else (match[1], int(match[2]), int(match[3]))


def find_module(model: nn.Module, name: str) -> nn.Module:
    """A model's module by its name, or a slice by a name such as ``"features[0:3]"``.

    Raises:
        AttributeError: the model has no such module.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> find_module(model, "[0:2]")
    Slice(
      (0): Linear(in_features=2, out_features=3, bias=True)
      (1): Tanh()
    )
    """
    parts = split_name(name)
    if parts is None:
        return model.get_submodule(name)
    sequential, first, last = model.get_submodule(parts[0]), *parts[1:]
    if not (is_plain_sequential(sequential) and first < last <= len(sequential)):
        raise AttributeError(f"{parts[0]!r} is no plain Sequential of at least {last} children.")
    return make_slice(sequential, *parts)


def unit_names(model: nn.Module, units: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """The name of every module of a model, and of those units that are slices."""
    return module_names(model) | {unit: unit.name for unit in units if isinstance(unit, Slice)}


def slices_by_sequential(model: nn.Module, units: Iterable[nn.Module]) -> dict[nn.Sequential, list[Slice]]:
    """Those units that are slices, by their Sequential."""
    found: dict[nn.Sequential, list[Slice]] = {}
    for unit in units:
        if isinstance(unit, Slice):
            sequential = model.get_submodule(unit.sequential_name)
            assert isinstance(sequential, nn.Sequential)
            found.setdefault(sequential, []).append(unit)
    return found


def first_overlap(model: nn.Module, units: Sequence[nn.Module]) -> tuple[nn.Module, nn.Module] | None:
    """Two slices among some units that share a child."""
    for slices in slices_by_sequential(model, units).values():
        slices.sort(key=lambda part: part.first)
        for one, other in pairwise(slices):
            if one.last > other.first:
                return one, other
    return None


def sliced(model: nn.Module, units: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """A ``with`` block in which the model runs those units that are slices."""
    found = slices_by_sequential(model, units)
    return intercepted({module: SlicedForward(module, slices) for module, slices in found.items()})
