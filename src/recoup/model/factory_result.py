"""The result of a user's function that makes a model with its sample, loss and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from recoup.errors import SampleError

__all__ = ["Made", "read_made"]

_PARTS = ("model", "sample", "loss", "optimizer")
_WANTED = (
    "It should return (model, sample), (model, sample, loss) or (model, sample, loss, optimizer), or a dict with"
    " these names."
)


@dataclass(frozen=True)
class Made:
    """A model with its sample, loss and optimizer, as `fit` takes them.

    Attributes:
        model: that is trained.
        sample: one batch.
        loss: ``None`` for the output's own.
        optimizer: whose state counts, or several of them; ``None`` for none.
        step: runs a whole step, instead of sample and loss.
    """

    model: nn.Module
    sample: Any = None
    loss: Callable[..., Any] | None = None
    optimizer: Any = None
    step: Callable[[], Any] | None = None


def read_made(made: Any, by: str) -> Made:
    """Reads what a user's function returned: a tuple in the order of `Made`, or a dict with its names.

    Args:
        made: that it returned.
        by: the function, for the error.

    Raises:
        SampleError: it is something else.

    >>> import torch
    >>> layer = nn.Linear(3, 1)
    >>> read_made((layer, torch.zeros(2, 3), torch.sum), "make").loss is torch.sum
    True
    """
    if isinstance(made, Made):
        return made
    if isinstance(made, Mapping):
        if "model" not in made or set(made) - {*_PARTS, "step"}:
            raise SampleError(
                f"{by} returned a dict with {', '.join(map(str, made)) or 'nothing'}. {_WANTED}"
            )
        parts = dict(made)
    elif isinstance(made, (tuple, list)) and 2 <= len(made) <= len(_PARTS):
        parts = dict(zip(_PARTS, made, strict=False))
    else:
        what = f"{len(made)} things" if isinstance(made, (tuple, list)) else f"a {type(made).__name__}"
        raise SampleError(f"{by} returned {what}. {_WANTED}")

    def check(name: str, is_right: bool, wanted: str) -> None:
        if not is_right:
            kind = type(parts[name]).__name__
            raise SampleError(f"{by} returned a {kind} as {name}, not {wanted}. {_WANTED}")

    check("model", isinstance(parts["model"], nn.Module), "a torch.nn.Module")
    for name in ("loss", "step"):
        check(name, parts.get(name) is None or callable(parts[name]), "a function")
    check("optimizer", _are_optimizers(parts.get("optimizer")), "a torch.optim.Optimizer or a list of them")
    return Made(**parts)


def _are_optimizers(value: Any) -> bool:
    """Whether it is an optimizer, a wrapper of one, several, or none."""
    if isinstance(value, (tuple, list)):
        return len(value) > 0 and all(entry is not None and _are_optimizers(entry) for entry in value)
    return value is None or (hasattr(value, "param_groups") and callable(getattr(value, "step", None)))
