"""Optimizers as users have them: one, several, or inside the wrapper of a trainer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from recoup.errors import SampleError

__all__ = ["Optimizers", "read_optimizers"]

Optimizers = Optimizer | Iterable[Any]
"""An optimizer, or several; each may be inside the wrapper of a trainer."""


def read_optimizers(optimizer: Optimizers | None) -> tuple[Optimizer, ...]:
    """The optimizers themselves.

    Raises:
        SampleError: something among them is no optimizer.

    >>> import torch
    >>> sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    >>> len(read_optimizers([sgd, sgd])), read_optimizers(None)
    (1, ())
    """
    if optimizer is None:
        return ()
    given = list(optimizer) if isinstance(optimizer, (list, tuple, set)) else [optimizer]
    return tuple(dict.fromkeys(map(_unwrapped, given)))


def _unwrapped(value: Any) -> Optimizer:
    found, seen = value, []
    # An optimizer with a state of its own is no wrapper.
    while not (isinstance(found, Optimizer) and "state" in vars(found)) and found not in seen:
        seen.append(found)
        found = getattr(found, "optimizer", found)
    if not isinstance(found, Optimizer):
        raise SampleError(
            f"optimizer= takes a torch.optim.Optimizer, a wrapper of one, or a list of them; got a"
            f" {type(value).__name__}. Give the optimizer that steps the model's parameters, or leave optimizer= out:"
            " then its state does not count."
        )
    return found
