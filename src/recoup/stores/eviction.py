"""Which entries leave a store to make room for a new one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

__all__ = ["Candidate", "Eviction", "choose_victims", "value_density"]

Eviction: TypeAlias = Literal["oldest", "least_valuable", "refuse"]


@dataclass
class Candidate:
    """What the choice looks at: an entry's place in the order of creation, size, cost and last use."""

    order: int
    num_bytes: int
    cost: float
    last_used: int


_Entry = TypeVar("_Entry", bound=Candidate)


def choose_victims(
    evict: Eviction, candidates: Iterable[_Entry], *, excess_bytes: int, excess_entries: int, now: int
) -> list[_Entry] | None:
    """Chooses entries to evict, in turn, until enough bytes and enough places are free.

    Args:
        evict: the rule.
        candidates: the entries that may leave, in their order of creation.
        excess_bytes: how many bytes must come free; zero or less for none.
        excess_entries: how many entries must leave; zero or less for none.
        now: the store's clock, later than every entry's last use.

    Returns:
        The victims, or None if the rule does not free enough.

    >>> choose_victims("oldest", [], excess_bytes=0, excess_entries=0, now=1)
    []
    """
    victims: list[_Entry] = []
    if excess_bytes <= 0 and excess_entries <= 0:
        return victims
    for candidate in _in_turn(evict, candidates, now):
        victims.append(candidate)
        excess_bytes -= candidate.num_bytes
        excess_entries -= 1
        if excess_bytes <= 0 and excess_entries <= 0:
            return victims
    return None


def value_density(candidate: Candidate, now: int) -> float:
    """Gives what holding an entry is worth: its cost over its bytes and the time since its last use.

    This is the heuristic of Dynamic Tensor Rematerialization (Kirisame et al. 2021, section 4.1) with the
    store's own clock for time and the given cost for the cost of the neighbourhood. An entry without bytes
    frees nothing and is worth the most.
    """
    if candidate.num_bytes == 0:
        return math.inf
    return candidate.cost / (candidate.num_bytes * (now - candidate.last_used))


def _in_turn(evict: Eviction, candidates: Iterable[_Entry], now: int) -> Iterable[_Entry]:
    match evict:
        case "oldest":
            return candidates
        case "least_valuable":
            # Among equals the oldest goes, so that the same calls always evict the same entries.
            return sorted(candidates, key=lambda entry: (value_density(entry, now), entry.order))
        case "refuse":
            return ()
