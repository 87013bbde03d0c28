"""Standing in for a module's forward, on the instance, and stepping aside again without a trace."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["StandIn", "install", "installed", "intercepted", "own_forward", "suspended", "uninstall"]

_FORWARD = "forward"


class StandIn(ABC):
    """Runs instead of a module's forward. Copies and pickles with its module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.original = module.forward

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What happens when the module is called."""


def install(module: nn.Module, stand_in: Callable[..., Any]) -> None:
    """Lets ``stand_in`` run instead of the module's forward; hooks of others run around it as before."""
    module.__dict__[_FORWARD] = stand_in


def uninstall(module: nn.Module, original: Callable[..., Any]) -> None:
    """Puts the forward back that was there: the class's own, or one that someone had set on the instance."""
    if getattr(original, "__func__", None) is getattr(type(module), _FORWARD, None):
        module.__dict__.pop(_FORWARD, None)
    else:
        module.__dict__[_FORWARD] = original


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward that runs where none of our stand-ins does."""
    forward: Callable[..., Any] = module.forward
    while isinstance(forward, StandIn):
        forward = forward.original
    return forward


def installed(model: nn.Module) -> list[StandIn]:
    """Our stand-ins in a model, in the order in which to take them off."""
    found = []
    for module in model.modules():
        stand_in = vars(module).get(_FORWARD)
        while isinstance(stand_in, StandIn):
            found.append(stand_in)
            stand_in = stand_in.original
    return found


@contextmanager
def suspended(model: nn.Module) -> Iterator[None]:
    """Takes our stand-ins off a model for the time of a ``with`` block."""
    found = installed(model)
    for stand_in in found:
        uninstall(stand_in.module, stand_in.original)
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
