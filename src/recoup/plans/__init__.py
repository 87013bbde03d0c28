"""A measured step in numbers, and the plan for it: no model, no measuring."""

from recoup.plans.model_plan import ModelPlan, frontier, minimum_budget, plan
from recoup.plans.profile import Profile, ProfiledUnit, Residents

__all__ = ["ModelPlan", "Profile", "ProfiledUnit", "Residents", "frontier", "minimum_budget", "plan"]
