"""From a plan to a running model."""

from recoup.engines.eager import apply, is_applied, remove
from recoup.plans.model_plan import ModelPlan, frontier, minimum_budget, plan
from recoup.plans.tree import Leaf, Segment, tree_of

__all__ = [
    "Leaf",
    "ModelPlan",
    "Segment",
    "apply",
    "frontier",
    "is_applied",
    "minimum_budget",
    "plan",
    "remove",
    "tree_of",
]
