"""Solvers, one algorithm a file. ``SOLVERS`` is the list that ``plan`` tries, best first."""

from recoup.planning.solvers.base import Solver
from recoup.planning.solvers.baselines import BASELINES
from recoup.planning.solvers.chain import ChainSolver
from recoup.planning.solvers.revolve import RevolveSolver
from recoup.planning.solvers.select import SelectSolver
from recoup.planning.solvers.spill import SpillSolver

__all__ = ["SOLVERS"]

SOLVERS: tuple[Solver, ...] = (ChainSolver(), SelectSolver(), SpillSolver(), RevolveSolver(), *BASELINES)
