"""Options that move values to other stores and back."""

from recoup.planning.solvers.spill.solver import SPILL_SCHEDULES, PreparedSpill, SpillSolver, solve_spill

__all__ = ["SPILL_SCHEDULES", "PreparedSpill", "SpillSolver", "solve_spill"]
