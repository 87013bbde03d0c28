"""Running a unit again and again in the middle of a step, which must not notice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from recoup.measuring.named import named_objects
from recoup.measuring.notes import Notes
from recoup.measuring.preserve import held_random_state
from recoup.measuring.streaming import UnitCall

__all__ = ["undone"]


@contextmanager
def undone(call: UnitCall) -> Iterator[UnitCall]:
    """Puts back what runs of a call change outside of tensors, also if the block raises.

    Yields the call such that each run of it on fresh arguments begins from there.

    Back are: attributes of the unit's modules, objects that it is given, lists and dicts that hooks of modules inside
    it fill (also by way of a context variable), and the random state.
    """
    notes = Notes()
    notes.add_modules(call.module)
    notes.add_hooks(call.module)
    notes.add_context()
    for name, value in named_objects(call):
        notes.add_object(name, value)
    put_back_random_state = held_random_state()
    try:
        yield replace(call, reset=notes.put_back)
    finally:
        put_back_random_state()
        notes.put_back()
