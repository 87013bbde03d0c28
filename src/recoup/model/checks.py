"""Models that no plan can be for."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from recoup.errors import FitError, SampleError

__all__ = ["check_model"]


def check_model(model: Any, error: type[FitError] = SampleError) -> None:
    """Refuses what is no module, replicates itself, or has a parameter or buffer without a shape.

    Raises:
        FitError: the given error; it names the module.
    """
    if not isinstance(model, nn.Module):
        raise error(f"The model must be a torch.nn.Module; got a {type(model).__name__}.")
    for name, module in model.named_modules():
        if isinstance(module, nn.DataParallel):
            raise error(
                "The model is, or contains, an nn.DataParallel, whose copies would run the original's parameters under"
                " a plan: give the module inside it, and train with nn.parallel.DistributedDataParallel, one process"
                " per device, or on one device."
            )
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(map(is_lazy, own)):
            where = f" {name!r}" if name else ""
            raise error(
                f"{type(module).__name__}{where} has not run yet: its parameters have no shapes. Run the model once on"
                " a batch before anything is measured: with torch.no_grad(): model(x)."
            )
