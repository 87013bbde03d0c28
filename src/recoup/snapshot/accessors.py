"""State that is no container nor variable, as places: tensors' storages, generators, arrays, slots, classes."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recoup.snapshot.own_code import UNBOUND, slots_of
from recoup.snapshot.places import Accessor
from recoup.tensors import storages, version_of

__all__ = ["class_attributes", "random_generator", "setting", "slot_values", "small_array", "tensor_data"]

_MOST_ARRAY_BYTES = 1 << 20
"""Larger arrays are data, which steps read."""


def setting(read: Callable[[], Any], write: Callable[[Any], Any]) -> Accessor:
    """A value that is written only where it differs."""

    def write_other(then: Any) -> None:
        if read() != then:
            write(then)

    return Accessor(read, write_other)


def tensor_data(tensor: Tensor) -> Accessor:
    """A tensor's storage, which ``tensor.data = …`` replaces, and its version, which tells whether values changed."""

    def write(then: tuple[Tensor, int]) -> None:
        if [one._cdata for one in storages(tensor.data)] != [one._cdata for one in storages(then[0])]:
            tensor.data = then[0]

    def holds(then: tuple[Tensor, int]) -> bool:
        return version_of(tensor) == then[1]

    return Accessor(lambda: (tensor.data, version_of(tensor)), write, holds)


def random_generator(value: Any) -> Accessor | None:
    """The state of a generator of random numbers: torch's, Python's or NumPy's; None for other objects."""
    if isinstance(value, torch.Generator):
        return Accessor(value.get_state, value.set_state)
    if isinstance(value, random.Random):
        return Accessor(value.getstate, value.setstate)
    numpy = sys.modules.get("numpy")  # not imported for this
    if numpy is None or not isinstance(value, (numpy.random.Generator, numpy.random.RandomState)):
        return None
    bits = value.bit_generator if isinstance(value, numpy.random.Generator) else value._bit_generator
    return Accessor(lambda: bits.state, partial(setattr, bits, "state"))


def small_array(value: Any) -> Accessor | None:
    """The values of a NumPy array; None for large ones, ones that cannot be written, and other objects."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        return None
    if value.nbytes > _MOST_ARRAY_BYTES or not value.flags.writeable:
        return None
    return Accessor(value.copy, partial(value.__setitem__, ...))


def slot_values(owner: Any) -> Accessor | None:
    """An object's slots, by descriptor; None if it has none."""
    slots = slots_of(type(owner))

    def read() -> dict[Any, Any]:
        found = {}
        for slot in slots:
            with suppress(AttributeError):  # empty
                found[slot] = slot.__get__(owner)
        return found

    def write(then: dict[Any, Any]) -> None:
        now = read()
        for slot in now.keys() - then.keys():
            slot.__delete__(owner)
        for slot, value in then.items():
            if now.get(slot, UNBOUND) is not value:
                slot.__set__(owner, value)

    return Accessor(read, write) if slots else None


def class_attributes(cls: type) -> Accessor:
    """What all objects of a class share."""

    def read() -> dict[str, Any]:
        return {key: value for key, value in vars(cls).items() if not key.startswith("__")}

    def write(then: dict[str, Any]) -> None:
        now = read()
        for key in now.keys() - then.keys():
            type.__delattr__(cls, key)
        for key, value in then.items():
            if now.get(key, UNBOUND) is not value:
                type.__setattr__(cls, key, value)

    return Accessor(read, write)
