"""Finding compiled code, which measuring must leave alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from recoup.errors import SampleError
from recoup.snapshot.own_code import is_compiled_function

__all__ = ["check_not_compiled"]


def check_not_compiled(model: nn.Module, others: Iterable[nn.Module], functions: Sequence[str]) -> None:
    """Refuses compiled code: measured, it would run eagerly, and go on to do so for the rest of the process.

    Args:
        model: to be measured.
        others: further models that its step uses.
        functions: the names of compiled functions that the step can reach.

    Raises:
        SampleError: the model, a module in it, another one that the step uses, or a function is compiled.
    """
    for root in (model, *others):
        names = [name or type(root).__name__ for name, module in root.named_modules() if _is_compiled(module)]
        if names:
            more = f" and {len(names) - 1} more modules are" if len(names) > 1 else " is"
            raise _refusal(f"{names[0]!r}{more}")
    if functions:
        raise _refusal(f"{functions[0]!r} is")


def _refusal(what: str) -> SampleError:
    return SampleError(
        f"{what} compiled, and recoup measures and plans eager code only: give it the model before torch.compile or"
        " .compile() is called, or train with the compiled code and without a plan (torch's own"
        " torch._functorch.config.activation_memory_budget makes compiled code hold less)."
    )


def _is_compiled(module: nn.Module) -> bool:
    return (
        getattr(module, "_compiled_call_impl", None) is not None
        or "_orig_mod" in module._modules  # what torch.compile makes of a module
        or is_compiled_function(vars(module).get("forward"))
        or is_compiled_function(getattr(type(module), "forward", None))
    )
