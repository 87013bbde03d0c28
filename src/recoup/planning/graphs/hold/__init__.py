"""Forward graphs: which values to hold for the backward."""

from recoup.planning.graphs.hold.solver import (
    HoldFrontier,
    HoldPlan,
    HoldPoint,
    hold_frontier,
    hold_plan,
    hold_plans,
)

__all__ = ["HoldFrontier", "HoldPlan", "HoldPoint", "hold_frontier", "hold_plan", "hold_plans"]
