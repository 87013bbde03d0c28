"""From a plan to a running model."""

from recoup.engines.eager import apply, is_applied, remove
from recoup.plans.by_size.plans import PlansBySize, SizeRange
from recoup.plans.model_plan import ModelPlan, frontier, minimum_budget, plan
from recoup.plans.tree import Leaf, Segment, tree_of

__all__ = [
    "Leaf",
    "ModelPlan",
    "PlansBySize",
    "Segment",
    "SizeRange",
    "apply",
    "frontier",
    "is_applied",
    "minimum_budget",
    "plan",
    "remove",
    "tree_of",
]
