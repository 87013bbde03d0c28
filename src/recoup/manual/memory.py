"""The activations that one run can reach."""

from __future__ import annotations

from typing import Any

from recoup.errors import NotHeldError, StoreFullError
from recoup.stores import ActivationStore
from recoup.stores.arrays import copy_array

__all__ = ["Memory"]


class Memory:
    """What a run holds: entries of its own in a store that others may use too, and perhaps the chain's input.

    `keep`, `drop` and `load` act on one unit at a time. Together with running a step forward or backward they
    are all that a run is made of, so a schedule can drive them as well as a policy does.

    Args:
        store: where activations go.
        chain_input: a copy of the first unit's input that no store counts and nothing evicts; None to do without.
        first_unit: the number of that unit in the store.
    """

    def __init__(self, store: ActivationStore, chain_input: Any | None, first_unit: int = 0) -> None:
        self.store, self.first_unit = store, first_unit
        self.why_lost = ""
        """Why the latest entry that was gone is gone."""
        self._chain_input = chain_input
        # Another run in the same store has its own entries under the same units: the order tells them apart.
        self._orders: dict[int, int] = {}

    def keep(self, unit: int, array: Any, *, cost: float = 0.0) -> None:
        """Holds a copy of a unit's input; if the store refuses for want of room, drops it instead."""
        try:
            self._orders[unit] = self.store.put(unit, array, cost=cost).order
        except StoreFullError:
            self.drop(unit, array)

    def drop(self, unit: int, array: Any) -> None:
        """Counts a unit's input as saved instead of holding it."""
        self._orders.pop(unit, None)
        self.store.drop(unit, array.nbytes)

    def load(self, unit: int) -> Any | None:
        """Gives a copy of a unit's input, or None if it is not held."""
        # Before the store, whose copy may have fewer bits.
        if unit == self.first_unit and self._chain_input is not None:
            return copy_array(self._chain_input)
        if unit in self._orders:
            try:
                return self.store.get(unit, order=self._orders[unit])
            except NotHeldError as error:
                # Evicted, taken, or replaced by another run: gone for good.
                del self._orders[unit]
                self.why_lost = str(error)
        return None

    def held_units(self) -> tuple[int, ...]:
        """Lists the units that the store still holds for this run, in ascending order."""
        infos = [self.store.info(unit) for unit in self._orders if unit in self.store]
        return tuple(sorted(info.unit for info in infos if info.order == self._orders[info.unit]))
