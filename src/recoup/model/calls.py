"""Which modules a step calls, in which order and nesting, and how many bytes each call allocates."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as hooks
from torch.nn.utils.parametrize import type_before_parametrizations

from recoup.devices.tracker import MemoryTracker
from recoup.errors import SampleError
from recoup.model.sharded import class_before_sharding
from recoup.model.step import TrainingStep
from recoup.model.tracing import compiled_functions_off
from recoup.snapshot.own_code import original_of_compiled
from recoup.tensors import storages

__all__ = [
    "ModuleCall",
    "class_of_module",
    "form_of_module",
    "hooks_on_all_modules",
    "kind_of_module",
    "module_names",
    "watch_calls",
]


@dataclass(eq=False)
class ModuleCall:
    """One call of a module in a step.

    Attributes:
        name: of the module in the model; the model itself is ``""``.
        module: that was called.
        inside: the calls that it made.
        made_bytes: of all storages that were allocated in it.
    """

    name: str
    module: nn.Module
    inside: list[ModuleCall] = field(default_factory=list)
    made_bytes: int = 0

    def walk(self) -> Iterator[ModuleCall]:
        """This call and all inside it, in order."""
        yield self
        for call in self.inside:
            yield from call.walk()


def module_names(model: nn.Module) -> dict[nn.Module, str]:
    """Every module's name; the first of several names."""
    return {module: name for name, module in model.named_modules()}


def class_of_module(module: nn.Module) -> type[nn.Module]:
    """A module's class; for a parametrized or sharded module, which gets a class of its own, the one before that.

    >>> layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    >>> type(layer) is nn.Linear, class_of_module(layer) is nn.Linear
    (False, True)
    """
    found: type[nn.Module] = type_before_parametrizations(module)
    return class_before_sharding(found)


def form_of_module(module: nn.Module) -> tuple[Any, ...]:
    """Equal for modules of the same class with the same layers; modules without parameters may differ."""
    layers = tuple(
        class_of_module(child) for child in module.modules() if any(True for _ in child.parameters())
    )
    return (class_of_module(module), layers, _shapes(module))


def kind_of_module(module: nn.Module) -> tuple[Any, ...]:
    """Equal for modules of the same class with the same parameters and settings: blocks of one kind."""
    settings = tuple((class_of_module(child), child.extra_repr()) for child in module.modules())
    return (class_of_module(module), settings, _shapes(module))


def _shapes(module: nn.Module) -> tuple[Any, ...]:
    return tuple((p.shape, p.dtype, p.requires_grad) for p in module.parameters())


def _forget(tensor: Tensor) -> None:
    """Of a graph that is not run backwards."""


def _forgotten(packed: None) -> Tensor:
    raise RuntimeError("this graph is of a forward that recoup only watched, for which nothing was saved")


def watch_calls(step: TrainingStep) -> ModuleCall:
    """Runs the step's forward once and returns its calls, under one root; notes the step's inputs.

    It runs with gradients, but holds nothing for a backward: without gradients attention has kernels of its own, which
    take time to build. Where that fails or does not fit, since the forward runs a backward of its own, or a
    function holds tensors itself, it runs without a graph; and with one, which may not fit, where it needs one. Where
    units wait for other ranks, memory that runs out is an error at once: it may be that of one rank alone.

    Raises:
        SampleError: the model does not take the sample.
    """
    try:
        # What the model keeps of this graph cannot be run backwards: where recoup sees it, it is put back.
        with step.repeated(), saved_tensors_hooks(_forget, _forgotten):
            return _watch_calls(step)
    except SampleError:
        raise
    except Exception as error:
        # It must not run the step again while others wait in it.
        if step.waits_in_units and isinstance(error, torch.OutOfMemoryError):
            raise
    # Here, since the error holds frames with their tensors.
    return _watch_without_gradients(step)


def _watch_without_gradients(step: TrainingStep) -> ModuleCall:
    try:
        with step.repeated(), torch.no_grad():
            return _watch_calls(step)
    except (torch.OutOfMemoryError, SampleError):
        raise
    except Exception as first:
        try:
            with step.repeated():
                return _watch_calls(step)
        except torch.OutOfMemoryError:
            raise
        except Exception as second:
            # The first is the cause, unless it only says that there is no graph.
            error = second if _NO_GRAPH in str(first) else first
            raise step.refusal(error) from error


_NO_GRAPH = "does not require grad"


def _watch_calls(step: TrainingStep) -> ModuleCall:
    root = ModuleCall("", step.model)
    with (
        # The compiler would compile the hooks that note calls, too, and give up after some of them.
        compiled_functions_off(),
        step.shards.alone(),
        step.finding_writes(),
        MemoryTracker() as memory,
        _calls_noted(root, module_names(step.model), memory, _compiled_codes(step)),
    ):
        step.run_unchecked()
    step.inputs = [
        tensor for tensor in step.reached.tensors if any(map(memory.lived_before, storages(tensor)))
    ]
    outer = [call for call in root.inside if call.module is step.model]
    if len(root.inside) == 1 and outer:
        return outer[0]
    root.made_bytes = memory.made_bytes
    return root


def _compiled_codes(step: TrainingStep) -> dict[CodeType, str]:
    """The code of the compiled functions that a step can reach, with their names."""
    originals = {name: original_of_compiled(function) for name, function in step.compiled}
    return {
        code: name for name, original in originals.items() if (code := getattr(original, "__code__", None))
    }


def _check_not_in(compiled: dict[CodeType, str], module: str) -> None:
    """Refuses a call of a module by a compiled function, in which nothing of it can be seen.

    Raises:
        SampleError: it is called there.
    """
    frame = sys._getframe() if compiled else None
    while frame is not None:
        if (name := compiled.get(frame.f_code)) is not None:
            raise SampleError(
                f"The compiled function {name!r} calls the module {module or 'model'!r}, where recoup cannot see it."
                " Compile the module itself instead (module.compile(), or torch.compile on its forward), which"
                " engine='auto' plans; compiled functions that call no modules run as they are."
            )
        frame = frame.f_back


@contextmanager
def _calls_noted(
    root: ModuleCall, names: dict[nn.Module, str], memory: MemoryTracker, compiled: dict[CodeType, str]
) -> Iterator[None]:
    stack = [root]

    def enter(module: nn.Module, args: Any) -> None:
        if module in names:
            _check_not_in(compiled, names[module])
            call = ModuleCall(names[module], module, made_bytes=-memory.made_bytes)
            stack[-1].inside.append(call)
            stack.append(call)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if module in names and stack[-1].module is module:
            call = stack.pop()
            call.made_bytes += memory.made_bytes
            if isinstance(output, Iterator):
                # Its code runs when others read the items: its calls belong to them.
                if not call.name:
                    raise SampleError(
                        f"The forward of {type(module).__name__} is a generator: its code has not run when it returns."
                        " Let it return a list of what it yields."
                    )
                stack[-1].inside.remove(call)

    with hooks_on_all_modules(enter, leave):
        yield


@contextmanager
def hooks_on_all_modules(
    enter: Callable[[nn.Module, Any], None],
    leave: Callable[[nn.Module, Any, Any], None],
    *,
    always_leave: bool = False,
) -> Iterator[None]:
    """Has functions called before and after every module's forward; if asked for, also after an exception."""
    handles = [
        hooks.register_module_forward_pre_hook(enter),
        hooks.register_module_forward_hook(leave, always_call=always_leave),
    ]
    try:
        with warnings.catch_warnings():
            # Of wrappers that torch.compile made, which are not what the hooks look for.
            warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
            yield
    finally:
        for handle in handles:
            handle.remove()
