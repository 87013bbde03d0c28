"""The linear relaxation of ``select``'s integer program on HiGHS: a lower bound, and what a byte is worth.

NOTE [ Rows on demand, equal units together ]
    1. The program: choose x[i, k] in {0, 1}, one k per unit, least seconds, with the peak row
       H_i + sum_k need[i, k] x[i, k] <= M of every unit i. Few of these rows bind. The relaxation starts with
       none, and takes in the rows that its solution breaks until none is broken.
    2. Between two rows that are in, only sums over units matter. So units with the same held bytes and
       seconds share one column per choice, which counts how many of them take it: a thousand equal blocks
       cost as many columns as one. Their solution is spread evenly over them when the other rows are checked.
    3. H is a column per row (a prefix sum), so the nonzeros are linear in columns and rows.
    4. A price per row, any price >= 0, proves a bound (Lagrange; Geoffrion 1974). It is computed here from
       the prices in our own arithmetic, so tolerances of the linear solver cannot leak into a claim.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from recoup.planning.lazy import LazyModule
from recoup.planning.solvers.select.levels import Floats, Ints, Levels

if TYPE_CHECKING:
    import highspy
else:
    highspy = LazyModule("highspy")

__all__ = ["Pricer", "Prices", "quiet_highs"]

Bools = npt.NDArray[np.bool_]

_MAX_ROUNDS = 60
_ROWS_A_ROUND = 4


@dataclass(frozen=True)
class Prices:
    """What a byte at each unit's moments is worth at one budget, and what that proves.

    Attributes:
        budget_bytes: the budget.
        per_byte: ticks per byte at each unit's moments; at least 0.
        held_price: ticks per held byte of each unit: the prices of all later units' moments together.
        reduced: of every choice, flat: ticks that taking it adds to the bound, at least 0.
        prefix: ``prefix[i]``: the least that the units before *i* cost at these prices.
        least_before: the fewest bytes that the units before each one can hold.
        bound_ticks: no selection within the budget takes fewer ticks.
    """

    budget_bytes: int
    per_byte: Floats = field(repr=False)
    held_price: Floats = field(repr=False)
    reduced: Floats = field(repr=False)
    prefix: Floats = field(repr=False)
    least_before: Ints = field(repr=False)
    bound_ticks: float

    @classmethod
    def of(cls, levels: Levels, *, budget_bytes: int, rows: list[int], row_prices: Floats) -> Prices:
        """Works out what prices prove; rule 4. Choices that can never fit cost infinitely much."""
        least_before = levels.least_before(budget_bytes)
        per_byte = np.zeros(levels.num_units)
        per_byte[rows] = np.maximum(row_prices, 0.0)
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
            held_price=held_price,
            reduced=costs - least[levels.owner],
            prefix=prefix,
            least_before=least_before,
            bound_ticks=float(prefix[-1] - per_byte.sum() * budget_bytes),
        )


def quiet_highs() -> highspy.Highs:
    """A HiGHS that prints nothing and gives the same answer every time."""
    highs = highspy.Highs()  # type: ignore[no-untyped-call]
    # "threads" stays unset: HiGHS keeps one pool a process and refuses a second setting.
    for name, value in (("output_flag", False), ("random_seed", 0)):
        highs.setOptionValue(name, value)
    return highs


class Pricer:
    """Solves the relaxation at one budget after another, each from where the last one ended."""

    def __init__(self, levels: Levels) -> None:
        self.levels = levels
        self.kinds = _kinds(levels)
        self.relaxation: _Relaxation | None = None

    def price(self, budget_bytes: int) -> Prices:
        """The prices at a feasible budget; rules 1 to 4."""
        levels = self.levels
        allowed = levels.need_bytes + levels.least_before(budget_bytes)[levels.owner] <= budget_bytes
        row_prices, rows = np.zeros(0), list[int]()
        shares = np.zeros(0)
        for _ in range(_MAX_ROUNDS):
            if self.relaxation is None:
                shares = _fastest_shares(levels, allowed)
            else:
                row_prices, shares = self.relaxation.solve(budget_bytes, allowed)
                rows = self.relaxation.rows
            broken = _broken_rows(levels, shares, budget_bytes=budget_bytes) - set(rows)
            if not broken:
                break
            self.relaxation = _Relaxation(levels, kinds=self.kinds, rows=sorted(broken.union(rows)))
        return Prices.of(levels, budget_bytes=budget_bytes, rows=rows, row_prices=row_prices)


def _kinds(levels: Levels) -> list[int]:
    """A number per unit, the same for units whose choices hold and take the same."""
    known: dict[bytes, int] = {}
    kinds = []
    for begin, end in pairwise(levels.first.tolist()):
        span = slice(begin, end)
        parts = (levels.held_bytes[span], levels.ticks[span])
        kinds.append(known.setdefault(b"".join(part.tobytes() for part in parts), len(known)))
    return kinds


def _fastest_shares(levels: Levels, allowed: Bools) -> Floats:
    """Each unit's fastest allowed choice, as the solution of the relaxation without peak rows."""
    shares = np.zeros(len(levels.ticks))
    for begin, end in pairwise(levels.first.tolist()):
        ticks = np.where(allowed[begin:end], levels.ticks[begin:end], np.iinfo(np.int64).max)
        shares[begin + int(ticks.argmin())] = 1.0
    return shares


def _broken_rows(levels: Levels, shares: Floats, *, budget_bytes: int) -> set[int]:
    """The units whose peak rows a solution breaks most, far enough apart to matter."""
    starts = levels.first[:-1]
    held = np.add.reduceat(shares * levels.held_bytes, starts)
    excess = np.concatenate([[0.0], np.cumsum(held)[:-1]]) - budget_bytes
    excess += np.add.reduceat(shares * levels.need_bytes, starts)
    excess[excess <= 1e-9 * budget_bytes] = 0.0
    broken: set[int] = set()
    reach = max(1, levels.num_units // 16)
    while len(broken) < _ROWS_A_ROUND and excess.any():
        worst = int(excess.argmax())
        broken.add(worst)
        excess[max(worst - reach, 0) : worst + reach + 1] = 0.0
    return broken


class _Relaxation:
    """The linear program with some peak rows, kept in HiGHS from budget to budget."""

    def __init__(self, levels: Levels, *, kinds: list[int], rows: list[int]) -> None:
        self.levels, self.rows = levels, rows
        self.byte_scale = max(1.0, float(levels.held_bytes.max()), float(levels.need_bytes.max()) / 64)
        self.tick_scale = max(1.0, float(levels.ticks.max()))
        groups, counts, leaders = _groups(kinds, set(rows))
        # Columns: the choices of each group, then a prefix sum per row.
        sizes = np.diff(levels.first)[leaders]
        first = np.cumsum(np.concatenate([[0], sizes]))
        self.num_counting = int(first[-1])
        offsets = np.arange(len(levels.ticks)) - levels.first[levels.owner]
        group_of = np.array(groups)[levels.owner]
        self.column = first[group_of] + offsets
        self.share = 1.0 / np.array(counts)[group_of]
        self.highs = quiet_highs()
        # Without presolve the next budget starts from this one's basis.
        self.highs.setOptionValue("presolve", "off")
        self.highs.passModel(self._model(leaders, np.array(counts), first))

    def _model(self, leaders: list[int], counts: Ints, first: Ints) -> highspy.HighsLp:
        """Rows: one per group (its choices sum to its units); then for each peak row, prefix and peak."""
        levels, num_rows = self.levels, len(self.rows)
        num_groups, num_columns = len(leaders), self.num_counting + num_rows
        starts = levels.first[leaders]
        flat = np.concatenate(
            [np.arange(s, levels.first[u + 1]) for s, u in zip(starts, leaders, strict=True)]
        )
        held = levels.held_bytes[flat] / self.byte_scale
        indices, values = [np.arange(self.num_counting)], [np.ones(self.num_counting)]
        lengths = np.diff(first).tolist()
        leader_of_row = np.searchsorted(leaders, self.rows)
        begin = 0
        for rank, group in enumerate(leader_of_row.tolist()):
            prefix, end = self.num_counting + rank, int(first[group])
            since = np.arange(begin, end)[held[begin:end] != 0]
            before = [prefix - 1] if rank else []
            indices.append(np.concatenate([since, before, [prefix]]))
            values.append(np.concatenate([-held[since], [-1.0] * len(before), [1.0]]))
            own = np.arange(end, int(first[group + 1]))
            indices.append(np.append(own, prefix))
            values.append(np.append(levels.need_bytes[flat[own]] / self.byte_scale, 1.0))
            lengths += [len(indices[-2]), len(indices[-1])]
            begin = end
        infinity = highspy.kHighsInf
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = num_columns, num_groups + 2 * num_rows
        model.col_cost_ = np.append(levels.ticks[flat] / self.tick_scale, np.zeros(num_rows))
        model.col_lower_ = np.append(np.zeros(self.num_counting), np.full(num_rows, -infinity))
        model.col_upper_ = np.full(num_columns, infinity)
        model.row_lower_ = np.concatenate([counts, [0.0, -infinity] * num_rows])
        model.row_upper_ = np.concatenate([counts, [infinity, infinity] * num_rows])
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.concatenate([[0], np.cumsum(lengths)])
        model.a_matrix_.index_ = np.concatenate(indices).astype(np.int32)
        model.a_matrix_.value_ = np.concatenate(values)
        self.peak_rows = [num_groups + 2 * rank + 1 for rank in range(num_rows)]
        return model

    def solve(self, budget_bytes: int, allowed: Bools) -> tuple[Floats, Floats]:
        """The prices of the peak rows in ticks per byte, and each choice's share of its unit."""
        uppers = np.zeros(self.num_counting)
        np.add.at(uppers, self.column, allowed)
        self.highs.changeColsBounds(
            self.num_counting, np.arange(self.num_counting), np.zeros(self.num_counting), uppers
        )
        for row in self.peak_rows:
            self.highs.changeRowBounds(row, -highspy.kHighsInf, budget_bytes / self.byte_scale)
        self.highs.run()
        solution = self.highs.getSolution()
        duals = -np.array(solution.row_dual)[self.peak_rows] * self.tick_scale / self.byte_scale
        return duals, np.array(solution.col_value)[self.column] * self.share


def _groups(kinds: list[int], rows: set[int]) -> tuple[list[int], list[int], list[int]]:
    """Rule 2: the group of every unit, how many units each group has, and its first unit.

    A row's own unit is a group alone; others of a kind share one between two rows.
    """
    known: dict[tuple[int, int], int] = {}
    groups, counts, leaders = [], list[int](), list[int]()
    segment = 0
    for unit, kind in enumerate(kinds):
        is_row = unit in rows
        segment += is_row
        group = known.setdefault((segment, -1 if is_row else kind), len(counts))
        segment += is_row
        if group == len(counts):
            counts.append(0)
            leaders.append(unit)
        counts[group] += 1
        groups.append(group)
    return groups, counts, leaders
