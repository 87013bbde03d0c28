"""One option per unit, skips included: dual prices and labels."""

from recoup.planning.solvers.select.solver import (
    ONE_OPTION_SCHEDULES,
    PreparedSelect,
    SelectSolver,
    solve_select,
)

__all__ = ["ONE_OPTION_SCHEDULES", "PreparedSelect", "SelectSolver", "solve_select"]
