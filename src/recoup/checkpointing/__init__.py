"""The primitive: functions, alone or in a row, whose saved tensors are dropped and recomputed in the backward."""

from recoup.checkpointing.api import Checkpoint, checkpoint, torch_checkpoint
from recoup.checkpointing.describe import describe
from recoup.checkpointing.groups import Group
from recoup.checkpointing.keeping import keep
from recoup.checkpointing.replay import is_replaying
from recoup.checkpointing.span import Span

__all__ = [
    "Checkpoint",
    "Group",
    "Span",
    "checkpoint",
    "describe",
    "is_replaying",
    "keep",
    "torch_checkpoint",
]
