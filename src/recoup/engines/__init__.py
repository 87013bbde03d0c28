"""From a plan to a running model."""

from recoup.engines.module import apply, is_applied, remove
from recoup.engines.plans import ModelPlan, frontier, minimum_budget, plan
from recoup.engines.tree import Leaf, Segment, tree_of

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
