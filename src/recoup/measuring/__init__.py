"""What a training step costs: bytes and seconds, unit by unit."""

from recoup.devices.tracker import MemoryTracker
from recoup.measuring.estimate import (
    Cluster,
    Hardware,
    find_hardware,
    measure_hardware,
    read_hardware,
    write_hardware,
)
from recoup.measuring.measure import measure
from recoup.measuring.optimizer.cost import OptimizerCost, optimizer_cost
from recoup.model.preserve import preserving
from recoup.model.recipe import Recipe
from recoup.plans.profile import Profile, ProfiledUnit

__all__ = [
    "Cluster",
    "Hardware",
    "MemoryTracker",
    "OptimizerCost",
    "Profile",
    "ProfiledUnit",
    "Recipe",
    "find_hardware",
    "measure",
    "measure_hardware",
    "optimizer_cost",
    "preserving",
    "read_hardware",
    "write_hardware",
]
