"""recoup: train bigger on the memory you have."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from recoup import errors, policies, sizes

if TYPE_CHECKING:
    from recoup import manual, measuring, planning, report, stores
    from recoup.auditing import audit
    from recoup.batching import largest_batch
    from recoup.checkpointing import Checkpoint, checkpoint, describe, is_replaying, keep, torch_checkpoint
    from recoup.engines import apply, remove
    from recoup.fitting import fit, verify
    from recoup.measuring import measure
    from recoup.piloting import autopilot
    from recoup.plans import frontier, minimum_budget, plan
    from recoup.report.operations import explain

__version__ = "0.2.0"

__all__ = [
    "Checkpoint",
    "apply",
    "audit",
    "autopilot",
    "checkpoint",
    "describe",
    "errors",
    "explain",
    "fit",
    "frontier",
    "is_replaying",
    "keep",
    "largest_batch",
    "manual",
    "measure",
    "measuring",
    "minimum_budget",
    "plan",
    "planning",
    "policies",
    "remove",
    "report",
    "sizes",
    "stores",
    "torch_checkpoint",
    "verify",
]

# Imported when first used: torch and the planner take a while, and the command line's --help needs neither.
_LATER = {
    "Checkpoint": "checkpointing",
    "apply": "engines",
    "audit": "auditing",
    "autopilot": "piloting",
    "checkpoint": "checkpointing",
    "describe": "checkpointing",
    "explain": "report.operations",
    "fit": "fitting",
    "frontier": "plans",
    "is_replaying": "checkpointing",
    "keep": "checkpointing",
    "largest_batch": "batching",
    "measure": "measuring",
    "minimum_budget": "plans",
    "plan": "plans",
    "remove": "engines",
    "torch_checkpoint": "checkpointing",
    "verify": "fitting",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        value = getattr(import_module(f"recoup.{_LATER[name]}"), name)
    elif name in ("manual", "measuring", "planning", "report", "stores"):
        value = import_module(f"recoup.{name}")
    else:
        raise AttributeError(f"module 'recoup' has no attribute {name!r}")
    # The next use finds it without coming here.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
