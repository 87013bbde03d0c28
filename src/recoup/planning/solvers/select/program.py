"""``select`` as an integer program on HiGHS, with equal units counted instead of named.

NOTE [ Counts ]
    1. A single unit has a binary column per choice. Its peak row is H + sum of need * x <= M.
    2. A run of equal units has, per choice q, a column c_q (how many take it) and a binary z_q (whether any
       does). The choices are laid out in the order of NOTE [ The order within a run ], so the units that
       take q are neighbours, and the level rises or falls evenly along them, by h_q plus the step: only the
       last of them, or the first, can be the highest. That makes one row per choice and pass, of the form
       H + sum over earlier choices of c * (h + step) + … <= M, which z_q switches off.
    3. H is a prefix sum with a column per run, so the nonzeros are linear in the runs.

    A thousand equal blocks are thus one run: as many columns as a few blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from recoup.planning.lazy import LazyModule
from recoup.planning.solvers.select.levels import Choice, Levels
from recoup.planning.solvers.select.prices import quiet_highs
from recoup.planning.solvers.select.runs import EqualRun

if TYPE_CHECKING:
    import highspy
else:
    highspy = LazyModule("highspy")

__all__ = ["ProgramAnswer", "SelectProgram"]

# Budget and objective in the program's own units: large against HiGHS's absolute tolerances (1e-9 set below,
# 1e-6 for the gap), small against the 15 digits of its floats.
_BUDGET_UNITS = 1e4
_SECONDS_UNITS = 1e5
_MAX_REPAIRS = 8
_BLIND_UNITS = 1e-8


@dataclass(frozen=True, slots=True)
class ProgramAnswer:
    """What branch and bound found: a selection (``None``: none), and ticks that no selection can undercut."""

    selection: tuple[int, ...] | None
    bound_ticks: float


class SelectProgram:
    """The integer program of one problem, for any budget."""

    def __init__(self, levels: Levels, runs: Sequence[EqualRun]) -> None:
        self.levels, self.runs = levels, list(runs)
        top = max(levels.peak_bytes(levels.fastest()), int(levels.need_bytes.max()), 1)
        self.byte_scale = top / _BUDGET_UNITS
        self.tick_scale = max(float(levels.ticks.sum()), 1.0) / _SECONDS_UNITS
        self.most_bytes = int(levels.most_before[-1]) + int(levels.need_bytes.max())
        self.costs: list[float] = []
        self.uppers: list[float] = []
        self.is_integer: list[bool] = []
        self.row_bounds: list[tuple[float, float]] = []
        self.starts, self.indices, self.values = [0], list[int](), list[float]()
        self.peak_rows: list[tuple[int, int]] = []
        self.first_column: list[int] = []
        prefix: list[tuple[int, float]] = []
        for run in self.runs:
            prefix = self._add_run(run, prefix)

    @property
    def num_columns(self) -> int:
        """How many columns the program has."""
        return len(self.costs)

    # Building

    def _add_run(self, run: EqualRun, prefix: list[tuple[int, float]]) -> list[tuple[int, float]]:
        """A run's columns and rows; returns the term for what is held after it."""
        choices = self.levels.choices[run.first]
        begin = int(self.levels.first[run.first])
        self.first_column.append(self.num_columns)
        ticks = self.levels.ticks[begin : begin + len(choices)]
        own = [self._add_column(cost / self.tick_scale, run.num_units, True) for cost in ticks.tolist()]
        self._add_row([(column, 1.0) for column in own], run.num_units, run.num_units)
        if run.num_units == 1:
            needs = [(column, float(choice.need_bytes)) for column, choice in zip(own, choices, strict=True)]
            self._add_peak_row([*prefix, *needs], 0)
        else:
            self._add_blocks(run, choices, own, prefix)
        held = self._add_column(0.0, highspy.kHighsInf, False)
        terms = [(column, -float(choice.held_bytes)) for column, choice in zip(own, choices, strict=True)]
        before = [(column, -value) for column, value in prefix]
        self._add_row(self._scaled([(held, 1.0), *before, *terms]), 0.0, highspy.kHighsInf)
        return [(held, 1.0)]

    def _add_blocks(
        self, run: EqualRun, choices: list[Choice], own: list[int], prefix: list[tuple[int, float]]
    ) -> None:
        """Rule 2's rows."""
        for rank, position in enumerate(run.order):
            choice, used = choices[position], self._add_column(0.0, 1.0, True)
            self._add_row([(own[position], 1.0), (used, -float(run.num_units))], -highspy.kHighsInf, 0.0)
            for step, need in (
                (run.forward_step_bytes, choice.forward_need_bytes),
                (run.backward_step_bytes, choice.backward_need_bytes),
            ):
                earlier = [(own[k], float(choices[k].held_bytes + step)) for k in run.order[:rank]]
                slope = choice.held_bytes + step
                if slope >= 0:
                    earlier.append((own[position], float(slope)))
                    need -= slope
                # Switched off, the row must hold whatever is chosen: levels of at most ``most_bytes``.
                off = float(max(self.most_bytes - self.levels.floor_bytes, 0))
                self._add_peak_row([*prefix, *earlier, (used, off)], -need + int(off))

    def _add_column(self, cost: float, upper: float, is_integer: bool) -> int:
        self.costs.append(cost)
        self.uppers.append(float(upper))
        self.is_integer.append(is_integer)
        return len(self.costs) - 1

    def _add_row(self, terms: list[tuple[int, float]], lower: float, upper: float) -> None:
        self.indices += [column for column, _ in terms]
        self.values += [value for _, value in terms]
        self.starts.append(len(self.indices))
        self.row_bounds.append((lower, upper))

    def _add_peak_row(self, terms: list[tuple[int, float]], offset_bytes: int) -> None:
        """A row of bytes: at most the budget plus an offset. Prefix terms are in scaled bytes already."""
        self.peak_rows.append((len(self.row_bounds), offset_bytes))
        self._add_row(self._scaled(terms), -highspy.kHighsInf, highspy.kHighsInf)

    def _scaled(self, terms: list[tuple[int, float]]) -> list[tuple[int, float]]:
        """Bytes in the program's units; held columns are in those units themselves."""
        return [
            (column, value if not self.is_integer[column] else value / self.byte_scale)
            for column, value in terms
        ]

    # Solving

    def solve(
        self, budget_bytes: int, *, start: Sequence[int] | None = None, max_nodes: int = 20_000
    ) -> ProgramAnswer:
        """Branch and bound; what it finds is checked in whole bytes, and tightened if a tolerance leaked.

        Args:
            budget_bytes: a feasible budget.
            start: a selection within the budget, to begin with.
            max_nodes: where to stop; a count and not a time, so that the answer is always the same.
        """
        highs = quiet_highs()
        for name, value in (
            ("mip_rel_gap", 0.0),
            ("mip_max_nodes", max_nodes),
            ("mip_feasibility_tolerance", 1e-9),
            ("primal_feasibility_tolerance", 1e-9),
        ):
            highs.setOptionValue(name, value)
        bound_ticks, tight_bytes = 0.0, budget_bytes
        for attempt in range(_MAX_REPAIRS):
            highs.passModel(self._model(tight_bytes))
            if start is not None:
                highs.setSolution(self._as_solution(start))
            highs.run()
            info = highs.getInfo()
            if attempt == 0:
                bound_ticks = info.mip_dual_bound * self.tick_scale
            if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
                break
            selection = self._read(np.array(highs.getSolution().col_value))
            excess = self.levels.peak_bytes(selection) - budget_bytes
            if excess <= 0:
                return ProgramAnswer(selection, bound_ticks)
            # HiGHS does not see a few bytes of a large budget: go below what it sees, further every time.
            tight_bytes -= max(excess, int(self.byte_scale * _BLIND_UNITS) + 1) * 4**attempt
        return ProgramAnswer(None, bound_ticks)

    def _model(self, budget_bytes: int) -> highspy.HighsLp:
        bounds = np.array(self.row_bounds)
        for row, offset_bytes in self.peak_rows:
            bounds[row, 1] = (budget_bytes + offset_bytes) / self.byte_scale
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = self.num_columns, len(bounds)
        model.col_cost_ = np.array(self.costs)
        model.col_lower_ = np.where(self.is_integer, 0.0, -highspy.kHighsInf)
        model.col_upper_ = np.array(self.uppers)
        model.row_lower_, model.row_upper_ = bounds[:, 0], bounds[:, 1]
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.array(self.starts)
        model.a_matrix_.index_ = np.array(self.indices)
        model.a_matrix_.value_ = np.array(self.values)
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        model.integrality_ = [kinds[is_integer] for is_integer in self.is_integer]
        return model

    def _read(self, values: np.ndarray) -> tuple[int, ...]:
        """A solution as one choice per unit."""
        selection: list[int] = []
        for run, column in zip(self.runs, self.first_column, strict=True):
            num_choices = len(self.levels.choices[run.first])
            counts = np.rint(values[column : column + num_choices]).astype(int).tolist()
            for position in run.order or range(num_choices):
                selection += [position] * counts[position]
        return tuple(selection)

    def _as_solution(self, selection: Sequence[int]) -> highspy.HighsSolution:
        """A selection as values of the counting columns; HiGHS works out the others."""
        values = np.full(self.num_columns, highspy.kHighsUndefined)
        for run, column in zip(self.runs, self.first_column, strict=True):
            chosen = selection[run.first : run.first + run.num_units]
            for position in range(len(self.levels.choices[run.first])):
                values[column + position] = sum(one == position for one in chosen)
        solution = highspy.HighsSolution()
        solution.col_value = values.tolist()
        return solution
