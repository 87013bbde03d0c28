"""Bytes and seconds while a schedule runs: the clock, the device's memory and the links' queues."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from recoup.planning.problem import Link
from recoup.planning.simulation_result import Moment

__all__ = ["Ledger"]


class Ledger:
    """Counts live bytes over time. It knows nothing of units' meaning or of legality.

    NOTE [ Time ]
        1. Computation is one sequence. Each link has one queue per direction and runs beside it.
        2. A value that is sent keeps its device bytes until its move has ended.
        3. A value that is fetched takes its device bytes at once, and can be read when its move has ended.

    >>> ledger = Ledger(10, links=[Link("host", send_bytes_per_s=2.0, fetch_bytes_per_s=1.0)])
    >>> ledger.add(4)
    >>> ledger.send("host", 4, ready_s=0.0, unit=0)
    2.0
    >>> ledger.compute(3.0, extra_bytes=5, unit=1, phase="forward")
    >>> ledger.clock_s, ledger.live_bytes, ledger.peak.num_bytes
    (3.0, 10, 19)
    """

    def __init__(self, live_bytes: int, *, links: Sequence[Link] = ()) -> None:
        self.live_bytes = live_bytes
        self.clock_s = 0.0
        self.action = 0
        self.stored_bytes = {link.name: 0 for link in links}
        self.peak = Moment(0.0, live_bytes, 0, 0, "after")
        self.timeline = [self.peak]
        self._links = {link.name: link for link in links}
        self._send_free_s = {link.name: 0.0 for link in links}
        self._fetch_free_s = {link.name: 0.0 for link in links}
        self._leaving: list[tuple[float, int, int]] = []
        self._spans_s: list[float] = []
        self._waits_s: list[float] = []

    @property
    def seconds(self) -> float:
        """All that has passed, summed without rounding in between."""
        return math.fsum(self._spans_s + self._waits_s)

    @property
    def wait_s(self) -> float:
        """Seconds in which the computation waited for a link."""
        return math.fsum(self._waits_s)

    def add(self, num_bytes: int) -> None:
        """Takes (or, if negative, gives back) device bytes, without a moment of its own."""
        self.live_bytes += num_bytes

    def note(self, unit: int, phase: str) -> None:
        """Writes the present level into the timeline."""
        moment = Moment(self.clock_s, self.live_bytes, self.action, unit, phase)
        self.timeline.append(moment)
        if moment.num_bytes > self.peak.num_bytes:
            self.peak = moment

    def compute(self, span_s: float, *, extra_bytes: int, unit: int, phase: str) -> None:
        """Lets computation run for ``span_s`` with ``extra_bytes`` more than what is live."""
        self.live_bytes += extra_bytes
        self.note(unit, phase)
        self._pass_to(self.clock_s + span_s)
        self.live_bytes -= extra_bytes
        self._spans_s.append(span_s)

    def wait_until(self, time_s: float) -> None:
        """Lets the computation stand still until ``time_s``, if that is yet to come."""
        if time_s > self.clock_s:
            self._waits_s.append(time_s - self.clock_s)
            self._pass_to(time_s)

    def send(self, link: str, num_bytes: int, *, ready_s: float, unit: int) -> float:
        """Queues a move to the link's store, not before ``ready_s``; returns when it ends."""
        start_s = max(self.clock_s, self._send_free_s[link], ready_s)
        end_s = start_s + num_bytes / self._links[link].send_bytes_per_s
        self._send_free_s[link] = end_s
        self.stored_bytes[link] += num_bytes
        heapq.heappush(self._leaving, (end_s, num_bytes, unit))
        return end_s

    def fetch(self, link: str, num_bytes: int, *, ready_s: float, unit: int) -> float:
        """Queues a move back, not before ``ready_s``; returns when it ends."""
        start_s = max(self.clock_s, self._fetch_free_s[link], ready_s)
        end_s = start_s + num_bytes / self._links[link].fetch_bytes_per_s
        self._fetch_free_s[link] = end_s
        self.stored_bytes[link] -= num_bytes
        self.live_bytes += num_bytes
        self.note(unit, "fetch")
        return end_s

    def _pass_to(self, time_s: float) -> None:
        """Moves the clock, and frees on the way the bytes whose moves end."""
        while self._leaving and self._leaving[0][0] <= time_s:
            end_s, num_bytes, unit = heapq.heappop(self._leaving)
            self.clock_s = max(self.clock_s, end_s)
            self.live_bytes -= num_bytes
            self.note(unit, "sent")
        self.clock_s = time_s
