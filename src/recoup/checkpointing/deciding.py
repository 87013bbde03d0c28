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

    __slots__ = ("_is_known", "_num_calls", "decides", "reference")

    def __init__(self, site: Any) -> None:
        self.decides = self._is_known = False
        self._num_calls = 0
        self.reference = weakref.ref(site, functools.partial(_remove, id(site)))

    def is_watched(self) -> bool:
        """Whether the next call is watched: the first, the 2nd, 4th, 8th, …, and all once a decision was found.

        Calls in replays and in measurements are not counted: of these only those before the first are watched.
        """
        if self.decides:
            return True
        if depth() or not is_sampling_as_usual():
            return not self._is_known
        self._num_calls += 1
        return self._num_calls & (self._num_calls - 1) == 0

    def note(self, num_decisions: int) -> None:
        """Notes what a watched call has shown."""
        self._is_known = True
        self.decides = self.decides or num_decisions > 0


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
