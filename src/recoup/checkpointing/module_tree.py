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
    4. Values are compared by identity, never by `==`: an equal tensor is another one, and 1 is not True. Keys are
       compared by `==`, and are strings or integers.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
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
"""Of one module, in a row: if it changes all the time, one is made in the 8th, 16th, 32nd, … call without one only."""
_LASTING = 8
"""A tree that was read so often was worth its while."""

_Get = Callable[[Sequence[Any]], tuple[Any, ...]]


class _UnlikeError(Exception):
    """The modules have no tree, or another one."""


class TreeState(NamedTuple):
    """What the modules of a tree held.

    Attributes:
        tree: of these modules.
        values: of all attributes, then of all containers.
        dicts: the dictionaries among the attributes that were not empty.
        lists: the lists that were not empty.
        empty: the containers that were.
    """

    tree: Tree
    values: list[Any]
    dicts: tuple[dict[Any, Any], ...]
    lists: tuple[list[Any], ...]
    empty: tuple[Any, ...]

    def is_unchanged(self) -> bool:
        """Whether every place holds the same objects."""
        if any(self.empty):
            return False
        attributes = _attributes_of(self.tree.modules())
        now = chain(_values_of(attributes), _values_of(self.dicts), chain.from_iterable(self.lists))
        return not any(map(is_not, now, self.values)) and self.tree.is_like(
            attributes, self.dicts, self.lists
        )

    def places(self) -> Iterator[tuple[Any, Any]]:
        """Every container, with a copy of what it held."""
        for place in self.empty:
            yield place, {} if isinstance(place, dict) else []
        values, keys = iter(self.values), iter(self.tree.keys)
        places = [*_attributes_of(self.tree.modules()), *self.dicts, *self.lists]
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
        "_dicts", "_empty", "_item_types", "_lists", "_modules", "buffers", "keys", "lengths", "own_code", "tensors",
    )  # fmt: skip

    def __init__(self, root: Module) -> None:
        modules = _modules_in(root)
        self._modules = [weakref.ref(module) for module in modules]
        self.own_code = [index for index, module in enumerate(modules) if methods_of_forward(type(module))]
        attributes = _attributes_of(modules)
        names = list(chain.from_iterable(attributes))
        held = list(_values_of(attributes))
        containers = [place for place, value in enumerate(held) if isinstance(value, _CONTAINERS)]
        self._empty = _getter([place for place in containers if not held[place]])
        dicts = [place for place in containers if held[place] and isinstance(held[place], dict)]
        lists = [place for place in containers if held[place] and isinstance(held[place], list)]
        self._dicts, self._lists = _getter(dicts), _getter(lists)
        items = [*_values_of(self._dicts(held)), *chain.from_iterable(self._lists(held))]
        self._attribute_types, self._item_types = list(map(type, held)), list(map(type, items))
        self.keys = _keys_of(attributes, self._dicts(held))
        if not all(type(key) in (str, int) for key in self.keys):
            raise _UnlikeError
        self.lengths = list(map(len, chain(attributes, self._dicts(held), self._lists(held))))
        owners = [*range(len(held)), *(place for place in (*dicts, *lists) for _ in held[place])]
        self._sort(modules, names, owners, held + items)

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

    def read(self) -> TreeState:
        """What the modules hold now; raises if they have another tree by now."""
        modules = self.modules()
        attributes = _attributes_of(modules)
        values = list(_values_of(attributes))
        if list(map(type, values)) != self._attribute_types:
            raise _UnlikeError
        dicts, lists, empty = self._dicts(values), self._lists(values), self._empty(values)
        items = [*_values_of(dicts), *chain.from_iterable(lists)]
        values += items
        if (
            any(empty)
            or not self.is_like(attributes, dicts, lists)
            or list(map(type, items)) != self._item_types
            or any(map(is_not, map(_constant, self._constants(values)), self._constant_values))
            or not all(map(_is_fixed, self._bound(values)))
            or any(map(is_not, self._children(values), map(modules.__getitem__, self._child_indices)))
            or any(tensor.grad_fn is not None for tensor in self._all_tensors(values))
        ):
            raise _UnlikeError
        return TreeState(self, values, dicts, lists, empty)

    def is_like(
        self,
        attributes: Sequence[dict[str, Any]],
        dicts: Sequence[dict[Any, Any]],
        lists: Sequence[list[Any]],
    ) -> bool:
        """Whether attributes and containers have the keys and lengths of this tree."""
        lengths = list(map(len, chain(attributes, dicts, lists)))
        return lengths == self.lengths and _keys_of(attributes, dicts) == self.keys


def _attributes_of(modules: Sequence[Module]) -> list[dict[str, Any]]:
    return [module.__dict__ for module in modules]


def _values_of(dicts: Iterable[dict[Any, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, dicts))


def _keys_of(attributes: Iterable[dict[str, Any]], dicts: Iterable[dict[Any, Any]]) -> list[Any]:
    return list(chain(chain.from_iterable(attributes), chain.from_iterable(dicts)))


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

    __slots__ = ("num_missed", "num_read", "tree")

    def __init__(self) -> None:
        self.tree: Tree | None = None
        self.num_missed = self.num_read = 0


_known = ByIdentity(_Known)


def note_tree(root: Module) -> TreeState | None:
    """What a module and those in it hold; ``None`` if they have no tree."""
    known = _known.of(root)
    if known.tree is not None:
        try:
            found = known.tree.read()
        except _UnlikeError:
            known.tree = None
            if known.num_read > _LASTING:
                known.num_missed = 0
        else:
            known.num_read += 1
            return found
    known.num_missed += 1
    if known.num_missed > _MOST_TREES and known.num_missed.bit_count() > 1:
        return None
    try:
        tree = Tree(root)
        found = tree.read()
    except _UnlikeError:
        return None
    known.tree, known.num_read = tree, 1
    return found
