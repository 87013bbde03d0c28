"""Which call sites make decisions, and by which operations: found out on a few calls, so that little is watched."""

from __future__ import annotations

from typing import Any

from recoup.checkpointing.by_identity import ByIdentity
from recoup.checkpointing.decisions import ALL, NONE, Operations, intercept_all
from recoup.checkpointing.replay import depth
from recoup.checkpointing.sampling import is_sampling_as_usual

__all__ = ["DecidingSite", "deciding_site"]

_NUM_FIRST = 8


class DecidingSite:
    """Where calls come from, and by which operations these make decisions."""

    __slots__ = ("_gap", "_is_known", "_num_left", "_num_watched", "_operations")

    def __init__(self) -> None:
        self._is_known = False
        self._operations = NONE
        self._num_watched, self._num_left, self._gap = 0, 0, _NUM_FIRST
        """Calls until the next one that is watched, and from that to the one after it."""

    def watched(self) -> Operations:
        """What is watched in the next call: all in the first eight, the 16th, 32nd, …, else what has decided.

        Eight, since a step may call one site for several layers, of which only some decide.

        Of calls in replays and in measurements, all is watched in the first only.
        """
        if self._num_left:  # the usual case first: this runs in every call
            self._num_left -= 1
            return self._operations
        if depth() or not is_sampling_as_usual():
            return self._operations if self._is_known else ALL
        self._num_watched += 1
        if self._num_watched >= _NUM_FIRST:
            self._num_left, self._gap = self._gap - 1, 2 * self._gap
        return ALL

    def note(self, deciding: Operations) -> None:
        """Notes which operations have decided in a call of which all was watched."""
        self._is_known = True
        if new := deciding - self._operations:
            intercept_all(new)
            self._operations |= new


_sites = ByIdentity(DecidingSite)


def deciding_site(site: Any) -> DecidingSite:
    """What is known of a call site."""
    return _sites.of(site)
