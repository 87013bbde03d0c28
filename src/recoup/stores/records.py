"""What a store tells about its entries and about itself."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EntryInfo", "StoreStats"]


@dataclass(frozen=True)
class EntryInfo:
    """What is known about one entry, also after it has left the store.

    Attributes:
        unit: the unit whose input this is.
        order: its place in the order of creation; never used twice, not even after `ActivationStore.clear`.
        num_bytes: the bytes that it occupies, in the precision that it is held in.
        cost: what recomputing it costs, as given.
        in_memory: whether the store still has it.
    """

    unit: int
    order: int
    num_bytes: int
    cost: float
    in_memory: bool


@dataclass(frozen=True)
class StoreStats:
    """A store's figures at one moment.

    Attributes:
        num_created: entries put since the store was made or cleared, replacements included.
        num_in_memory: entries held now.
        num_bytes: bytes held now.
        budget_bytes: the limit, or None.
        utilisation: the share of the budget in use, from 0 to 1; 0 without a budget.
        saved_bytes: bytes of the activations that were dropped and not put since.
        num_evicted: entries pushed out since the store was made or cleared.
    """

    num_created: int
    num_in_memory: int
    num_bytes: int
    budget_bytes: int | None
    utilisation: float
    saved_bytes: int
    num_evicted: int
