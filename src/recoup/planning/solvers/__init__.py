<<<<<<< HEAD
"""Solvers, one algorithm a file. ``SOLVERS`` is the list that ``plan`` tries, best first."""

from recoup.planning.solvers.base import Solver
from recoup.planning.solvers.baselines import BASELINES
from recoup.planning.solvers.chain import ChainSolver
from recoup.planning.solvers.revolve import RevolveSolver

__all__ = ["SOLVERS"]

SOLVERS: tuple[Solver, ...] = (ChainSolver(), RevolveSolver(), *BASELINES)
=======
"""Solvers, one algorithm a file. Each returns plans that an independent evaluation has checked."""
>>>>>>> 34786e75294b7b6e8406f3c838ffba8dffd22f05
