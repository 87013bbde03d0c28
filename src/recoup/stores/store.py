"""The activation store: arrays by unit number, under a limit, with exact accounts.

NOTE [ Store invariants ]

1. ``num_bytes`` is the sum of the held entries' bytes, always, and never above the budget.
2. A call either does all it says or, if it raises, nothing: what may fail (copying, packing, choosing whom to
   evict) comes before the first change.
3. One lock guards the accounts. Data is copied outside it: held arrays never change, so a reader needs only a
   reference. While a put copies, the new array exists besides what the budget counts.
4. An entry's ``order`` is never used twice, so it identifies the entry among all that a unit ever had.
"""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass, replace
from typing import Any

from recoup.errors import NotHeldError, StoreError, StoreFullError
from recoup.numbers import finite_number, whole_number
from recoup.sizes import format_bytes, parse_bytes
from recoup.stores.arrays import Array, expect_array
from recoup.stores.eviction import Candidate, Eviction, choose_victims
from recoup.stores.holding import Held, Place, held_bytes, hold
from recoup.stores.precision import Precision
from recoup.stores.records import EntryInfo, StoreStats
from recoup.stores.settings import Settings

__all__ = ["ActivationStore"]


@dataclass
class _Entry(Candidate):
    unit: int
    held: Held


class ActivationStore:
    """Holds copies of arrays, one per unit, within a byte budget and a number of entries.

    Takes torch tensors on any device and NumPy arrays, and gives back the same kind. Safe to use from several
    threads.

    Args:
        budget: the most bytes to hold, as a number or text such as ``"64MiB"``; None for no limit.
        max_entries: the most entries to hold; None for no limit.
        evict: what makes room at a limit: the ``"oldest"`` entry, the ``"least_valuable"`` (lowest cost per
            byte and time since its last use), or nothing: ``"refuse"``.
        precision: None to hold data exactly; ``"bfloat16"``, ``"float16"`` or ``"int8"`` to hold floats in
            fewer bits (`recoup.stores.error_bound` says how far off they come back).
        place: ``"same"`` to hold tensors on their device, ``"host"`` in the host's memory.
        num_units: how many units there are; None if any number from 0 may come.

    Raises:
        StoreError: if a setting makes no sense (for sizes `SizeError`, for precisions `PrecisionError`).

    >>> import numpy as np
    >>> store = ActivationStore(budget="100B")
    >>> for unit in range(5):
    ...     _ = store.put(unit, np.full(10, unit, np.float32))
    >>> store.held_units(), store.num_bytes
    ((3, 4), 80)
    """

    def __init__(
        self,
        *,
        budget: int | str | None = None,
        max_entries: int | None = None,
        evict: Eviction = "oldest",
        precision: Precision | None = None,
        place: Place = "same",
        num_units: int | None = None,
    ) -> None:
        budget_bytes = None if budget is None else parse_bytes(budget)
        self._settings = Settings(budget_bytes, max_entries, evict, precision, place, num_units)
        self._lock = threading.Lock()
        self._next_order = 0
        self._clock = 0
        self._fates: dict[int, str] = {}
        self._reset()

    def _reset(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._infos: dict[int, EntryInfo] = {}
        self._saved: dict[int, int] = {}
        self._num_bytes = self._num_created = self._num_evicted = 0

    def put(self, unit: int, array: Array, *, cost: float = 0.0) -> EntryInfo:
        """Holds a copy of an array, in place of what was held for the unit, and evicts others as needed.

        Args:
            unit: the unit whose input this is.
            array: a torch tensor (held without its history) or a NumPy array.
            cost: what recomputing it would cost, in any one unit of measure.

        Raises:
            StoreFullError: if it is larger than the whole budget, or nothing may be evicted.
            PrecisionError: if it has values that the store's precision cannot hold.
            UnitRangeError: if there is no such unit.
            StoreError: if it is no array, or the cost is negative or not finite.

        After any of these the store is as it was before.
        """
        unit = self._settings.checked_unit(unit)
        expect_array(f"Unit {unit} cannot be stored", array, StoreError)
        cost = finite_number(f"The cost of unit {unit} must be", cost, StoreError)
        with self._lock:
            # Asked first so that an array that will not fit is not copied in vain.
            self._make_room(unit, held_bytes(array, self._settings.precision))
        held = hold(
            array, precision=self._settings.precision, place=self._settings.place, name=f"Unit {unit}"
        )
        with self._lock:
            return self._admit(unit, held, cost)

    def get(self, unit: int, *, order: int | None = None) -> Any:
        """Gives a copy of what is held for a unit: it is the caller's to change.

        Args:
            unit: the unit.
            order: accept only the entry that `put` returned with this order, not a later one.

        Raises:
            NotHeldError: if nothing is held for it; says why.
            UnitRangeError: if there is no such unit.
        """
        with self._lock:
            entry = self._find(unit, order)
            self._clock += 1
            entry.last_used = self._clock
        return entry.held.give_back(must_copy=True)

    def take(self, unit: int) -> Any:
        """Gives what is held for a unit and forgets it.

        Raises:
            NotHeldError: if nothing is held for it; says why.
            UnitRangeError: if there is no such unit.
        """
        with self._lock:
            entry = self._find(unit, None)
            self._forget(entry, "it was taken. Use get() to read it more than once")
        return entry.held.give_back(must_copy=False)

    def drop(self, unit: int, num_bytes: int) -> None:
        """Counts an activation that is deliberately not stored as saved; what was held for the unit goes.

        Raises:
            UnitRangeError: if there is no such unit.
            StoreError: if the number of bytes is negative.
        """
        unit = self._settings.checked_unit(unit)
        num_bytes = whole_number("num_bytes must be", num_bytes, StoreError)
        with self._lock:
            if unit in self._entries:
                self._forget(self._entries[unit], "")
            self._fates[unit] = "it was dropped. Recompute it, or keep it in the forward"
            self._saved[unit] = num_bytes

    def remove(self, unit: int) -> bool:
        """Forgets what is held for a unit, if anything, and tells whether there was something.

        Raises:
            UnitRangeError: if there is no such unit.
        """
        unit = self._settings.checked_unit(unit)
        with self._lock:
            entry = self._entries.get(unit)
            if entry is not None:
                self._forget(entry, "it was removed. Put it again, or recompute it")
        return entry is not None

    def clear(self) -> None:
        """Forgets all entries, what was known about them, and all accounts."""
        with self._lock:
            self._fates = dict.fromkeys(self._entries, "the store was cleared. Put it again")
            self._reset()

    def __contains__(self, unit: object) -> bool:
        with self._lock:
            return unit in self._entries

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def __repr__(self) -> str:
        stats = self.stats()
        limit = "no budget" if stats.budget_bytes is None else f"of {format_bytes(stats.budget_bytes)}"
        return f"<ActivationStore: {stats.num_in_memory} entries, {format_bytes(stats.num_bytes)}, {limit}>"

    def info(self, unit: int) -> EntryInfo:
        """Gives what is known about a unit's latest entry, also after it has left the store.

        Raises:
            NotHeldError: if the unit was never stored.
            UnitRangeError: if there is no such unit.
        """
        unit = self._settings.checked_unit(unit)
        with self._lock:
            if unit not in self._infos:
                raise self._not_held(unit)
            return self._infos[unit]

    def stats(self) -> StoreStats:
        """Gives the store's figures at this moment."""
        budget_bytes = self.budget_bytes
        with self._lock:
            return StoreStats(
                num_created=self._num_created,
                num_in_memory=len(self._entries),
                num_bytes=self._num_bytes,
                budget_bytes=budget_bytes,
                utilisation=self._num_bytes / budget_bytes if budget_bytes else 0.0,
                saved_bytes=sum(self._saved.values()),
                num_evicted=self._num_evicted,
            )

    def held_units(self) -> tuple[int, ...]:
        """Lists the units that are held, in ascending order."""
        with self._lock:
            return tuple(sorted(self._entries))

    @property
    def num_bytes(self) -> int:
        """The bytes held now."""
        return self._num_bytes

    @property
    def budget_bytes(self) -> int | None:
        """The most bytes that may be held, or None."""
        return self._settings.budget_bytes

    @property
    def max_entries(self) -> int | None:
        """The most entries that may be held, or None."""
        return self._settings.max_entries

    @property
    def evict(self) -> Eviction:
        """What makes room at a limit."""
        return self._settings.evict

    @property
    def precision(self) -> Precision | None:
        """In what floats are held; None for exactly."""
        return self._settings.precision

    @property
    def place(self) -> Place:
        """Where tensors are held."""
        return self._settings.place

    @property
    def num_units(self) -> int | None:
        """How many units there are, or None for any number."""
        return self._settings.num_units

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the lock: a copy, also one that is pickled, holds the same entries and shares none."""
        with self._lock:
            state = self.__dict__ | {
                "_entries": {unit: replace(entry) for unit, entry in self._entries.items()}
            }
            return {
                name: value.copy() if isinstance(value, dict) else value
                for name, value in state.items()
                if name != "_lock"
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def __copy__(self) -> ActivationStore:
        # Not shallow: what is taken from a store is given away without a copy.
        return copy.deepcopy(self)

    def _admit(self, unit: int, held: Held, cost: float) -> EntryInfo:
        num_bytes = held.num_bytes
        victims = self._make_room(unit, num_bytes)
        for victim in victims:
            advice = f"Recompute it, or raise {self._settings.limits()}"
            self._forget(victim, f"it was evicted to make room for unit {unit}. {advice}")
        if unit in self._entries:
            self._forget(self._entries[unit], "")
        self._num_evicted += len(victims)
        self._saved.pop(unit, None)
        self._fates.pop(unit, None)
        self._clock += 1
        self._entries[unit] = _Entry(self._next_order, num_bytes, cost, self._clock, unit, held)
        self._infos[unit] = EntryInfo(unit, self._next_order, num_bytes, cost, in_memory=True)
        self._next_order += 1
        self._num_created += 1
        self._num_bytes += num_bytes
        return self._infos[unit]

    def _make_room(self, unit: int, num_bytes: int) -> list[_Entry]:
        """Chooses what must leave before an entry of this size comes; changes nothing."""
        budget_bytes, max_entries = self._settings.budget_bytes, self._settings.max_entries
        if budget_bytes is not None and num_bytes > budget_bytes:
            raise StoreFullError(
                f"Unit {unit} needs {format_bytes(num_bytes)}, more than the whole budget of "
                f"{format_bytes(budget_bytes)}. Raise the budget, or store in fewer bits (precision=…)."
            )
        # What is held for the same unit goes in any case.
        own = self._entries.get(unit)
        other_bytes = self._num_bytes - (own.num_bytes if own else 0)
        num_others = len(self._entries) - (own is not None)
        victims = choose_victims(
            self._settings.evict,
            (entry for entry in self._entries.values() if entry is not own),
            excess_bytes=0 if budget_bytes is None else other_bytes + num_bytes - budget_bytes,
            excess_entries=0 if max_entries is None else num_others + 1 - max_entries,
            now=self._clock + 1,
        )
        if victims is None:
            free_bytes = (budget_bytes or 0) - other_bytes
            raise StoreFullError(
                self._settings.full_message(unit, num_bytes=num_bytes, free_bytes=free_bytes)
            )
        return victims

    def _forget(self, entry: _Entry, fate: str) -> None:
        del self._entries[entry.unit]
        self._infos[entry.unit] = replace(self._infos[entry.unit], in_memory=False)
        self._num_bytes -= entry.num_bytes
        self._fates[entry.unit] = fate

    def _find(self, unit: int, order: int | None) -> _Entry:
        entry = self._entries.get(self._settings.checked_unit(unit))
        if entry is None:
            raise self._not_held(unit)
        if order is not None and entry.order != order:
            raise NotHeldError(
                f"Unit {unit} is held, but not the entry of order {order}: it was replaced by {entry.order}. "
                "Give every run its own store to keep both."
            )
        return entry

    def _not_held(self, unit: int) -> NotHeldError:
        fate = self._fates.get(unit, "it was never stored. Put it first")
        return NotHeldError(f"Unit {unit} is not held: {fate}.")
