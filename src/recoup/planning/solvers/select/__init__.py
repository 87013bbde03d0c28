"""One option per unit, skips included: dual prices, labels and integer programs."""

from recoup.planning.solvers.select.solver import (
    ONE_OPTION_SCHEDULES,
    PreparedSelect,
    SelectSolver,
    solve_select,
)

__all__ = ["ONE_OPTION_SCHEDULES", "PreparedSelect", "SelectSolver", "solve_select"]
