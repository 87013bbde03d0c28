"""recoup: train bigger on the memory you have."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from recoup import errors, policies, sizes
from recoup.checkpointing import Checkpoint, checkpoint, describe, is_replaying, torch_checkpoint

if TYPE_CHECKING:
    from recoup import manual, measuring, planning, stores
    from recoup.auditing import audit
    from recoup.batching import largest_batch
    from recoup.engines import apply, frontier, minimum_budget, plan, remove
    from recoup.fitting import fit, verify
    from recoup.measuring import measure

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "apply",
    "audit",
    "checkpoint",
    "describe",
    "errors",
    "fit",
    "frontier",
    "is_replaying",
    "largest_batch",
    "manual",
    "measure",
    "measuring",
    "minimum_budget",
    "plan",
    "planning",
    "policies",
    "remove",
    "sizes",
    "stores",
    "torch_checkpoint",
    "verify",
]

# Imported when first used: the planner takes a while, and who only checkpoints needs none of it.
_LATER = {
    "apply": "engines",
    "audit": "auditing",
    "fit": "fitting",
    "frontier": "engines",
    "largest_batch": "batching",
    "measure": "measuring",
    "minimum_budget": "engines",
    "plan": "engines",
    "remove": "engines",
    "verify": "fitting",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(f"recoup.{_LATER[name]}"), name)
    if name in ("manual", "measuring", "planning", "stores"):
        return import_module(f"recoup.{name}")
    raise AttributeError(f"module 'recoup' has no attribute {name!r}")
