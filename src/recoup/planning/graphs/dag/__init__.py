"""Ordered graphs under a peak limit: which values to drop and compute again."""

from recoup.planning.graphs.dag.solver import (
    DagPlan,
    Effort,
    dag_frontier,
    minimum_dag_budget,
    solve_dag,
)

__all__ = ["DagPlan", "Effort", "dag_frontier", "minimum_dag_budget", "solve_dag"]
