"""A small integer program, solved by HiGHS.

Rows and columns are collected as plain lists and handed over at once: building row by row through highspy's
own interface costs more than many of the solves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from recoup.planning.lazy import LazyModule

if TYPE_CHECKING:
    import highspy
else:
    highspy = LazyModule("highspy")

__all__ = ["Program", "Solution"]


@dataclass(frozen=True)
class Solution:
    """What HiGHS found within its limits.

    Attributes:
        values: the best assignment, or None if none was found.
        bound: a lower bound on the objective; infinite if the program is proven to have no solution.
    """

    values: tuple[float, ...] | None
    bound: float

    @property
    def is_infeasible(self) -> bool:
        """Whether the program is proven to have no solution."""
        return self.bound == math.inf


class Program:
    """Minimise a linear objective over columns in [0, 1], some of them binary.

    >>> program = Program()
    >>> x, y = program.column(cost=2.0), program.column(cost=3.0)
    >>> program.row([(x, 1.0), (y, 1.0)], lower=1.0)
    >>> program.solve(time_limit_s=1.0).values
    (1.0, 0.0)
    """

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._is_binary: list[bool] = []
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._starts: list[int] = [0]
        self._columns: list[int] = []
        self._factors: list[float] = []

    def column(self, *, cost: float = 0.0, is_binary: bool = True) -> int:
        """Adds a column and returns its number."""
        self._costs.append(cost)
        self._is_binary.append(is_binary)
        return len(self._costs) - 1

    def row(
        self, terms: list[tuple[int, float]], *, lower: float = -math.inf, upper: float = math.inf
    ) -> None:
        """Adds ``lower <= sum of factor * column <= upper``; each column at most once."""
        for column, factor in terms:
            self._columns.append(column)
            self._factors.append(factor)
        self._starts.append(len(self._columns))
        self._lower.append(lower)
        self._upper.append(upper)

    def solve(self, *, time_limit_s: float, is_relaxed: bool = False, cutoff: float = math.inf) -> Solution:
        """Solves the program to proven optimality, or as far as the time goes.

        Args:
            time_limit_s: seconds after which the best so far is returned.
            is_relaxed: let binary columns take every value in [0, 1].
            cutoff: do not look for anything dearer; if nothing is left, the program counts as infeasible.
        """
        solver = self.loaded(is_relaxed=is_relaxed)
        solver.setOptionValue("time_limit", max(time_limit_s, 0.01))
        solver.setOptionValue("mip_rel_gap", 0.0)
        solver.setOptionValue("mip_abs_gap", 1e-7)
        if math.isfinite(cutoff):
            solver.setOptionValue("objective_bound", cutoff)
        if solver.run() == highspy.HighsStatus.kError:
            raise RuntimeError("HiGHS refused the program; this is a fault in recoup. Please report it.")
        return _solution_of(solver, is_relaxed)

    def loaded(self, *, is_relaxed: bool) -> Any:
        """HiGHS with this program, for callers that change bounds or add rows between solves."""
        make: Any = highspy.Highs
        solver = make()
        solver.setOptionValue("output_flag", False)
        # "threads" stays unset: HiGHS keeps one pool a process and refuses a second setting.
        solver.setOptionValue("random_seed", 0)
        solver.passModel(self._model(is_relaxed))
        return solver

    def _model(self, is_relaxed: bool) -> highspy.HighsLp:
        model = highspy.HighsLp()
        size = len(self._costs)
        model.num_col_, model.num_row_ = size, len(self._lower)
        model.col_cost_ = np.array(self._costs, dtype=np.float64)
        model.col_lower_, model.col_upper_ = np.zeros(size), np.ones(size)
        model.row_lower_ = np.array(self._lower, dtype=np.float64)
        model.row_upper_ = np.array(self._upper, dtype=np.float64)
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.array(self._starts, dtype=np.int32)
        model.a_matrix_.index_ = np.array(self._columns, dtype=np.int32)
        model.a_matrix_.value_ = np.array(self._factors, dtype=np.float64)
        if not is_relaxed:
            kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
            model.integrality_ = [kinds[binary] for binary in self._is_binary]
        return model


def _solution_of(solver: Any, is_relaxed: bool) -> Solution:
    status, info = solver.getModelStatus(), solver.getInfo()
    if status == highspy.HighsModelStatus.kInfeasible:
        return Solution(values=None, bound=math.inf)
    has_values = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    values = tuple(float(value) for value in solver.getSolution().col_value) if has_values else None
    bound = float(info.mip_dual_bound)
    if is_relaxed:
        is_optimal = status == highspy.HighsModelStatus.kOptimal
        bound = float(info.objective_function_value) if is_optimal else -math.inf
    return Solution(values=values, bound=bound)
