"""The whole lower convex hull of recompute time against held bytes, by parametric minimum cut.

Best sets at two prices span a line; a cut at the price of that line either finds a set below it, and both
halves are searched in turn, or proves that the hull has no corner between (Eisner and Severance,
"Mathematical techniques for efficient record segmentation in large shared databases", JACM 1976).

With thousands of corners, thousands of cuts in the whole graph would be too slow, and best sets are not
nested in the price (replaying more can mean holding *other* bytes), so the parametric flow of Gallo,
Grigoriadis and Tarjan does not apply. Instead every range of prices decides what it can
(``PricedCut.narrowed``): nodes that are in, or out of, every best set of the range are fixed, and what is left
falls apart into small components that are searched on their own, all of one round side by side in one flow.
Their corners, sorted by price, are the hull's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from recoup.planning.graphs.hold.cut import Indices, NodeSet
from recoup.planning.graphs.hold.priced_cut import Amounts, PricedCut

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
class _Ranges:
    """Parts of the problem, each with a range of prices and the best sets at its two ends."""

    cut: PricedCut
    lows: list[Fraction]
    highs: list[Fraction]
    at_low: NodeSet
    at_high: NodeSet


def switches(cut: PricedCut) -> tuple[NodeSet, list[Switch]]:
    """The best set at a price next to nothing, and every change of it as the price rises, in order."""
    size = int(cut.left_bytes.sum() + cut.right_bytes.sum() + cut.pair_bytes.sum())
    # So low that time comes first without exception, and so high that bytes do.
    low, high = Fraction(1, size + 1), Fraction(int(cut.right_ns.sum()) + 1)
    first, last = (
        cut.best(np.array([price.numerator], object), np.array([price.denominator], object))
        for price in (low, high)
    )
    found: list[Switch] = []
    ranges = _Ranges(cut, [low], [high], first, last) if len(cut.nodes) else None
    while ranges is not None:
        ranges = _split(_narrowed(ranges), found)
    found.sort(key=lambda switch: switch.price)
    return first, found


def _narrowed(ranges: _Ranges) -> _Ranges:
    """Fixes what each range decides and takes apart what is left."""
    lows, highs = (np.array([float(price) for price in prices]) for prices in (ranges.lows, ranges.highs))
    sure, maybe = ranges.cut.narrowed(lows, highs)
    open_ = maybe & ~sure
    cut, former = ranges.cut.without(sure, maybe).taken_apart()
    return _Ranges(
        cut=cut,
        lows=[ranges.lows[index] for index in former.tolist()],
        highs=[ranges.highs[index] for index in former.tolist()],
        at_low=ranges.at_low[open_],
        at_high=ranges.at_high[open_],
    )


def _split(ranges: _Ranges, found: list[Switch]) -> _Ranges | None:
    """Finds a best set between the two ends of every part's range, or records that a part has none."""
    cut, num_parts = ranges.cut, len(ranges.lows)
    low_bytes, low_ns = cut.costs(ranges.at_low, num_parts=num_parts)
    high_bytes, high_ns = cut.costs(ranges.at_high, num_parts=num_parts)
    saved, added = low_bytes - high_bytes, high_ns - low_ns
    common = np.maximum(np.gcd(saved, added), 1)
    # A part whose ends cost the same pays nothing for time here: its answer is not used.
    middle = cut.best(np.where(saved > 0, added // common, 1), np.where(saved > 0, saved // common, 1))
    size, nanoseconds = cut.costs(middle, num_parts=num_parts)
    goes_on = np.zeros(num_parts, dtype=bool)
    for index in np.flatnonzero((saved > 0) & ((size != low_bytes) | (nanoseconds != low_ns))).tolist():
        dearer = int(nanoseconds[index] - low_ns[index]) * int(saved[index])
        goes_on[index] = dearer < int(low_bytes[index] - size[index]) * int(added[index])
    _record(ranges, saved, added, done=~goes_on, found=found)
    if not goes_on.any():
        return None
    prices = [
        Fraction(time, size) if goes else Fraction(0)
        for time, size, goes in zip(added.tolist(), saved.tolist(), goes_on.tolist(), strict=True)
    ]
    return _halves(ranges, middle, prices, goes_on)


def _halves(ranges: _Ranges, middle: NodeSet, prices: list[Fraction], goes_on: NDArray[np.bool_]) -> _Ranges:
    """The lower and the upper half of every range that goes on, side by side."""
    keep = goes_on[ranges.cut.part]
    number = np.cumsum(goes_on, dtype=np.int32) - 1
    rest = ranges.cut.without(np.zeros_like(keep), keep)
    rest = replace(rest, part=number[rest.part])
    going = np.flatnonzero(goes_on).tolist()
    between = [prices[index] for index in going]
    return _Ranges(
        cut=rest.twice(num_parts=len(going)),
        lows=[ranges.lows[index] for index in going] + between,
        highs=between + [ranges.highs[index] for index in going],
        at_low=np.concatenate([ranges.at_low[keep], middle[keep]]),
        at_high=np.concatenate([middle[keep], ranges.at_high[keep]]),
    )


def _record(
    ranges: _Ranges, saved: Amounts, added: Amounts, *, done: NDArray[np.bool_], found: list[Switch]
) -> None:
    """Writes down the change of every part that has no corner inside its range."""
    order = np.argsort(ranges.cut.part, kind="stable")
    starts = np.searchsorted(ranges.cut.part[order], np.arange(len(saved) + 1))
    joins, leaves = ranges.at_high & ~ranges.at_low, ranges.at_low & ~ranges.at_high
    has_change = np.zeros(len(saved), dtype=bool)
    has_change[ranges.cut.part[joins | leaves]] = True
    for index in np.flatnonzero(done & has_change).tolist():
        members = order[starts[index] : starts[index + 1]]
        # Ends of equal cost still have to change over somewhere for what comes later to fit.
        price = Fraction(int(added[index]), int(saved[index])) if saved[index] else ranges.lows[index]
        found.append(
            Switch(
                price=price,
                saved_bytes=int(saved[index]),
                added_ns=int(added[index]),
                joining=ranges.cut.nodes[members[joins[members]]],
                leaving=ranges.cut.nodes[members[leaves[members]]],
            )
        )
