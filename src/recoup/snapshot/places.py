"""Places that hold Python state: what each holds now, and how to make it hold that again.

A place is a dictionary, list, set or deque, a closure cell, a `GlobalName`, or an `Accessor`. Items are
compared by identity, since they may refuse to be compared. Containers are changed in place, since others refer to them,
and by the built-in class's own methods, since a subclass may refuse to be changed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_not
from types import CellType, MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from recoup.snapshot.own_code import UNBOUND, content_of

__all__ = ["Accessor", "GlobalName", "Snapshot", "hold_hooks", "holds", "look", "put", "replace"]


class GlobalName(NamedTuple):
    """A global variable that a function names."""

    namespace: dict[str, Any]
    name: str


class Accessor(NamedTuple):
    """A place as functions."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    holds: Callable[[Any], bool] = lambda then: True
    """Whether it still holds what was read, as far as that is told."""


_NOTHING: Mapping[Any, Any] = MappingProxyType({})
"""What an empty dictionary holds: most are, and a model has thousands."""


def look(place: Any) -> Any:
    """What a place holds: of a container a copy."""
    if isinstance(place, dict):
        return dict(_kind_of(place).items(place)) if place else _NOTHING
    if isinstance(place, CellType):
        return content_of(place)
    if isinstance(place, GlobalName):
        return place.namespace.get(place.name, UNBOUND)
    if isinstance(place, Accessor):
        return place.read()
    return list(place)


def holds(place: Any, wanted: Any) -> bool:
    """Whether a place holds exactly what is wanted."""
    if type(place) is dict:  # most places are
        return (
            len(place) == len(wanted)
            and not any(map(is_not, place.values(), wanted.values()))
            and not any(map(is_not, place, wanted))
        )
    if isinstance(place, (CellType, GlobalName)):
        return look(place) is wanted
    if isinstance(place, Accessor):
        return place.holds(wanted)
    if len(place) != len(wanted) or any(map(is_not, place, wanted)):
        return False
    return not isinstance(place, dict) or not any(map(is_not, _kind_of(place).values(place), wanted.values()))


def _kind_of(place: dict[Any, Any]) -> type[dict[Any, Any]]:
    """The built-in class whose methods a dictionary is read and changed by: a subclass may compute what it returns."""
    return OrderedDict if isinstance(place, OrderedDict) else dict


def put(place: Any, wanted: Any) -> None:
    """Makes a place hold exactly what is wanted, and touches nothing that already does."""
    if isinstance(place, Accessor):
        place.write(wanted)
    elif not holds(place, wanted):
        replace(place, wanted)


def replace(place: Any, wanted: Any) -> None:
    """Makes a container or variable that holds something else hold what is wanted."""
    if isinstance(place, dict):
        _put_items(place, wanted)
    elif isinstance(place, list):
        list.__setitem__(place, slice(None), wanted)
    elif isinstance(place, (CellType, GlobalName)):
        _bind(place, wanted)
    elif isinstance(place, deque):
        deque.clear(place)
        deque.extend(place, wanted)
    else:
        set.clear(place)
        set.update(place, wanted)


def _bind(place: CellType | GlobalName, wanted: Any) -> None:
    if isinstance(place, GlobalName):
        if wanted is UNBOUND:
            del place.namespace[place.name]
        else:
            place.namespace[place.name] = wanted
    elif wanted is UNBOUND:
        del place.cell_contents
    else:
        place.cell_contents = wanted


def _put_items(place: dict[Any, Any], wanted: Mapping[Any, Any]) -> None:
    kind = _kind_of(place)
    if len(place) != len(wanted) or any(map(is_not, place, wanted)):
        kind.clear(place)
    for key, value in wanted.items():
        if kind.get(place, key, UNBOUND) is not value:
            kind.__setitem__(place, key, value)


class Snapshot:
    """Places, with their names and what they held.

    >>> cache = [1]
    >>> snapshot = Snapshot()
    >>> snapshot.add(cache, "cache")
    >>> cache.append(2)
    >>> snapshot.changed()
    ['cache']
    >>> snapshot.put_back()
    >>> cache
    [1]
    """

    def __init__(self) -> None:
        # Lists, not tuples of the three: each of thousands would bring the next garbage collection nearer.
        self._names: list[str] = []
        self._places: list[Any] = []
        self._then: list[Any] = []
        self._restores: list[Callable[[], None]] = []

    def add(self, place: Any, name: str = "") -> None:
        """Notes what a place holds."""
        self.add_all([place], [name])

    def add_all(self, places: Sequence[Any], names: Sequence[str]) -> None:
        """Notes what several places hold."""
        self._names += names
        self._places += places
        self._then += map(look, places)

    def add_hooks(self, tensors: Iterable[Tensor]) -> None:
        """Notes the hooks on the gradients of tensors."""
        self._restores.append(hold_hooks(list(tensors)))

    def changed(self) -> list[str]:
        """The names of places that hold something else: not the same objects, nor equal numbers or texts."""
        held = zip(self._names, self._places, self._then, strict=True)
        return [name for name, place, then in held if not (holds(place, then) or _is_equal(place, then))]

    def put_back(self) -> None:
        """Makes every place hold what it held; one that fails does not keep the others from it."""
        errors = []
        for place, then in zip(self._places, self._then, strict=True):
            if then is _NOTHING and not place:
                continue
            try:
                put(place, then)
            except Exception as error:
                errors.append(error)
        for restore in self._restores:
            restore()
        if errors:
            raise errors[0]


def _is_equal(place: Any, then: Any) -> bool:
    if isinstance(place, set):
        return place == set(then)
    if isinstance(place, dict):
        return _is_equal(list(place), list(then)) and _is_equal(list(place.values()), list(then.values()))
    if isinstance(place, (list, deque)):
        return len(place) == len(then) and all(map(_is_same, place, then))
    return not isinstance(place, Accessor) and _is_same(look(place), then)


def _is_same(now: Any, then: Any) -> bool:
    return now is then or (isinstance(now, (int, float, str)) and type(now) is type(then) and now == then)


def hold_hooks(tensors: list[Tensor]) -> Callable[[], None]:
    """Notes the hooks on the gradients of tensors; returns what removes others, as often as it is called."""
    then = {
        id(t): [hooks and hooks.copy() for hooks in _hooks_of(t)]
        for t in tensors
        if t._backward_hooks or t._post_accumulate_grad_hooks
    }

    def restore() -> None:
        for tensor in tensors:
            if not (tensor._backward_hooks or tensor._post_accumulate_grad_hooks):  # hardly any has
                continue
            for position, hooks in enumerate(_hooks_of(tensor)):
                if hooks:
                    before = then.get(id(tensor), (None, None))[position] or {}
                    # In place: autograd, and the handles that remove hooks, know this dictionary.
                    if list(hooks) != list(before):
                        hooks.clear()
                        hooks.update(before)

    return restore


def _hooks_of(tensor: Tensor) -> tuple[Any, Any]:
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks
