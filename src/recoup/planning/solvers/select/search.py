"""Finds the best selection of some choices under a budget; ``select`` and ``spill`` bring the choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from recoup.planning.checks import check_seconds
from recoup.planning.solvers.select.labels import search_labels
from recoup.planning.solvers.select.levels import Levels
from recoup.planning.solvers.select.prices import Pricer

__all__ = ["Selection", "Selector"]

# The first target lies this share above the relaxation's bound; each further one eight times as far.
_FIRST_SLACK = 2.0**-20
_SLACK_GROWTH = 8.0
_MAX_ROUNDS = 16
# Measured: about this many labels a second, over all units.
_LABELS_A_SECOND = 1_000_000
_MIN_LABELS = 1_000


@dataclass(frozen=True, slots=True)
class Selection:
    """One choice per unit (positions in ``Levels.choices``), its seconds, and the bound that is proven."""

    positions: tuple[int, ...] = field(repr=False)
    seconds: float
    bound_s: float


class Selector:
    """The choices of a problem, and the selections found so far.

    Args:
        levels: the choices.
        time_limit_s: roughly how long one budget may take; it sets counts and not a clock.
    """

    def __init__(self, levels: Levels, *, time_limit_s: float) -> None:
        check_seconds("Selector", time_limit_s=time_limit_s)
        self.levels = levels
        self.max_labels = max(_MIN_LABELS, int(time_limit_s * _LABELS_A_SECOND) // levels.num_units)
        self.smallest_bytes, self.smallest = levels.smallest()
        self.fastest = levels.fastest()
        self.fastest_bytes = levels.peak_bytes(self.fastest)
        self._selections: dict[int, Selection] = {}

    def select(self, budgets: Sequence[int]) -> list[Selection]:
        """The best selections under feasible budgets, found together: much cheaper than one by one.

        >>> from recoup.planning.problem import Problem, Unit
        >>> unit = Unit.keep_or_recompute("a", forward_s=1, backward_s=2, held_bytes=9, output_bytes=1)
        >>> selector = Selector(Levels(Problem([unit], resident_bytes=90)), time_limit_s=1)
        >>> [selection.seconds for selection in selector.select([selector.smallest_bytes, 200])]
        [3.0, 3.0]
        """
        wanted = [budget for budget in dict.fromkeys(budgets) if budget not in self._selections]
        pricer, slack_share = None, _FIRST_SLACK
        for budget_bytes in wanted:
            if budget_bytes >= self.fastest_bytes:
                self._selections[budget_bytes] = self._selection(self.fastest, bound_ticks=None)
                continue
            pricer = pricer or Pricer(self.levels)
            gap = self._search(pricer, budget_bytes, slack_share=slack_share)
            # The gap that the relaxation leaves changes little from budget to budget.
            slack_share = max(2 * gap, _FIRST_SLACK)
        return [self._selections[budget] for budget in budgets]

    def _search(self, pricer: Pricer, budget_bytes: int, *, slack_share: float) -> float:
        """Raises the target until labels find a selection; returns what the relaxation lacked."""
        prices = pricer.price(budget_bytes)
        bound_ticks = prices.bound_ticks
        slack = max(bound_ticks * slack_share, 1.0)
        for _ in range(_MAX_ROUNDS):
            target = prices.bound_ticks + slack
            found = search_labels(self.levels, prices, target_ticks=target, max_labels=self.max_labels)
            if found.selection is not None and (found.ticks <= target or not found.is_complete):
                proven = None if found.is_complete else bound_ticks
                self._selections[budget_bytes] = self._selection(found.selection, bound_ticks=proven)
                return found.ticks / max(prices.bound_ticks, 1.0) - 1
            if found.is_complete:
                bound_ticks = target
            # A selection above the target is still one that the next target need not exceed.
            enough = found.ticks - prices.bound_ticks if found.selection is not None else float("inf")
            slack = min(slack * _SLACK_GROWTH, enough)
        self._selections[budget_bytes] = self._selection(self.smallest, bound_ticks=bound_ticks)
        return _FIRST_SLACK

    def _selection(self, positions: Sequence[int], *, bound_ticks: float | None) -> Selection:
        """A selection; without a bound of its own it is optimal."""
        seconds = self.levels.seconds(positions)
        bound_s = seconds if bound_ticks is None else min(bound_ticks * self.levels.tick_s, seconds)
        return Selection(tuple(positions), seconds, bound_s)
