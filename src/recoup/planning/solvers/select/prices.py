"""The linear relaxation of ``select``'s integer program on HiGHS: a lower bound, and what a byte is worth.

NOTE [ Rows on demand ]
    1. The program: choose x[i, k] in {0, 1}, one k per unit, least seconds, with the peak row
       H_i + sum_k need[i, k] x[i, k] <= M of every unit i. Few of these rows bind. The relaxation starts with
       none, and takes in the rows that its solution breaks until none is broken.
    2. A price per row, any price >= 0, proves a bound (Lagrange; Geoffrion 1974). It is computed here from
       the prices in our own arithmetic, so tolerances of the linear solver cannot leak into a claim.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from recoup.planning.program import Program
from recoup.planning.solvers.select.levels import Floats, Ints, Levels

__all__ = ["Pricer", "Prices"]

_MAX_ROUNDS = 60
_ROWS_A_ROUND = 4
# Measured: beyond so many units the simplex method needs too many pivots, and the interior point method is faster.
_MAX_SIMPLEX_UNITS = 2_000


@dataclass(frozen=True)
class Prices:
    """What a byte at each unit's moments is worth at one budget, and what that proves.

    Attributes:
        budget_bytes: the budget.
        per_byte: ticks per byte at each unit's moments; at least 0.
        reduced: of every choice, flat: ticks that taking it adds to the bound, at least 0.
        prefix: ``prefix[i]``: the least that the units before *i* cost at these prices.
        least_before: the fewest bytes that the units before each one can hold.
        likely_bytes: what is free as each unit starts, in the relaxation's own solution.
        bound_ticks: no selection within the budget takes fewer ticks.
    """

    budget_bytes: int
    per_byte: Floats = field(repr=False)
    reduced: Floats = field(repr=False)
    prefix: Floats = field(repr=False)
    least_before: Ints = field(repr=False)
    likely_bytes: Floats = field(repr=False)
    bound_ticks: float

    @classmethod
    def of(
        cls, levels: Levels, *, budget_bytes: int, rows: list[int], row_prices: Floats, shares: Floats
    ) -> Prices:
        """Works out what prices prove; rule 2. Choices that can never fit cost infinitely much."""
        least_before = levels.least_before(budget_bytes)
        per_byte = np.zeros(levels.num_units)
        per_byte[rows] = np.maximum(row_prices, 0.0)
        # A held byte is there in the moments of all later units.
        held_price = per_byte.sum() - np.cumsum(per_byte)
        costs = (
            levels.ticks
            + per_byte[levels.owner] * levels.need_bytes
            + held_price[levels.owner] * levels.held_bytes
        )
        costs[levels.need_bytes + least_before[levels.owner] > budget_bytes] = np.inf
        least = np.minimum.reduceat(costs, levels.first[:-1])
        prefix = np.concatenate([[0.0], np.cumsum(least)])
        return cls(
            budget_bytes=budget_bytes,
            per_byte=per_byte,
            reduced=costs - least[levels.owner],
            prefix=prefix,
            least_before=least_before,
            likely_bytes=budget_bytes - _held_before(levels, shares),
            bound_ticks=float(prefix[-1] - per_byte.sum() * budget_bytes),
        )


class Pricer:
    """Solves the relaxation at one budget after another, each from where the last one ended."""

    def __init__(self, levels: Levels) -> None:
        self.levels = levels
        #: The units whose peak rows are in, in the order in which these were added.
        self._rows: list[int] = []
        self._byte_scale = max(1.0, float(levels.held_bytes.max()), float(levels.need_bytes.max()) / 64)
        self._tick_scale = max(1.0, float(levels.ticks.max()))
        costs = (levels.ticks / self._tick_scale).tolist()
        program = Program()
        for begin, end in pairwise(levels.first.tolist()):
            program.row([(program.column(cost=cost), 1.0) for cost in costs[begin:end]], lower=1.0, upper=1.0)
        self._highs = program.loaded(is_relaxed=True)
        # Without presolve the next solve starts from this one's basis.
        options = {"presolve": "off"}
        if levels.num_units > _MAX_SIMPLEX_UNITS:
            options = {"solver": "ipm", "run_crossover": "off"}
        for name, value in options.items():
            self._highs.setOptionValue(name, value)

    def price(self, budget_bytes: int) -> Prices:
        """The prices at a feasible budget; rules 1 and 2."""
        levels, highs = self.levels, self._highs
        allowed = levels.need_bytes + levels.least_before(budget_bytes)[levels.owner] <= budget_bytes
        num_columns = len(allowed)
        columns = np.arange(num_columns, dtype=np.int32)
        highs.changeColsBounds(num_columns, columns, np.zeros(num_columns), allowed.astype(np.float64))
        for row in range(levels.num_units, levels.num_units + len(self._rows)):
            highs.changeRowBounds(row, -np.inf, budget_bytes / self._byte_scale)
        duals, shares = np.zeros(0), np.zeros(num_columns)
        for _ in range(_MAX_ROUNDS):
            highs.run()
            solution = highs.getSolution()
            duals = -np.array(solution.row_dual)[levels.num_units :] * self._tick_scale / self._byte_scale
            shares = np.array(solution.col_value)
            broken = _broken_rows(levels, shares, budget_bytes=budget_bytes) - set(self._rows)
            if not broken:
                break
            for unit in sorted(broken):
                self._add_row(unit, budget_bytes)
        rows = self._rows[: len(duals)]
        return Prices.of(levels, budget_bytes=budget_bytes, rows=rows, row_prices=duals, shares=shares)

    def _add_row(self, unit: int, budget_bytes: int) -> None:
        """The peak row of a unit: what the units before hold, and what it needs itself."""
        levels = self.levels
        own, end = int(levels.first[unit]), int(levels.first[unit + 1])
        factors = np.concatenate([levels.held_bytes[:own], levels.need_bytes[own:end]]) / self._byte_scale
        columns = np.flatnonzero(factors).astype(np.int32)
        self._highs.addRow(-np.inf, budget_bytes / self._byte_scale, len(columns), columns, factors[columns])
        self._rows.append(unit)


def _broken_rows(levels: Levels, shares: Floats, *, budget_bytes: int) -> set[int]:
    """The units whose peak rows a solution breaks most, far enough apart to matter."""
    needs = np.add.reduceat(shares * levels.need_bytes, levels.first[:-1])
    excess = _held_before(levels, shares) + needs - budget_bytes
    excess[excess <= 1e-9 * budget_bytes] = 0.0
    broken: set[int] = set()
    reach = max(1, levels.num_units // 16)
    while len(broken) < _ROWS_A_ROUND and excess.any():
        worst = int(excess.argmax())
        broken.add(worst)
        excess[max(worst - reach, 0) : worst + reach + 1] = 0.0
    return broken


def _held_before(levels: Levels, shares: Floats) -> Floats:
    """What the units before each one hold in a solution of the relaxation."""
    held = np.add.reduceat(shares * levels.held_bytes, levels.first[:-1])
    return np.concatenate([[0.0], np.cumsum(held)[:-1]])
