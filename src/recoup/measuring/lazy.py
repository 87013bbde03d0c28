"""Lazy modules, which have no shapes until they run for the first time."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from recoup.errors import SampleError

__all__ = ["check_initialised"]


def check_initialised(model: nn.Module) -> None:
    """Refuses a model of which a parameter or buffer has no shape yet.

    Raises:
        SampleError: it names the module.
    """
    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(map(is_lazy, own)):
            where = f" {name!r}" if name else ""
            raise SampleError(
                f"{type(module).__name__}{where} has not run yet: its parameters have no shapes. Run the model once on"
                " a batch before anything is measured: with torch.no_grad(): model(x)."
            )
