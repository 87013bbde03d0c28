"""The whole lower convex hull of recompute time against held bytes, by parametric minimum cut.

Best sets at two prices span a line; a cut at the price of that line either finds a set below it, and both
halves are searched in turn, or proves that the hull has no corner between (Eisner and Severance,
"Mathematical techniques for efficient record segmentation in large shared databases", JACM 1976).

With thousands of corners, thousands of cuts in the whole graph would be too slow, and best sets are not
nested in the price (replaying more can mean holding *other* bytes), so the parametric flow of Gallo,
Grigoriadis and Tarjan does not apply. Instead every range of prices decides what it can
(``Choice.narrowed``): nodes that are in, or out of, every best set of the range are fixed, and what is left
falls apart into small components that are searched on their own, all of one level side by side in one flow.
Their corners, sorted by price, are the hull's.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from recoup.planning.graphs.hold.choice import Amounts, Choice
from recoup.planning.graphs.hold.cut import Indices, NodeSet

__all__ = ["Switch", "switches"]


@dataclass(frozen=True, eq=False)
class Switch:
    """What changes at one price: some nodes join the best set, others leave it.

    Attributes:
        price: nanoseconds a byte; below it the old set is best, above it the new one.
        saved_bytes: bytes that the change saves.
        added_ns: nanoseconds that it adds.
        joining: nodes that join, by their number in the whole problem.
        leaving: nodes that leave.
    """

    price: Fraction
    saved_bytes: int
    added_ns: int
    joining: Indices
    leaving: Indices


@dataclass(frozen=True, eq=False)
class _Level:
    """Parts of the problem, each with a range of prices and the best sets at its two ends."""

    choice: Choice
    lows: list[Fraction]
    highs: list[Fraction]
    at_low: NodeSet
    at_high: NodeSet


def switches(choice: Choice) -> tuple[NodeSet, list[Switch]]:
    """The best set at a price next to nothing, and every change of it as the price rises, in order."""
    size = int(choice.left_bytes.sum() + choice.right_bytes.sum() + choice.pair_bytes.sum())
    # So low that time comes first without exception, and so high that bytes do.
    low, high = Fraction(1, size + 1), Fraction(int(choice.right_ns.sum()) + 1)
    first, last = (
        choice.best(np.array([price.numerator], object), np.array([price.denominator], object))
        for price in (low, high)
    )
    found: list[Switch] = []
    level = _Level(choice, [low], [high], first, last) if len(choice.nodes) else None
    while level is not None:
        level = _split(_narrowed(level), found)
    found.sort(key=lambda switch: switch.price)
    return first, found


def _narrowed(level: _Level) -> _Level:
    """Fixes what each range decides and takes apart what is left."""
    lows, highs = (np.array([float(price) for price in prices]) for prices in (level.lows, level.highs))
    sure, maybe = level.choice.narrowed(lows, highs)
    open_ = maybe & ~sure
    choice, former = level.choice.without(sure, maybe).taken_apart()
    return _Level(
        choice=choice,
        lows=[level.lows[index] for index in former.tolist()],
        highs=[level.highs[index] for index in former.tolist()],
        at_low=level.at_low[open_],
        at_high=level.at_high[open_],
    )


def _split(level: _Level, found: list[Switch]) -> _Level | None:
    """Finds a best set between the two ends of every part's range, or records that a part has none."""
    choice, num_parts = level.choice, len(level.lows)
    low_bytes, low_ns = choice.costs(level.at_low, num_parts=num_parts)
    high_bytes, high_ns = choice.costs(level.at_high, num_parts=num_parts)
    saved, added = low_bytes - high_bytes, high_ns - low_ns
    common = np.maximum(np.gcd(saved, added), 1)
    # A part whose ends cost the same pays nothing for time here: its answer is not used.
    middle = choice.best(np.where(saved > 0, added // common, 1), np.where(saved > 0, saved // common, 1))
    size, nanoseconds = choice.costs(middle, num_parts=num_parts)
    goes_on = np.zeros(num_parts, dtype=bool)
    for index in np.flatnonzero((saved > 0) & ((size != low_bytes) | (nanoseconds != low_ns))).tolist():
        dearer = int(nanoseconds[index] - low_ns[index]) * int(saved[index])
        goes_on[index] = dearer < int(low_bytes[index] - size[index]) * int(added[index])
    _record(level, saved, added, done=~goes_on, found=found)
    if not goes_on.any():
        return None
    prices = [
        Fraction(time, size) if goes else Fraction(0)
        for time, size, goes in zip(added.tolist(), saved.tolist(), goes_on.tolist(), strict=True)
    ]
    return _halves(level, middle, prices, goes_on)


def _halves(level: _Level, middle: NodeSet, prices: list[Fraction], goes_on: NDArray[np.bool_]) -> _Level:
    """The lower and the upper half of every range that goes on, side by side."""
    keep = goes_on[level.choice.part]
    number = np.cumsum(goes_on, dtype=np.int32) - 1
    rest = level.choice.without(np.zeros_like(keep), keep)
    rest = rest.relabelled(number[rest.part])
    going = np.flatnonzero(goes_on).tolist()
    between = [prices[index] for index in going]
    return _Level(
        choice=rest.beside(rest, num_parts=len(going)),
        lows=[level.lows[index] for index in going] + between,
        highs=between + [level.highs[index] for index in going],
        at_low=np.concatenate([level.at_low[keep], middle[keep]]),
        at_high=np.concatenate([middle[keep], level.at_high[keep]]),
    )


def _record(
    level: _Level, saved: Amounts, added: Amounts, *, done: NDArray[np.bool_], found: list[Switch]
) -> None:
    """Writes down the change of every part that has no corner inside its range."""
    order = np.argsort(level.choice.part, kind="stable")
    starts = np.searchsorted(level.choice.part[order], np.arange(len(saved) + 1))
    joins, leaves = level.at_high & ~level.at_low, level.at_low & ~level.at_high
    has_change = np.zeros(len(saved), dtype=bool)
    has_change[level.choice.part[joins | leaves]] = True
    for index in np.flatnonzero(done & has_change).tolist():
        members = order[starts[index] : starts[index + 1]]
        # Ends of equal cost still have to change over somewhere for what comes later to fit.
        price = Fraction(int(added[index]), int(saved[index])) if saved[index] else level.lows[index]
        found.append(
            Switch(
                price=price,
                saved_bytes=int(saved[index]),
                added_ns=int(added[index]),
                joining=level.choice.nodes[members[joins[members]]],
                leaving=level.choice.nodes[members[leaves[members]]],
            )
        )
