"""Factories that the command line names as ``package.module:function``."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from recoup.errors import CommandError
from recoup.model.factory_result import Made, read_made

__all__ = ["Factory", "load_factory"]


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
            CommandError: it raises, or needs another number of arguments.
            SampleError: it returns something else.
        """
        arguments = self._arguments(batch)
        try:
            with torch.device("meta") if unallocated else nullcontext():
                made = self.make(*arguments)
        except (Exception, SystemExit) as error:
            where = " (under torch.device('meta'), where tensors have no values)" if unallocated else ""
            raise CommandError(f"{self.spec} raised {type(error).__name__}{where}: {error}") from error
        return read_made(made, self.spec)

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
        raise CommandError(f"{spec} is a {type(make).__name__} and not a function that makes a model.")
    return Factory(spec, make)


def _positional(make: Callable[..., Any]) -> inspect.Parameter | None:
    """The first parameter that can be given by position, which is the batch size."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except ValueError:
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return next((parameter for parameter in parameters if parameter.kind in kinds), None)
