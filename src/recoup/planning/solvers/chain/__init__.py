"""Chains of units: the exact dynamic program, and its grouped form for long ones."""

from recoup.planning.solvers.chain.solver import ChainSolver, solve_chain

__all__ = ["ChainSolver", "solve_chain"]
