"""What is known of objects for as long as they live, found by their identity."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

__all__ = ["ByIdentity"]

T = TypeVar("T")


class ByIdentity(Generic[T]):
    """One value for each object that is asked about; an object's value goes with the object.

    By identity, since modules may be compared by their contents.

    Args:
        make: makes the value of an object that is asked about for the first time. The value must not refer to the
            object, or neither would ever be freed.

    >>> counts = ByIdentity(list)
    >>> owner = type("Owner", (), {})()
    >>> counts.of(owner).append(1)
    >>> counts.of(owner), len(counts)
    ([1], 1)
    >>> del owner
    >>> len(counts)
    0
    """

    __slots__ = ("_found", "_make")

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._found: dict[int, tuple[T, weakref.ref[Any]]] = {}

    def of(self, owner: Any) -> T:
        """The value of an object."""
        try:  # the usual case costs no more than a look into a dictionary: this runs in every call
            return self._found[id(owner)][0]
        except KeyError:
            # `_remove` is given all that it needs: owners may outlive the names of this file, when Python ends.
            reference = weakref.ref(owner, partial(_remove, self._found, id(owner)))
            return self._found.setdefault(id(owner), (self._make(), reference))[0]

    def __len__(self) -> int:
        return len(self._found)


def _remove(found: dict[int, Any], key: int, reference: weakref.ref[Any]) -> None:
    found.pop(key, None)
