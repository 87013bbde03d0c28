"""recoup: train bigger on the memory you have."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from recoup import errors, measuring, policies, sizes, stores
from recoup.checkpointing import Checkpoint, checkpoint, describe, is_replaying, torch_checkpoint

if TYPE_CHECKING:
    from recoup import manual, planning

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "checkpoint",
    "describe",
    "errors",
    "is_replaying",
    "manual",
    "measuring",
    "planning",
    "policies",
    "sizes",
    "stores",
    "torch_checkpoint",
]


def __getattr__(name: str) -> Any:
    # The planner's solvers take half a second to import; who only checkpoints does not need them.
    if name in ("manual", "planning"):
        return import_module(f"recoup.{name}")
    raise AttributeError(f"module 'recoup' has no attribute {name!r}")
