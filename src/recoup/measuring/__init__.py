"""What a training step costs: bytes and seconds, unit by unit."""

from recoup.measuring.measure import measure
from recoup.measuring.optimizer import OptimizerCost, optimizer_cost
from recoup.measuring.options import Recipe
from recoup.measuring.preserve import preserving
from recoup.measuring.profile import Profile, ProfiledUnit
from recoup.measuring.tracker import MemoryTracker

__all__ = [
    "MemoryTracker",
    "OptimizerCost",
    "Profile",
    "ProfiledUnit",
    "Recipe",
    "measure",
    "optimizer_cost",
    "preserving",
]
