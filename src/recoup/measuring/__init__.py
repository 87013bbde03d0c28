"""What a training step costs: bytes and, later, seconds."""

from recoup.measuring.optimizer import OptimizerCost, optimizer_cost
from recoup.measuring.preserve import preserving
from recoup.measuring.tracker import MemoryTracker

__all__ = ["MemoryTracker", "OptimizerCost", "optimizer_cost", "preserving"]
