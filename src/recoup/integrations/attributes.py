"""Attributes of a trainer that its step changes: counters and metrics. Measured and failed steps must not count."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from recoup.snapshot.places import Snapshot

__all__ = ["attributes_held", "hold_containers"]

_CONTAINERS = (dict, list, set, deque)
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
    snapshot = hold_containers([vars(owner)])
    try:
        yield
    finally:
        snapshot.put_back()


def hold_containers(values: Iterable[Any]) -> Snapshot:
    """Notes what containers among some values hold, and those in them; such with very many items are data, left out."""
    snapshot, seen = Snapshot(), set[int]()
    waiting = [value for value in values if isinstance(value, _CONTAINERS)]
    while waiting:
        place = waiting.pop()
        if id(place) in seen or len(place) > _MOST_ITEMS:
            continue
        seen.add(id(place))
        snapshot.add(place)
        items = place.values() if isinstance(place, dict) else place
        waiting += [item for item in items if isinstance(item, _CONTAINERS)]
    return snapshot
