"""Models whose parameters `fully_shard` (FSDP2) divides over ranks: who gathers which module's parameters."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

__all__ = ["class_before_sharding", "gather", "is_sharding", "owners_of", "sharding_modules"]


def _sharding_class() -> type | None:
    # Not imported: importing it costs a second, and who shards has done so.
    module = sys.modules.get("torch.distributed.fsdp")
    return getattr(module, "FSDPModule", None)


def class_before_sharding(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that `fully_shard` found; the given one, if that is not of its making."""
    sharding = _sharding_class()
    if sharding is None or kind.__bases__[:1] != (sharding,):
        return kind
    return kind.__bases__[1]


def is_sharding(module: Any) -> bool:
    """Whether `fully_shard` was called on a module."""
    found = _sharding_class()
    return found is not None and isinstance(module, found)


def sharding_modules(model: nn.Module) -> list[Any]:
    """The modules that gather parameters before they run."""
    return [] if _sharding_class() is None else [module for module in model.modules() if is_sharding(module)]


def owners_of(model: nn.Module) -> dict[nn.Module, Any]:
    """For each module, the one that gathers its own parameters: itself, or the nearest one around it."""
    owners: dict[nn.Module, Any] = {}

    def visit(module: nn.Module, owner: Any) -> None:
        owner = module if is_sharding(module) else owner
        if module not in owners:
            owners[module] = owner
            for child in module.children():
                visit(child, owner)

    visit(model, None)
    return owners


def gather(owners: dict[nn.Module, Any], root: nn.Module | None, module: nn.Module) -> None:
    """Gathers the parameters of a unit that is replayed together with others, before its own backward has begun.

    They stay until its own backward has ended, which does not gather them again.

    Args:
        owners: for each unit, who gathers its parameters; filled when it is first needed, since a model may be sharded
            after its plan is applied.
        root: the model.
        module: the unit.
    """
    if module not in owners:
        parameter = next(module.parameters(), None)
        if root is None or parameter is None or type(parameter).__name__ != "DTensor":
            return
        owners.update(owners_of(root))
    owner = owners.get(module)
    if owner is not None:
        owner.unshard()
