"""Notes that outlive a measurement: lists and counters that a step fills are put back, a queue is left alone."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any


class Tally:
    """Collects items, whoever restores lists."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()

    def add(self, item: Any = 1) -> None:
        self._queue.put(item)

    def take(self) -> list[Any]:
        """All items since the last time."""
        return [self._queue.get() for _ in range(self._queue.qsize())]

    def __len__(self) -> int:
        return self._queue.qsize()
