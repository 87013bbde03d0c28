"""Attributes of a trainer that its step changes: counters and metrics, which must not count measured steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from recoup.snapshot.places import Snapshot

__all__ = ["attributes_held"]

_MOST_ITEMS = 1000


@contextmanager
def attributes_held(owner: Any) -> Iterator[None]:
    """A block after which an object's attributes, and the containers in them, hold what they held before.

    >>> from types import SimpleNamespace
    >>> trainer = SimpleNamespace(num_tokens=3, metrics={"loss": [0.5]})
    >>> with attributes_held(trainer):
    ...     trainer.num_tokens += 4
    ...     trainer.metrics["loss"].append(0.25)
    >>> trainer.num_tokens, trainer.metrics
    (3, {'loss': [0.5]})
    """
    snapshot = Snapshot()
    waiting: list[Any] = [vars(owner)]
    seen: set[int] = set()
    while waiting:
        place = waiting.pop()
        if id(place) in seen or len(place) > _MOST_ITEMS:
            continue
        seen.add(id(place))
        snapshot.add(place)
        items = place.values() if isinstance(place, dict) else place
        waiting += [item for item in items if isinstance(item, (dict, list, set, deque))]
    try:
        yield
    finally:
        snapshot.put_back()
