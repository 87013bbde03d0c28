"""Finds the best selection of some choices under a budget; ``select`` and ``spill`` bring the choices.

The three ways of ``select``: labels where units differ, counts where they are equal, and branch and bound
where labels had to be thinned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from recoup.planning.checks import check_seconds
from recoup.planning.solvers.select.labels import search_labels
from recoup.planning.solvers.select.levels import Levels
from recoup.planning.solvers.select.prices import Pricer
from recoup.planning.solvers.select.program import SelectProgram
from recoup.planning.solvers.select.runs import EqualRun, arrange, find_runs

__all__ = ["Selection", "Selector"]

# The first target lies this share above the relaxation's bound; each further one eight times as far.
_FIRST_SLACK = 2.0**-20
_SLACK_GROWTH = 8.0
_MAX_ROUNDS = 12
# Measured: about this many labels a second, over all units.
_LABELS_A_SECOND = 1_000_000
_MIN_LABELS = 1_000
_NODES_A_SECOND = 200
_ACCEPTED_GAP = 1e-4
# Counting pays from this many units, if it makes the program this much smaller.
_COUNTED_UNITS = 64
_COUNTED_SHARE = 0.25


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
        self.max_nodes = max(1, int(time_limit_s * _NODES_A_SECOND))
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
        tight = []
        for budget_bytes in wanted:
            if budget_bytes >= self.fastest_bytes:
                self._keep(budget_bytes, self.fastest, bound_s=None)
            else:
                tight.append(budget_bytes)
        if tight and self._is_counted:
            for budget_bytes in tight:
                self._branch(budget_bytes, start=None, known_ticks=0.0)
        elif tight:
            pricer, slack_share = Pricer(self.levels), _FIRST_SLACK
            for budget_bytes in tight:
                gap = self._search(pricer, budget_bytes, slack_share=slack_share)
                # The gap that the relaxation leaves changes little from budget to budget.
                slack_share = max(2 * gap, _FIRST_SLACK)
        return [self._selections[budget] for budget in budgets]

    # Solving

    @cached_property
    def _runs(self) -> list[EqualRun]:
        return find_runs(self.levels)

    @cached_property
    def _program(self) -> SelectProgram:
        return SelectProgram(self.levels, self._runs)

    @cached_property
    def _is_counted(self) -> bool:
        """Whether equal units make counting the better way."""
        enough = self.levels.num_units >= _COUNTED_UNITS
        return enough and len(self._runs) <= _COUNTED_SHARE * self.levels.num_units

    def _search(self, pricer: Pricer, budget_bytes: int, *, slack_share: float) -> float:
        """Labels, with a target that rises until there is a selection; returns what the relaxation lacked."""
        prices = pricer.price(budget_bytes)
        bound_ticks = prices.bound_ticks
        slack = max(bound_ticks * slack_share, 1.0)
        for _ in range(_MAX_ROUNDS):
            target = prices.bound_ticks + slack
            found = search_labels(self.levels, prices, target_ticks=target, max_labels=self.max_labels)
            if found.selection is not None and (found.ticks <= target or not found.is_complete):
                proven = None if found.is_complete else bound_ticks
                self._settle(budget_bytes, found.selection, bound_ticks=proven)
                return found.ticks / max(prices.bound_ticks, 1.0) - 1
            if found.is_complete:
                bound_ticks = target
            # A selection above the target is still one that the next target need not exceed.
            enough = found.ticks - prices.bound_ticks if found.selection is not None else float("inf")
            slack = min(slack * _SLACK_GROWTH, enough)
        self._branch(budget_bytes, start=None, known_ticks=bound_ticks)
        return _FIRST_SLACK

    def _settle(self, budget_bytes: int, positions: Sequence[int], *, bound_ticks: float | None) -> None:
        """Takes a selection from the labels, or improves it where the proof is too weak."""
        if bound_ticks is not None:
            bound_s = bound_ticks * self.levels.tick_s
            if self.levels.seconds(positions) > bound_s * (1 + _ACCEPTED_GAP):
                self._branch(budget_bytes, start=positions, known_ticks=bound_ticks)
                return
        self._keep(
            budget_bytes, positions, bound_s=None if bound_ticks is None else bound_ticks * self.levels.tick_s
        )

    def _branch(self, budget_bytes: int, *, start: Sequence[int] | None, known_ticks: float) -> None:
        """The integer program, with what is known already."""
        answer = self._program.solve(budget_bytes, start=start, max_nodes=self.max_nodes)
        known = [one for one in (answer.selection, start, self.smallest) if one is not None]
        positions = min(known, key=self.levels.seconds)
        bound_s = max(answer.bound_ticks, known_ticks) * self.levels.tick_s
        self._keep(budget_bytes, positions, bound_s=bound_s)

    def _keep(self, budget_bytes: int, positions: Sequence[int], *, bound_s: float | None) -> None:
        """Remembers a selection; without a bound of its own it is optimal."""
        arranged = tuple(arrange(self.levels, self._runs, positions))
        seconds = self.levels.seconds(arranged)
        bound_s = seconds if bound_s is None else min(bound_s, seconds)
        self._selections[budget_bytes] = Selection(arranged, seconds, bound_s)
