"""Building what a command line names: ``package.module:function``."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from recoup.errors import CommandError

__all__ = ["Factory", "Made", "load_factory"]

_NAMES = ("model", "sample", "loss", "optimizer")
_WANTED = (
    "It should return (model, sample), (model, sample, loss) or (model, sample, loss, optimizer), or a dict with"
    " these names."
)


@dataclass(frozen=True)
class Made:
    """What a factory made.

    Attributes:
        model: what is trained.
        sample: that it is called with.
        loss: from the model's output to a scalar; ``None`` for the output's own.
        optimizer: whose state counts; ``None`` for none.
        step: runs a whole step, instead of sample and loss.
    """

    model: nn.Module
    sample: Any = None
    loss: Callable[[Any], Any] | None = None
    optimizer: torch.optim.Optimizer | None = None
    step: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Factory:
    """A function that makes a model and what goes with it.

    Attributes:
        spec: as the command line names it.
        make: the function.
    """

    spec: str
    make: Callable[..., Any]

    @property
    def takes_batch(self) -> bool:
        """Whether it can be called with a batch size."""
        return _positional(self.make) is not None

    @property
    def needs_batch(self) -> bool:
        """Whether it cannot be called without one."""
        parameter = _positional(self.make)
        return parameter is not None and parameter.default is inspect.Parameter.empty

    def build(self, batch: int | None = None, *, unallocated: bool = False) -> Made:
        """Calls it.

        Args:
            batch: the batch size to call it with, if it takes one.
            unallocated: make tensors without memory.

        Raises:
            CommandError: it raises, needs another number of arguments, or returns something else.
        """
        arguments = self._arguments(batch)
        try:
            with torch.device("meta") if unallocated else nullcontext():
                made = self.make(*arguments)
        except (Exception, SystemExit) as error:
            raise CommandError(f"{self.spec} raised {type(error).__name__}: {error}") from error
        return _read(self.spec, made)

    def _arguments(self, batch: int | None) -> tuple[int, ...]:
        if batch is None and self.needs_batch:
            raise CommandError(f"{self.spec} takes an argument, the batch size; give --batch.")
        if batch is not None and not self.takes_batch:
            raise CommandError(f"{self.spec} takes no batch size; leave out --batch, or let it take one.")
        return () if batch is None else (batch,)


def load_factory(spec: str) -> Factory:
    """Imports a factory; the current folder counts among the places to look.

    Raises:
        CommandError: the module cannot be imported, or has no such function.
    """
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module_name, _, name = spec.partition(":")
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:
        raise CommandError(f"Cannot import {module_name!r}: {type(error).__name__}: {error}") from error
    try:
        make = attrgetter(name)(module)
    except AttributeError:
        functions = [known for known, value in vars(module).items() if inspect.isfunction(value)]
        known = f"; it has {', '.join(functions[:8])}" if functions else ""
        raise CommandError(f"Module {module_name!r} has no {name!r}{known}.") from None
    if not callable(make) or isinstance(make, nn.Module):
        raise CommandError(
            f"{spec} is a {type(make).__name__} and not a function that makes a model. {_WANTED}"
        )
    return Factory(spec, make)


def _positional(make: Callable[..., Any]) -> inspect.Parameter | None:
    """The first parameter that can be given by position, which is the batch size."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except ValueError:
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return next((parameter for parameter in parameters if parameter.kind in kinds), None)


def _read(spec: str, made: Any) -> Made:
    if isinstance(made, Mapping):
        unknown = set(made) - {*_NAMES, "step"}
        if unknown or "model" not in made:
            names = ", ".join(map(str, made)) or "nothing"
            raise CommandError(f"{spec} returned a dict with {names}. {_WANTED}")
        parts = dict(made)
    elif isinstance(made, (tuple, list)) and 2 <= len(made) <= len(_NAMES):
        parts = dict(zip(_NAMES, made, strict=False))
    else:
        what = f"{len(made)} things" if isinstance(made, (tuple, list)) else f"a {type(made).__name__}"
        raise CommandError(f"{spec} returned {what}. {_WANTED}")
    _check(spec, parts)
    return Made(**parts)


def _check(spec: str, parts: dict[str, Any]) -> None:
    def refuse(name: str, wanted: str) -> CommandError:
        return CommandError(
            f"{spec} returned a {type(parts[name]).__name__} as {name}, not {wanted}. {_WANTED}"
        )

    if not isinstance(parts["model"], nn.Module):
        raise refuse("model", "a torch.nn.Module")
    for name in ("loss", "step"):
        if parts.get(name) is not None and not callable(parts[name]):
            raise refuse(name, "a function")
    if not isinstance(parts.get("optimizer"), (torch.optim.Optimizer, type(None))):
        raise refuse("optimizer", "a torch.optim.Optimizer")
