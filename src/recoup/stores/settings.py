"""A store's settings and what is checked against them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from recoup.errors import StoreError, UnitRangeError
from recoup.numbers import whole_number
from recoup.sizes import format_bytes
from recoup.stores.eviction import Eviction
from recoup.stores.holding import Place
from recoup.stores.precision import Precision, check_precision

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """What a store was made with; see `recoup.stores.ActivationStore` for the meanings.

    Raises:
        StoreError: if a setting makes no sense.
    """

    budget_bytes: int | None
    max_entries: int | None
    evict: Eviction
    precision: Precision | None
    place: Place
    num_units: int | None

    def __post_init__(self) -> None:
        _check_choice("evict", self.evict, get_args(Eviction))
        _check_choice("place", self.place, get_args(Place))
        check_precision(self.precision)
        for name in ("max_entries", "num_units"):
            if getattr(self, name) is not None:
                whole_number(f"{name} must be", getattr(self, name), StoreError)

    def checked_unit(self, unit: Any) -> int:
        """Gives a unit's number.

        Raises:
            UnitRangeError: if it is no whole number, or out of range.
        """
        number = whole_number("A unit is", unit, UnitRangeError)
        if self.num_units is not None and number >= self.num_units:
            raise UnitRangeError(
                f"Unit {number} is out of range: the store was made for {self.num_units} units, counted from "
                "0. Make it with a larger num_units."
            )
        return number

    def limits(self) -> str:
        """Names the limits that can make an entry leave.

        >>> Settings(96, 2, "oldest", None, "same", None).limits()
        'the budget of 96 B or max_entries=2'
        """
        budget = None if self.budget_bytes is None else f"the budget of {format_bytes(self.budget_bytes)}"
        entries = None if self.max_entries is None else f"max_entries={self.max_entries}"
        return " or ".join(limit for limit in (budget, entries) if limit)

    def full_message(self, unit: int, *, num_bytes: int, free_bytes: int) -> str:
        """Says why there is no room for an entry, and what to change."""
        if self.budget_bytes is not None and num_bytes > free_bytes:
            problem = (
                f"it needs {format_bytes(num_bytes)} and {format_bytes(free_bytes)} of the budget of "
                f"{format_bytes(self.budget_bytes)} are free"
            )
        else:
            problem = f"the store is limited to {self.max_entries} entries (max_entries)"
        fix = ", remove something first, or use evict='oldest'" if self.evict == "refuse" else ""
        return f"No room for unit {unit}: {problem}. Raise that limit{fix}."


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise StoreError(f"There is no {name}={value!r}. Use one of {', '.join(map(repr, choices))}.")
