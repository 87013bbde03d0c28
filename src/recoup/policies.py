"""Which units' inputs are held for the backward, and which units are run again.

A policy knows only numbers: how many units there are and, where it asks for them, what each costs to
recompute. `KeepUnits` also takes names. Policies are values: they compare, hash and print.

=================== ==========================================================================
`KeepAll`           every input is held, nothing is run again
`KeepNone`          no input is held
`EveryN`            the inputs of units 0, n, 2n, …
`Selective`         the inputs of units that cost at least a threshold to recompute
`KeepUnits`         the inputs of the units that you name or number
`UniformSegments`   equally many units per segment; the first input of each is held
`BalancedSegments`  segments whose largest cost is as small as it can be
`Segments`          the segments that you give
=================== ==========================================================================
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any, ClassVar

from recoup.errors import PolicyError
from recoup.numbers import finite_number, whole_number

__all__ = [
    "BalancedSegments",
    "EveryN",
    "KeepAll",
    "KeepNone",
    "KeepUnits",
    "Policy",
    "SegmentPolicy",
    "Segments",
    "Selective",
    "UniformSegments",
]

Bounds = tuple[tuple[int, int], ...]


class Policy(ABC):
    """Says for each of a number of units whether its input is held.

    Arguments of the methods:
        num_units: how many units there are.
        costs: what each unit costs to recompute, in any one unit of measure. Checked wherever it is given.
    """

    needs_costs: ClassVar[bool] = False

    def keeps(self, num_units: int, costs: Sequence[float] | None = None) -> tuple[bool, ...]:
        """Tells for every unit whether its input is held for the backward.

        Raises:
            PolicyError: if the settings do not suit this many units, or the costs are missing or wrong.

        >>> EveryN(3).keeps(6)
        (True, False, False, True, False, False)
        """
        return self._keeps(num_units, self._check(num_units, costs))

    def recomputes(self, num_units: int, costs: Sequence[float] | None = None) -> tuple[bool, ...]:
        """Tells for every unit whether the backward runs it again.

        That is the case when the input of the next one is not held. (Segment policies replay whole segments.)

        >>> EveryN(3).recomputes(6)
        (True, True, False, True, True, False)
        """
        kept = self.keeps(num_units, costs)
        return (*(not keep for keep in kept[1:]), False)[:num_units]

    def segments(self, num_units: int, costs: Sequence[float] | None = None) -> Bounds:
        """Gives the first and the last unit of every segment, both inclusive, in order.

        A segment reaches from one held input to the next: its units are replayed together from there. What comes
        before the first is replayed from the input of all. A unit between two held inputs is in none: it is kept.

        >>> EveryN(3).segments(7)
        ((0, 2), (3, 5))
        """
        kept = self.keeps(num_units, costs)
        starts = [unit for unit in range(num_units) if unit == 0 or kept[unit]]
        return tuple((first, last) for first, last in _between(starts, num_units) if first < last)

    def keeps_unit(self, unit: int | str, *, cost: float | None = None) -> bool:
        """Tells whether one unit's input is held, as it comes: without knowing how many units there are.

        Args:
            unit: its number from 0; for `KeepUnits` also its name.
            cost: what it costs to recompute.

        Raises:
            PolicyError: the policy has to know all units at once, or the cost.

        >>> EveryN(3).keeps_unit(6), Selective(100).keeps_unit(0, cost=20)
        (True, False)
        """
        if not isinstance(unit, str):
            unit = whole_number("The unit must be", unit, PolicyError)
        if cost is not None:
            cost = finite_number(f"The cost of unit {unit!r} must be", cost, PolicyError)
        elif self.needs_costs:
            raise PolicyError(f"{self} decides by cost, and none was given for unit {unit!r}. Pass cost=….")
        return self._keeps_unit(unit, 0.0 if cost is None else cost)

    def for_names(self, names: Sequence[str], *, first_unit: int | None = None) -> Policy:
        """This policy for units with these names: `KeepUnits` then has their numbers instead.

        Args:
            names: of all units.
            first_unit: where these are the names of a part: the number of its first unit. What the policy names
                besides may be in other parts.

        Raises:
            PolicyError: it names a unit that there is not.
        """
        return self

    @abstractmethod
    def _keeps(self, num_units: int, costs: tuple[float, ...]) -> tuple[bool, ...]:
        """`keeps`, with arguments that were checked; without costs the tuple is empty."""

    def _keeps_unit(self, unit: int | str, cost: float) -> bool:
        """`keeps_unit`, with arguments that were checked."""
        raise PolicyError(
            f"{self} divides all units at once, and cannot decide about one as it comes. Use keeps(num_units), or a"
            " policy that decides unit by unit, such as EveryN or Segments."
        )

    def _check(self, num_units: int, costs: Sequence[float] | None) -> tuple[float, ...]:
        whole_number("num_units must be", num_units, PolicyError)
        if costs is None:
            if self.needs_costs:
                raise PolicyError(
                    f"{self} decides by cost, and no costs were given. Pass one per unit: costs=[…]."
                )
            return ()
        return _checked_costs(num_units, costs)


class _UnitPolicy(Policy):
    """Decides unit by unit."""

    def _keeps(self, num_units: int, costs: tuple[float, ...]) -> tuple[bool, ...]:
        return tuple(self._keeps_unit(unit, costs[unit] if costs else 0.0) for unit in range(num_units))

    @abstractmethod
    def _keeps_unit(self, unit: int | str, cost: float) -> bool: ...


@dataclass(frozen=True)
class KeepAll(_UnitPolicy):
    """Holds every input: the most memory, no recomputation.

    >>> KeepAll().keeps(3), KeepAll().recomputes(3)
    ((True, True, True), (False, False, False))
    """

    def _keeps_unit(self, unit: int | str, cost: float) -> bool:
        return True


@dataclass(frozen=True)
class KeepNone(_UnitPolicy):
    """Holds no input: the least memory, everything but the last unit is run again.

    >>> KeepNone().keeps(3), KeepNone().recomputes(3)
    ((False, False, False), (True, True, False))
    """

    def _keeps_unit(self, unit: int | str, cost: float) -> bool:
        return False


@dataclass(frozen=True)
class EveryN(_UnitPolicy):
    """Holds the input of every unit whose number ``n`` divides; with ``n=0`` no unit is such a boundary.

    >>> EveryN().keeps(5)
    (True, False, False, False, True)
    """

    n: int = 4

    def __post_init__(self) -> None:
        whole_number("EveryN: n must be", self.n, PolicyError)

    def _keeps_unit(self, unit: int | str, cost: float) -> bool:
        return self.n > 0 and _numbered(self, unit) % self.n == 0


@dataclass(frozen=True)
class Selective(_UnitPolicy):
    """Holds the inputs of units whose recomputation costs at least ``threshold``.

    >>> Selective().keeps(3, costs=[20, 100, 350])
    (False, True, True)
    """

    threshold: float = 100
    needs_costs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        finite_number("Selective: threshold must be", self.threshold, PolicyError)

    def _keeps_unit(self, unit: int | str, cost: float) -> bool:
        return cost >= self.threshold


@dataclass(frozen=True)
class KeepUnits(_UnitPolicy):
    """Holds the inputs of the units that are given, by number or by name.

    Names are those of a model's modules or of a chain's steps; every unit of that name is meant.

    >>> KeepUnits([0, 3]).keeps(5)
    (True, False, False, True, False)
    >>> KeepUnits(["blocks.2"]).for_names(["embed", "blocks.0", "blocks.1", "blocks.2"])
    KeepUnits(units=(3,))
    """

    units: tuple[int | str, ...]

    def __post_init__(self) -> None:
        given: Any = self.units
        given = [given] if isinstance(given, (str, int)) else given
        units = {
            unit if isinstance(unit, str) else whole_number("KeepUnits: a unit must be", unit, PolicyError)
            for unit in given
        }
        # Numbers first, so that equal policies compare equal.
        object.__setattr__(
            self, "units", tuple(sorted(units, key=lambda unit: (isinstance(unit, str), unit)))
        )

    def for_names(self, names: Sequence[str], *, first_unit: int | None = None) -> KeepUnits:
        """With the numbers of the units that it names."""
        for unit in self.units:
            if first_unit is None and isinstance(unit, str) and unit not in names:
                raise PolicyError(f"{self} names {unit!r}, and there is no such unit. {_known(unit, names)}")
        numbers = [number for number, name in enumerate(names, first_unit or 0) if name in self.units]
        return KeepUnits((*(unit for unit in self.units if not isinstance(unit, str)), *numbers))

    def _keeps(self, num_units: int, costs: tuple[float, ...]) -> tuple[bool, ...]:
        for unit in self.units:
            if not isinstance(unit, str) and unit >= num_units:
                raise PolicyError(
                    f"{self}: unit {unit} is out of range for {num_units} units, counted from 0."
                )
        return super()._keeps(num_units, costs)

    def _keeps_unit(self, unit: int | str, cost: float) -> bool:
        if any(isinstance(kept, str) != isinstance(unit, str) for kept in self.units):
            raise PolicyError(
                f"{self} cannot tell whether unit {unit!r} is one of them: give numbers for numbers, names for names."
            )
        return unit in self.units


class SegmentPolicy(Policy):
    """Divides units into segments: runs of consecutive units that are replayed together.

    The input of a unit is held if the unit is the first of its segment, or in none.
    """

    def segments(self, num_units: int, costs: Sequence[float] | None = None) -> Bounds:
        """Gives the first and the last unit of every segment, both inclusive, in order; one unit may be a segment.

        >>> UniformSegments(3).segments(10)
        ((0, 2), (3, 5), (6, 9))
        """
        return self._segments(num_units, self._check(num_units, costs))

    def recomputes(self, num_units: int, costs: Sequence[float] | None = None) -> tuple[bool, ...]:
        """Tells for every unit whether it lies in a segment, and so is run again.

        A replay that needs what happens *inside* the units runs whole segments. A `recoup.manual.Chain` needs
        only their inputs: it leaves out the last unit of each, whose output is held or is the chain's.

        >>> Segments([(1, 3)]).recomputes(5)
        (False, True, True, True, False)
        """
        segments = self.segments(num_units, costs)
        labels = [False] * num_units
        for first, last in segments:
            labels[first : last + 1] = [True] * (last - first + 1)
        return tuple(labels)

    @abstractmethod
    def _segments(self, num_units: int, costs: tuple[float, ...]) -> Bounds:
        """`segments`, with arguments that were checked."""

    def _keeps(self, num_units: int, costs: tuple[float, ...]) -> tuple[bool, ...]:
        labels = [True] * num_units
        for first, last in self._segments(num_units, costs):
            labels[first + 1 : last + 1] = [False] * (last - first)
        return tuple(labels)


@dataclass(frozen=True)
class _CountedSegments(SegmentPolicy):
    """Divides the units into a number of segments."""

    count: int

    def __post_init__(self) -> None:
        whole_number(f"{type(self).__name__}: count must be", self.count, PolicyError)

    def _segments(self, num_units: int, costs: tuple[float, ...]) -> Bounds:
        if not 0 < self.count <= num_units:
            return ()
        return _between(self._starts(num_units, costs), num_units)

    @abstractmethod
    def _starts(self, num_units: int, costs: tuple[float, ...]) -> list[int]:
        """The first unit of each segment, where there are at least as many units as segments."""


@dataclass(frozen=True)
class UniformSegments(_CountedSegments):
    """Divides the units into ``count`` segments of equally many units; the last takes the remainder.

    Zero segments, or more than there are units, give no segments: everything is held.

    >>> UniformSegments(2).segments(10)
    ((0, 4), (5, 9))
    """

    def _starts(self, num_units: int, costs: tuple[float, ...]) -> list[int]:
        size = num_units // self.count
        return [size * index for index in range(self.count)]


@dataclass(frozen=True)
class BalancedSegments(_CountedSegments):
    """Divides the units into ``count`` segments so that the costliest one costs as little as possible.

    The optimum is exact: costs are compared as rational numbers, so no rounding of sums decides. Zero
    segments, or more than there are units, give no segments: everything is held.

    >>> BalancedSegments(2).segments(5, costs=[1, 1, 1, 1, 6])
    ((0, 3), (4, 4))
    """

    needs_costs: ClassVar[bool] = True

    def _starts(self, num_units: int, costs: tuple[float, ...]) -> list[int]:
        weights = _whole_weights(costs)
        low, high = max(weights), sum(weights)
        while low < high:
            middle = (low + high) // 2
            if len(_fill(weights, middle)) <= self.count:
                high = middle
            else:
                low = middle + 1
        return _fill(weights, low, self.count)


@dataclass(frozen=True)
class Segments(SegmentPolicy):
    """Takes the segments as given: pairs of first and last unit, both inclusive, that do not overlap.

    Units outside all segments keep their inputs. The pairs may come in any order and are held sorted.

    >>> Segments([(7, 9), (2, 4)])
    Segments(bounds=((2, 4), (7, 9)))
    """

    bounds: Bounds

    def __post_init__(self) -> None:
        ordered = tuple(sorted(_checked_pair(pair) for pair in self.bounds))
        for (first, last), (next_first, next_last) in pairwise(ordered):
            if next_first <= last:
                raise PolicyError(
                    f"Segments {first}-{last} and {next_first}-{next_last} overlap. Both ends are inclusive: "
                    f"begin the second at {last + 1} or later."
                )
        object.__setattr__(self, "bounds", ordered)

    def contains(self, unit: int) -> bool:
        """Tells whether a unit lies in one of the segments.

        >>> Segments([(2, 4)]).contains(4), Segments([(2, 4)]).contains(5)
        (True, False)
        """
        return any(first <= unit <= last for first, last in self.bounds)

    def _keeps_unit(self, unit: int | str, cost: float) -> bool:
        number = _numbered(self, unit)
        return not any(first < number <= last for first, last in self.bounds)

    def _segments(self, num_units: int, costs: tuple[float, ...]) -> Bounds:
        for first, last in self.bounds:
            if last >= num_units:
                raise PolicyError(
                    f"Segment {first}-{last} is out of range for {num_units} units; both ends are "
                    "inclusive. Shorten the segment or leave it out."
                )
        return self.bounds


def _numbered(policy: Policy, unit: int | str) -> int:
    if isinstance(unit, str):
        raise PolicyError(f"{policy} goes by numbers; got the name {unit!r}. Give the unit's number, from 0.")
    return unit


def _known(name: str, names: Sequence[str]) -> str:
    """What a wrong name may have meant."""
    close = difflib.get_close_matches(name, names, n=3)
    return (
        f"Did you mean {' or '.join(map(repr, close))}?" if close else f"The units are: {', '.join(names)}."
    )


def _checked_costs(num_units: int, costs: Sequence[float]) -> tuple[float, ...]:
    if len(costs) != num_units:
        raise PolicyError(f"{len(costs)} costs were given for {num_units} units. Give one cost per unit.")
    return tuple(
        finite_number(f"The cost of unit {unit} must be", cost, PolicyError)
        for unit, cost in enumerate(costs)
    )


def _checked_pair(pair: Any) -> tuple[int, int]:
    try:
        first, last = pair
    except (TypeError, ValueError):
        raise PolicyError(f"A segment is a pair (first, last); got {pair!r}.") from None
    whole_number("A segment's first unit must be", first, PolicyError)
    whole_number("A segment's last unit must be", last, PolicyError)
    if last < first:
        raise PolicyError(f"Segment {first}-{last} runs backwards. Write it as ({last}, {first}).")
    return int(first), int(last)


def _between(starts: Sequence[int], num_units: int) -> Bounds:
    return tuple((first, end - 1) for first, end in pairwise((*starts, num_units)))


def _whole_weights(costs: Sequence[float]) -> list[int]:
    """Scales costs to integers, exactly: every float is a fraction with a power of two below."""
    fractions = [Fraction(cost) for cost in costs]
    scale = max(fraction.denominator for fraction in fractions)
    return [int(fraction * scale) for fraction in fractions]


def _fill(weights: Sequence[int], limit: int, count: int = 0) -> list[int]:
    """Gives the starts of segments that are filled up to a limit, so that no fewer are possible, or of ``count``."""
    starts, load = [0], weights[0]
    for unit, weight in enumerate(weights[1:], start=1):
        num_left = len(weights) - unit
        # With as many units left as segments, every one must stand alone, or the count is not reached.
        if load + weight > limit or num_left == count - len(starts):
            starts.append(unit)
            load = 0
        load += weight
    return starts
