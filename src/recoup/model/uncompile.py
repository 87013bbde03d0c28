"""Modules that their user compiled, run eagerly while a plan is on them: units are then captured one by one.

What `torch.compile` and `Module.compile` made comes back when the plan is removed. Copies of a model lose what
``.compile()`` made, with or without recoup.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

from recoup.model.replace_forward import StandIn, install, installed, own_forward, uninstall
from recoup.snapshot.own_code import is_compiled_function, original_of_compiled
from recoup.torch_private import CALLS_OF_MODULES, all_compiler_settings

__all__ = [
    "compiled_code",
    "inner_model",
    "is_compiled",
    "is_uncompiled",
    "recompile",
    "runs_eagerly",
    "uncompile",
    "uncompiled",
    "without_forwards",
]

_HIDDEN = "_recoup_compiled_call"
_INNER = "_orig_mod"
_CALL = "_compiled_call_impl"


class _Hidden:
    """What ``.compile()`` set on a module that now runs eagerly, in the module's dictionary; copies have none."""

    def __init__(self, call: Any = None) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return _Hidden, ()


class EagerForward(StandIn):
    """Stands in for a compiled forward: runs what was compiled, eagerly."""

    is_planned = False

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.eager = _eager(module)

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__" and "eager" in self.__dict__:
            return self.eager
        return super().__getattr__(name)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the eager forward."""
        return self.eager(*args, **kwargs)


def is_compiled(model: nn.Module) -> bool:
    """Whether a model, or a module in it, was compiled with torch's own backend, and nothing with another one."""
    found = compiled_code(model)
    return bool(found) and all(map(_generates, found))


def compiled_code(model: nn.Module) -> list[Any]:
    """All that was compiled in a model, with any backend, whether it runs eagerly now or not."""
    hidden = [call for module in model.modules() if (call := _hidden(module)) is not None]
    hidden += [one.original for one in installed(model) if isinstance(one, EagerForward)]
    return [*hidden, *(compiled for _, compiled in _compiled(model))]


def inner_model(model: Any) -> Any:
    """What `torch.compile` was given, if it made this model; else the model itself."""
    inner = getattr(model, "_modules", {}).get(_INNER)
    return model if inner is None else inner


def is_uncompiled(model: nn.Module) -> bool:
    """Whether what was compiled runs eagerly now."""
    return any(_hidden(module) is not None or runs_eagerly(module) for module in model.modules())


def uncompile(model: nn.Module) -> None:
    """Lets all that was compiled run eagerly, until `recompile`; or nothing, if an exception leaves it."""
    done: list[nn.Module] = []
    try:
        for module, compiled in list(_compiled(model)):
            if vars(module).get(_CALL) is compiled:
                module.__dict__[_HIDDEN] = _Hidden(compiled)
                module.__dict__[_CALL] = None
            else:
                install(module, EagerForward(module))
            done.append(module)
    except BaseException:
        for module in done:
            _recompile(module)
        raise


def recompile(model: nn.Module) -> None:
    """Brings back what was compiled, after the plan is removed."""
    for module in model.modules():
        _recompile(module)


def _recompile(module: nn.Module) -> None:
    if (call := _hidden(module)) is not None:
        module.__dict__[_CALL] = call
    module.__dict__.pop(_HIDDEN, None)
    forward = vars(module).get("forward")
    if isinstance(forward, EagerForward):
        uninstall(module, forward.original)


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """A block in which all that was compiled runs eagerly."""
    was_before = is_uncompiled(model)
    uncompile(model)
    try:
        yield
    finally:
        if not was_before:
            recompile(model)


def _compiled(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Modules with what torch.compile made of them."""
    for module in model.modules():
        if vars(module).get(_CALL) is not None:
            yield module, vars(module)[_CALL]
        forward = own_forward(module)
        is_wrapper = _INNER in module._modules or is_compiled_function(forward)
        if is_wrapper and not runs_eagerly(module):
            yield module, forward


def runs_eagerly(module: nn.Module) -> bool:
    """Whether a compiled forward runs eagerly now."""
    forward = vars(module).get("forward")
    while isinstance(forward, StandIn) and not isinstance(forward, EagerForward):
        forward = forward.original
    return isinstance(forward, EagerForward)


def without_forwards(
    functions: Iterable[tuple[str, Any]], models: Iterable[nn.Module]
) -> list[tuple[str, Any]]:
    """Of compiled functions with their names, those that are neither a call nor a forward of a module."""
    forwards = [own_forward(module) for model in models for module in model.modules()]
    known = {id(getattr(forward, "__func__", forward)) for forward in forwards}
    return [
        (name, function)
        for name, function in functions
        if id(function) not in known
        and getattr(original_of_compiled(function), "__code__", None) not in CALLS_OF_MODULES
    ]


def _hidden(module: nn.Module) -> Any:
    holder = vars(module).get(_HIDDEN)
    return holder.call if holder is not None else None


def _generates(compiled: Any) -> bool:
    """Whether torch's own backend compiles it: that alone has settings."""
    return all_compiler_settings(compiled) is not None


def _eager(module: nn.Module) -> Any:
    inner = module._modules.get(_INNER)
    if inner is not None:
        return inner.__call__
    compiled = own_forward(module)
    original = original_of_compiled(compiled)
    # What is set on an instance is called without it, unless it was bound to it; a method of the class always is.
    return MethodType(original, module) if isinstance(compiled, MethodType) else original
