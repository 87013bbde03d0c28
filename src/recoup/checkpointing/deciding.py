"""Which call sites make decisions: found out on their first calls, so that others are not watched in vain."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from recoup.checkpointing.replay import depth
from recoup.checkpointing.sampling import is_sampling_as_usual, site_of

__all__ = ["DecidingSite", "deciding_site"]


class DecidingSite:
    """Where calls come from, and whether these make decisions.

    Attributes:
        decides: whether any call has made a decision.
    """

    __slots__ = ("_gap", "_is_known", "_num_left", "decides", "reference")

    def __init__(self, site: Any) -> None:
        self.decides = self._is_known = False
        self._num_left, self._gap = 0, 1
        """Calls until the next one that is watched, and from that to the one after it."""
        self.reference = weakref.ref(site, functools.partial(_remove, id(site)))

    def is_watched(self) -> bool:
        """Whether the next call is watched: the first, the 2nd, 4th, 8th, …, and all once a decision was found.

        Of calls in replays and in measurements none is watched but the first.
        """
        if self._num_left:  # the usual case first: this runs in every call
            self._num_left -= 1
            return False
        if self.decides:
            return True
        if depth() or not is_sampling_as_usual():
            return not self._is_known
        self._num_left, self._gap = self._gap - 1, 2 * self._gap
        return True

    def note(self, num_decisions: int) -> None:
        """Notes what a watched call has shown."""
        self._is_known = True
        if num_decisions:
            self.decides, self._num_left = True, 0


# By identity, since modules may be compared by their contents.
_sites: dict[int, DecidingSite] = {}


def _remove(key: int, reference: Any) -> None:
    _sites.pop(key, None)


def deciding_site(fn: Any) -> DecidingSite:
    """The call site of a function."""
    site = site_of(fn)
    known = _sites.get(id(site))
    if known is None:
        known = _sites[id(site)] = DecidingSite(site)
    return known
