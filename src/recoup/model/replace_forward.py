"""Replacing a module's forward on the instance, and removing the replacement without a trace."""

from __future__ import annotations

import copy
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

from recoup.errors import ApplyError
from recoup.model.tracing import is_traced

__all__ = [
    "StandIn",
    "allow_replicas",
    "install",
    "installed",
    "intercepted",
    "own_forward",
    "suspended",
    "uninstall",
    "uninstall_plan",
]

_FORWARD = "forward"
_REPLICATE = "_replicate_for_data_parallel"
_OF_FUNCTIONS = frozenset(
    (
        "__annotations__",
        "__closure__",
        "__code__",
        "__defaults__",
        "__globals__",
        "__kwdefaults__",
        "__name__",
        "__qualname__",
        "__self__",
        "__type_params__",
    )
)
"""Attributes of a forward that others read, and find unchanged."""


class StandIn(ABC):
    """Runs instead of a module's forward. It is copied and pickled with its module.

    It looks like the original forward: the same signature, name, documentation and code. Where the model is traced,
    exported, compiled or transformed, the original runs.
    """

    is_planned = True
    """Whether it belongs to a plan, and goes while the model runs plainly."""
    was_own = True
    """Whether the module had a forward of its own: the class's may be another one by the time it is put back. On the
    class for stand-ins that older versions have pickled."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.original: Any = module.forward
        self.was_own = _FORWARD in module.__dict__
        # On the instance, since the class has its own.
        self.__doc__ = getattr(self.original, "__doc__", None)
        self.__module__ = getattr(self.original, "__module__", type(module).__module__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs when the module is called."""
        return self.run_traced(*args, **kwargs) if is_traced() else self.run(*args, **kwargs)

    @abstractmethod
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Runs when the module is called in eager mode."""

    def run_traced(self, *args: Any, **kwargs: Any) -> Any:
        """Runs when the module is traced. Dynamo traces this method too."""
        return self.original(*args, **kwargs)

    # Not properties: doctest and others, which unwrap classes, would find them on the class.
    def __getattr__(self, name: str) -> Any:
        original = self.__dict__.get("original")  # none yet while a copy is made
        if original is not None:
            if name == "__wrapped__":
                return original
            if name == "__signature__":
                return _signature(original)
            if name == "__func__":
                return self._unbound()
            if name in _OF_FUNCTIONS:
                return getattr(original, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _unbound(self) -> Callable[..., Any]:
        """This stand-in as an unbound function, which others bind to this module or to a copy of it."""

        @functools.wraps(self.original.__func__)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._bound_to(module)(*args, **kwargs)

        return forward

    def _bound_to(self, module: nn.Module) -> StandIn:
        if module is self.module:
            return self
        bound = copy.copy(self)
        bound.module = module
        bound.original = MethodType(self.original.__func__, module)
        return bound


def _signature(fn: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError) as error:
        raise AttributeError(str(error)) from None


def install(module: nn.Module, stand_in: Callable[..., Any]) -> None:
    """Installs ``stand_in`` as the module's forward; hooks run around it as before."""
    module.__dict__[_FORWARD] = stand_in
    if isinstance(stand_in, StandIn):
        # A replica would share the stand-in, which runs the original module.
        module.__dict__[_REPLICATE] = _refuse_replicas


def _refuse_replicas() -> None:
    raise ApplyError(
        "nn.DataParallel copies a model that has a plan, and the copies would run the original's parameters: use"
        " nn.parallel.DistributedDataParallel with one process per device, or take the plan off with"
        " recoup.remove(model)."
    )


def uninstall(module: nn.Module, original: Callable[..., Any], *, was_own: bool = True) -> None:
    """Restores a forward: the class's own, or one that was set on the instance."""
    function = getattr(original, "__func__", None)
    if not isinstance(original, StandIn):
        module.__dict__.pop(_REPLICATE, None)
    # A scripted forward is an attribute of the instance, not a method of the class.
    is_of_class = function is not None and function is getattr(type(module), _FORWARD, None)
    if is_of_class or not was_own:
        module.__dict__.pop(_FORWARD, None)
    else:
        module.__dict__[_FORWARD] = original


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward without our stand-ins."""
    forward: Callable[..., Any] = module.forward
    while isinstance(forward, StandIn):
        forward = forward.original
    return forward


def installed(model: nn.Module) -> list[StandIn]:
    """Our stand-ins in a model, in the order in which to uninstall them."""
    found = []
    for module in model.modules():
        stand_in = vars(module).get(_FORWARD)
        while isinstance(stand_in, StandIn):
            found.append(stand_in)
            stand_in = stand_in.original
    return found


def uninstall_plan(model: nn.Module) -> list[StandIn]:
    """Uninstalls the stand-ins of a plan, and returns them in that order."""
    found = [stand_in for stand_in in installed(model) if stand_in.is_planned]
    for stand_in in found:
        uninstall(stand_in.module, stand_in.original, was_own=stand_in.was_own)
    return found


def allow_replicas(model: nn.Module) -> None:
    """Removes what refuses replicas of modules whose stand-in was replaced or wrapped by someone else."""
    for module in model.modules():
        held = module.__dict__
        if held.get(_REPLICATE) is _refuse_replicas and not isinstance(held.get(_FORWARD), StandIn):
            del held[_REPLICATE]


@contextmanager
def suspended(model: nn.Module) -> Iterator[None]:
    """Uninstalls our stand-ins for the time of a ``with`` block."""
    found = uninstall_plan(model)
    try:
        yield
    finally:
        for stand_in in reversed(found):
            install(stand_in.module, stand_in)


@contextmanager
def intercepted(stand_ins: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Installs stand-ins for the time of a ``with`` block.

    >>> import torch
    >>> layer = torch.nn.Identity()
    >>> with intercepted({layer: lambda x: x + 1}):
    ...     print(layer(torch.tensor(1)))
    tensor(2)
    >>> "forward" in vars(layer)
    False
    """
    originals = {module: module.forward for module in stand_ins}
    for module, stand_in in stand_ins.items():
        install(module, stand_in)
    try:
        yield
    finally:
        for module, original in originals.items():
            uninstall(module, original)
