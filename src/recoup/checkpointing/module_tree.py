"""The Python state of a module and of all modules in it, read at once: it is hardly ever another than at the last call.

NOTE [ Trees ]
    1. Looking at every attribute of every module, one by one, takes longer than launching the kernels of a small layer.
       So the first call looks, and makes a `Tree`: which containers there are, and where tensors and modules lie in
       them. Later calls read all values into one list, with built-in functions only.
    2. A tree fits as long as keys, lengths and *types* are those that it was made from: what is to be noted follows
       from these. It holds no values but names, plain tuples and code of libraries, so it keeps no tensor alive.
    3. Not all modules have one: no attribute may have a history or lead to objects that are followed further, and there
       are no hooks. `FunctionState` looks at those one by one, and at modules that change all the time. Whether a
       partial or a method leads further is looked up in every call: its type does not tell.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import is_not, itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn import Module
from torch.nn.modules.lazy import LazyModuleMixin

from recoup.checkpointing.by_identity import ByIdentity
from recoup.checkpointing.reach import bound_parts
from recoup.snapshot.own_code import is_library, is_own, methods_of_forward

__all__ = ["TreeState", "note_tree"]

_PLAIN = frozenset({bool, int, float, str, type(None)})
_CONTAINERS = (dict, list, set, frozenset)
_MOST_ITEMS = 1000
_MOST_TREES = 4
"""Of one module: if it changes more often, it has none."""

_Get = Callable[[Sequence[Any]], tuple[Any, ...]]


class _UnlikeError(Exception):
    """The modules have no tree, or another one."""


class TreeState(NamedTuple):
    """What the modules of a tree held: the values of all attributes, then those of all containers."""

    tree: Tree
    values: list[Any]

    def is_unchanged(self) -> bool:
        """Whether every place holds the same objects."""
        return self.tree.holds(self.values)

    def places(self) -> Iterator[tuple[Any, Any]]:
        """Every container, with a copy of what it held."""
        for place in self.tree.empty(self.values):
            yield place, {} if isinstance(place, dict) else []
        values, keys = iter(self.values), iter(self.tree.keys)
        attributes = [module.__dict__ for module in self.tree.modules()]
        places = [*attributes, *self.tree.dicts(self.values), *self.tree.lists(self.values)]
        for place, length in zip(places, self.tree.lengths, strict=True):
            held = [next(values) for _ in range(length)]
            yield place, held if isinstance(place, list) else {next(keys): value for value in held}

    def tensors(self) -> tuple[Tensor, ...]:
        """All but the buffers."""
        return self.tree.tensors(self.values)

    def buffers(self) -> list[list[Tensor]]:
        """Module by module."""
        return [[self.values[position] for position in some] for some in self.tree.buffers]


class Tree:
    """Where the values of a module, and of all modules in it, lie."""

    __slots__ = (
        "_all_tensors", "_attribute_types", "_bound", "_child_indices", "_children", "_constant_values", "_constants",
        "_item_types", "_modules", "buffers", "dicts", "empty", "keys", "lengths", "lists", "own_code", "tensors",
    )  # fmt: skip

    def __init__(self, root: Module) -> None:
        modules = _modules_in(root)
        self._modules = [weakref.ref(module) for module in modules]
        self.own_code = [index for index, module in enumerate(modules) if methods_of_forward(type(module))]
        names = [name for module in modules for name in module.__dict__]
        held = _attributes_of(modules)
        containers = [place for place, value in enumerate(held) if isinstance(value, _CONTAINERS)]
        self.empty = _getter([place for place in containers if not held[place]])
        dicts = [place for place in containers if held[place] and isinstance(held[place], dict)]
        lists = [place for place in containers if held[place] and isinstance(held[place], list)]
        self.dicts, self.lists = _getter(dicts), _getter(lists)
        values = held.copy()
        self.keys, self.lengths = self._add_items(modules, values)
        self._attribute_types, self._item_types = list(map(type, held)), list(map(type, values[len(held) :]))
        owners = [*range(len(held)), *(place for place in (*dicts, *lists) for _ in held[place])]
        self._sort(modules, names, owners, values)

    def _sort(self, modules: list[Module], names: list[str], owners: list[int], values: list[Any]) -> None:
        """Finds where tensors, modules, and values that must stay the same lie.

        Args:
            modules: all of them.
            names: of their attributes.
            owners: the attribute that each value is, or lies in, by position.
            values: all of them.
        """
        index_of = {id(module): index for index, module in enumerate(modules)}
        tensors, children, constants, bound = [], [], [], []
        for position, value in enumerate(values):
            if position < len(names) and isinstance(value, _CONTAINERS):
                continue
            if isinstance(value, Tensor):
                tensors.append(position)
            elif isinstance(value, Module):
                children.append(position)
            elif not _is_fixed(value):
                raise _UnlikeError
            elif isinstance(value, (tuple, FunctionType, BuiltinFunctionType)):
                constants.append(position)
            elif isinstance(value, (MethodType, partial)):
                bound.append(position)
        buffers: dict[int, list[int]] = {}
        for position in tensors:
            if names[owners[position]] == "_buffers":
                buffers.setdefault(owners[position], []).append(position)
        self.buffers = list(buffers.values())
        self.tensors = _getter([place for place in tensors if owners[place] not in buffers])
        self._all_tensors = _getter(tensors)
        self._children, self._constants, self._bound = _getter(children), _getter(constants), _getter(bound)
        self._child_indices = [index_of[id(values[position])] for position in children]
        self._constant_values = [_constant(value) for value in self._constants(values)]

    def modules(self) -> list[Module]:
        """The modules, the root first."""
        found = [module for reference in self._modules if (module := reference()) is not None]
        if len(found) != len(self._modules):
            raise _UnlikeError
        return found

    def read(self) -> list[Any]:
        """All values as they are now; raises if the modules have another tree by now."""
        modules = self.modules()
        values = _attributes_of(modules)
        num_attributes = len(values)
        if list(map(type, values)) != self._attribute_types:
            raise _UnlikeError
        if (
            self._add_items(modules, values) != (self.keys, self.lengths)
            or list(map(type, values[num_attributes:])) != self._item_types
            or any(map(is_not, map(_constant, self._constants(values)), self._constant_values))
            or not all(map(_is_fixed, self._bound(values)))
            or any(map(is_not, self._children(values), map(modules.__getitem__, self._child_indices)))
            or any(tensor.grad_fn is not None for tensor in self._all_tensors(values))
        ):
            raise _UnlikeError
        return values

    def holds(self, values: list[Any]) -> bool:
        """Whether all values are still these."""
        modules = self.modules()
        now = _attributes_of(modules)
        num_attributes = len(now)
        if num_attributes != len(self._attribute_types) or any(map(is_not, now, values)):
            return False
        try:
            is_alike = self._add_items(modules, now) == (self.keys, self.lengths)
        except _UnlikeError:
            return False
        return is_alike and not any(map(is_not, now[num_attributes:], values[num_attributes:]))

    def _add_items(self, modules: Sequence[Module], values: list[Any]) -> tuple[list[Any], list[int]]:
        """Adds what lies in containers to the values of all attributes.

        Returns:
            The keys of all dictionaries, and the lengths of all containers but the empty ones.
        """
        if any(self.empty(values)):
            raise _UnlikeError
        attributes, dicts, lists = [m.__dict__ for m in modules], self.dicts(values), self.lists(values)
        values.extend(chain.from_iterable(map(dict.values, dicts)))
        values.extend(chain.from_iterable(lists))
        keys = list(chain(chain.from_iterable(attributes), chain.from_iterable(dicts)))
        return keys, list(map(len, chain(attributes, dicts, lists)))


def _attributes_of(modules: Sequence[Module]) -> list[Any]:
    """The values of all their attributes."""
    return list(chain.from_iterable([module.__dict__.values() for module in modules]))


def _getter(positions: list[int]) -> _Get:
    """A function that takes the values at some positions out of a list."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return (lambda values: (values[positions[0]],)) if positions else lambda values: ()


def _modules_in(root: Module) -> list[Module]:
    """A module, and those in the containers and attributes of each; raises if one is unusual."""
    found: dict[int, Module] = {}
    stack = [root]
    while stack:
        module = stack.pop()
        if id(module) in found:
            continue
        if isinstance(module, (torch.jit.ScriptModule, LazyModuleMixin)):
            raise _UnlikeError
        found[id(module)] = module
        for name, value in module.__dict__.items():
            if not isinstance(value, _CONTAINERS):
                stack += [value] if isinstance(value, Module) else []
            elif value and name != "_non_persistent_buffers_set":
                # An ordered dictionary, of hooks, may be reordered without a trace in what is read.
                if type(value) not in (dict, list) or len(value) > _MOST_ITEMS:
                    raise _UnlikeError
                items = value.values() if isinstance(value, dict) else value
                stack += [item for item in items if isinstance(item, Module)]
    return list(found.values())


def _is_fixed(value: Any) -> bool:
    """Whether a value leads to nothing that a replay could find changed."""
    if isinstance(value, FunctionType):
        return is_library(value.__code__.co_filename)
    if isinstance(value, tuple):
        return type(value) is tuple and all(type(part) in _PLAIN for part in value)
    if isinstance(value, (BuiltinFunctionType, MethodWrapperType)):
        return value.__self__ is None or isinstance(value.__self__, (ModuleType, type))
    if isinstance(value, (MethodType, partial)):
        # Partials in partials may go round in circles.
        return all(not isinstance(part, partial) and _is_fixed(part) for _, part in bound_parts(value))
    followed = (*_CONTAINERS, deque, Generator, Tensor, Module)
    return not isinstance(value, followed) and not is_own(type(value))


def _constant(value: Any) -> Any:
    """What tells a plain tuple, or a function, from others; of a function its code, since a closure leads anywhere."""
    return value.__code__ if isinstance(value, FunctionType) else value


class _Known:
    """The tree of a module, if it has one."""

    __slots__ = ("num_made", "tree")

    def __init__(self) -> None:
        self.tree: Tree | None = None
        self.num_made = 0


_known = ByIdentity(_Known)


def note_tree(root: Module) -> TreeState | None:
    """What a module and those in it hold; ``None`` if they have no tree."""
    known = _known.of(root)
    tree = known.tree
    while tree is not None or known.num_made < _MOST_TREES:
        try:
            if tree is None:
                known.num_made += 1
                tree = known.tree = Tree(root)
            return TreeState(tree, tree.read())
        except _UnlikeError:
            tree = known.tree = None
    return None
