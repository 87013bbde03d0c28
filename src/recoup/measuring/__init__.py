"""What a training step costs: bytes and, later, seconds."""

from recoup.measuring.tracker import MemoryTracker

__all__ = ["MemoryTracker"]
