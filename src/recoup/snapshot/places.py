"""Places that can be made to hold something else: variables, lists and dictionaries."""

from __future__ import annotations

from operator import is_not
from types import CellType
from typing import Any, NamedTuple

from torch import Tensor

__all__ = [
    "GlobalName",
    "bare",
    "clear_all",
    "holds",
    "look",
    "put",
    "put_all",
    "without_history",
]

_EMPTY = object()
_MOST_ITEMS = 1000


class GlobalName(NamedTuple):
    """A global variable that a function names."""

    namespace: dict[str, Any]
    name: str


def look(place: Any) -> Any:
    """What a place holds."""
    if isinstance(place, GlobalName):
        return place.namespace.get(place.name, _EMPTY)
    if isinstance(place, CellType):
        try:
            return place.cell_contents
        except ValueError:  # not bound
            return _EMPTY
    return place.copy()


def holds(place: Any, wanted: Any) -> bool:
    """Whether a place holds exactly what is wanted, by identity."""
    if isinstance(place, (CellType, GlobalName)):
        return look(place) is wanted
    if len(place) != len(wanted):
        return False
    if isinstance(place, list):
        return not any(map(is_not, place, wanted))
    return list(place) == list(wanted) and not any(map(is_not, place.values(), wanted.values()))


def put_all(places: list[tuple[Any, Any]]) -> None:
    """Makes places hold what is wanted."""
    for place, wanted in places:
        put(place, wanted)


def put(place: Any, wanted: Any) -> None:
    """Makes a place hold exactly what is wanted, by identity, and touches nothing that already does."""
    if holds(place, wanted):
        return
    if isinstance(place, (CellType, GlobalName)):
        _bind(place, wanted)
    elif isinstance(place, list):
        place[:] = wanted
    else:
        _put_items(place, wanted)


def clear_all(places: list[Any]) -> None:
    """Empties containers."""
    for place in places:
        if place:
            place.clear()


def _bind(place: CellType | GlobalName, wanted: Any) -> None:
    if isinstance(place, GlobalName):
        if wanted is _EMPTY:
            del place.namespace[place.name]
        else:
            place.namespace[place.name] = wanted
    elif wanted is _EMPTY:
        del place.cell_contents
    else:
        place.cell_contents = wanted


def _put_items(place: dict[Any, Any], wanted: dict[Any, Any]) -> None:
    if list(place) != list(wanted):
        sharded = {key: value for key, value in place.items() if _is_sharded(value)}
        place.clear()
        place.update(wanted | {key: value for key, value in sharded.items() if key in wanted})
    else:
        for key, value in wanted.items():
            present = place[key]
            if present is not value and not (_is_sharded(present) or _is_sharded(value)):
                place[key] = value


def _is_sharded(value: Any) -> bool:
    # By name: importing torch.distributed.tensor costs a second that most users never need.
    return type(value).__name__ == "DTensor"


def without_history(tensor: Tensor) -> Tensor:
    """The same data and version counter, and as much need of a gradient, but no graph."""
    if tensor.grad_fn is None:
        return tensor
    return tensor.detach().requires_grad_(tensor.requires_grad)


def bare(value: Any, deepest: int = 4) -> Any:
    """A value to be held: tensors without history, since a graph would lead to whatever was computed before."""
    if isinstance(value, Tensor):
        return without_history(value)
    if isinstance(value, tuple):
        items = [bare(item, deepest - 1) for item in value] if deepest else list(value)
        if not any(map(is_not, items, value)):
            return value
        if hasattr(type(value), "n_sequence_fields"):  # what torch.max and others return
            return type(value)(items)
        made = tuple.__new__(type(value), items)
        if hasattr(value, "__dict__"):
            made.__dict__.update(value.__dict__)
        return made
    if type(value) in (list, dict) and 0 < len(value) <= _MOST_ITEMS and deepest:
        found = {key: bare(item, deepest - 1) for key, item in _pairs(value)}
        if not any(map(is_not, found.values(), value.values() if isinstance(value, dict) else value)):
            return value
        return found if isinstance(value, dict) else list(found.values())
    return value


def _pairs(value: Any) -> Any:
    return value.items() if isinstance(value, dict) else enumerate(value)
