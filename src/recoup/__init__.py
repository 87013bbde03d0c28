"""recoup: train bigger on the memory you have."""

from recoup import errors, manual, measuring, policies, sizes, stores
from recoup.checkpointing import Checkpoint, checkpoint, describe, is_replaying, torch_checkpoint

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "checkpoint",
    "describe",
    "errors",
    "is_replaying",
    "manual",
    "measuring",
    "policies",
    "sizes",
    "stores",
    "torch_checkpoint",
]
