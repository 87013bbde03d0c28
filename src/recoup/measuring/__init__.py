"""What a training step costs: bytes and seconds, unit by unit."""

from recoup.measuring.hardware import Hardware, find_hardware, measure_hardware, read_hardware, write_hardware
from recoup.measuring.measure import measure
from recoup.measuring.optimizer import OptimizerCost, optimizer_cost
from recoup.measuring.options import Recipe
from recoup.measuring.preserve import preserving
from recoup.measuring.profile import Profile, ProfiledUnit
from recoup.measuring.tracker import MemoryTracker

__all__ = [
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
