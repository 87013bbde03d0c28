"""Models that cannot be measured or planned."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from recoup.errors import FitError, SampleError
from recoup.model.sharded import is_fsdp1
from recoup.model.uncompile import inner_model, runs_eagerly
from recoup.snapshot.own_code import is_compiled_function
from recoup.torch_private import CUDA_GRAPHS, all_compiler_settings

__all__ = ["check_compiled_functions", "check_model", "check_not_compiled", "check_not_in_compiled"]


def check_model(model: Any, error: type[FitError] = SampleError) -> None:
    """Refuses what is no module, replicates or flattens itself, or has a parameter or buffer without a shape.

    Raises:
        FitError: the given error; it names the module.
    """
    if not isinstance(model, nn.Module):
        raise error(f"The model must be a torch.nn.Module; got a {type(model).__name__}.")
    # A traced model is a ScriptModule, too, but takes hooks.
    if isinstance(model, torch.jit.RecursiveScriptModule):  # type: ignore[attr-defined]
        raise error(
            "The model is scripted as a whole (torch.jit.script), so that its calls cannot be watched: give the model"
            " that was scripted. Modules inside a model may be scripted."
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.DataParallel):
            raise error(
                "The model is, or contains, an nn.DataParallel, whose copies would run the original's parameters under"
                " a plan: give the module inside it, and train with nn.parallel.DistributedDataParallel, one process"
                " per device, or on one device."
            )
        if is_fsdp1(module):
            raise error(
                "The model is, or contains, a FullyShardedDataParallel (FSDP1), which is not supported: it replaces"
                " parameters by views of flat ones while modules run. Shard the model with"
                " torch.distributed.fsdp.fully_shard (FSDP2) instead: fsdp_version=2 for Accelerate,"
                " ModelParallelStrategy for Lightning."
            )
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(map(is_lazy, own)):
            where = f" {name!r}" if name else ""
            raise error(
                f"{type(module).__name__}{where} has not run yet: its parameters have no shapes. Run the model once on"
                " a batch before anything is measured: with torch.no_grad(): model(x)."
            )


def check_not_compiled(model: nn.Module) -> None:
    """Refuses compiled modules, whose inside cannot be measured: units that are captured replace them, or nothing does.

    Raises:
        SampleError: the model, or a module in it, is compiled.
    """
    names = [name or type(model).__name__ for name, module in model.named_modules() if _is_compiled(module)]
    if names:
        more = f" and {len(names) - 1} more modules are" if len(names) > 1 else " is"
        raise SampleError(
            f"{names[0]!r}{more} compiled. recoup.fit plans a model that was compiled, whole or in part, with torch's"
            " own backend (inductor) for engine='auto' or 'compiled', and one with another backend for"
            " engine='captured', which runs it without that backend; recoup.measure takes engine='compiled' or"
            " 'captured'. For engine='eager', give it the model as it was before torch.compile or .compile() was"
            " called."
        )


def check_not_in_compiled(model: nn.Module, others: Iterable[nn.Module]) -> None:
    """Refuses a step that calls the model, or a module of it, inside another model that is compiled.

    Raises:
        SampleError: another model that the step uses is compiled, and contains one of the model's modules.
    """
    own = set(model.modules())
    for other in others:
        inside = set(other.modules())
        # Sets of the real modules: another model may be a proxy, which has no hash.
        if not inside <= own and not inside.isdisjoint(own) and any(map(_is_compiled, inside)):
            raise SampleError(
                f"The step uses a compiled {type(inner_model(other)).__name__} that contains modules of the model. Give"
                " the compiled model itself instead of what is in it (engine='auto' plans it), or call the model as it"
                " was before torch.compile in the step."
            )


def check_compiled_functions(functions: Iterable[tuple[str, Any]], step: Any, *, uses_cuda: bool) -> None:
    """Refuses compiled functions and other models that a step cannot be measured with; others run as they are.

    Args:
        functions: that the step can reach, with their names, and what other models in it were compiled to.
        step: the user's callable for a whole step, if there is one.
        uses_cuda: whether they can make CUDA graphs.

    Raises:
        SampleError: the step itself is compiled, or a function uses CUDA graphs.
    """
    if is_compiled_function(step.func if isinstance(step, partial) else step):
        raise SampleError(
            "step= is compiled: the modules that it calls could not be told apart. Give the function as it was before"
            " torch.compile; the model, and functions that the step calls, may be compiled."
        )
    for name, function in functions:
        if uses_cuda and (all_compiler_settings(function) or {}).get(CUDA_GRAPHS):
            raise SampleError(
                f"{name!r} is compiled with CUDA graphs (mode='reduce-overhead' or 'max-autotune'), whose memory lies"
                " outside of the budget, and whose results the next call overwrites. Compile it without:"
                " mode='default' or mode='max-autotune-no-cudagraphs'."
            )


def _is_compiled(module: nn.Module) -> bool:
    if runs_eagerly(module):
        return False
    return (
        getattr(module, "_compiled_call_impl", None) is not None
        or "_orig_mod" in module._modules  # what torch.compile makes of a module
        or is_compiled_function(vars(module).get("forward"))
        or is_compiled_function(getattr(type(module), "forward", None))
    )
