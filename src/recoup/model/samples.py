"""A sample as users have it: the model's arguments, and the targets of the loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from recoup.errors import SampleError

__all__ = ["Sample", "describe_sample", "read_sample"]


@dataclass(frozen=True)
class Sample:
    """One batch.

    Attributes:
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
        targets: arguments of the loss after the model's output: none, or the targets.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Any, ...] = ()


def read_sample(
    sample: Any, loss: Callable[..., Any] | None, forward: Callable[..., Any] | None = None
) -> Sample:
    """Reads a sample: ``(inputs, targets)``, as a loader yields them, where the loss takes two arguments.

    Args:
        sample: one batch.
        loss: with a default for its second argument, it gets the targets if the model does not take the whole sample.
        forward: the model's.

    Raises:
        SampleError: the loss wants targets, and the sample has none.

    >>> read_sample((1, 2), loss=None).args
    (1, 2)
    >>> read_sample((1, 2), loss=nn.CrossEntropyLoss())
    Sample(args=(1,), kwargs={}, targets=(2,))
    >>> read_sample(({"x": 1}, 2), loss=lambda output, targets: output)
    Sample(args=(), kwargs={'x': 1}, targets=(2,))
    """
    num_wanted, num_allowed = _num_arguments(loss)
    if num_wanted < 2 <= num_allowed and isinstance(sample, (tuple, list)) and not _takes(forward, sample):
        num_wanted = 2
    if num_wanted < 2:
        return Sample(*_arguments(sample))
    if num_wanted > 2 or not isinstance(sample, (tuple, list)) or len(sample) < 2:
        raise SampleError(
            f"loss= requires {num_wanted} arguments, and the sample is {describe_sample(sample)}. A loss of two"
            " arguments is called with the model's output and the targets of a sample (inputs, targets); otherwise give"
            " a function of the output alone, such as loss=lambda output: criterion(output, targets)."
        )
    *inputs, targets = sample
    return Sample(*_arguments(inputs[0] if len(inputs) == 1 else inputs), (targets,))


def _num_arguments(loss: Callable[..., Any] | None) -> tuple[int, int]:
    """How many positional arguments a loss requires, and how many it takes; 1 and 1 without a signature."""
    try:
        parameters = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return 1, 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [p for p in parameters.values() if p.kind in kinds]
    return sum(p.default is inspect.Parameter.empty for p in positional), len(positional)


def _takes(forward: Callable[..., Any] | None, args: Sequence[Any]) -> bool:
    """Whether a forward takes so many arguments, as far as its signature tells."""
    try:
        inspect.signature(forward).bind(*args)  # type: ignore[arg-type]
    except ValueError:
        return True
    except TypeError:
        return forward is None
    return True


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    return (inputs,), {}


def describe_sample(sample: Any) -> str:
    """A sample's tensors by type and shape.

    >>> import torch
    >>> describe_sample({"x": torch.zeros(2, 3), "mode": "fast"})
    '{x: float32[2, 3], mode: str}'
    """
    if isinstance(sample, Tensor):
        return f"{str(sample.dtype).removeprefix('torch.')}{list(sample.shape)}"
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{key}: {describe_sample(value)}" for key, value in sample.items()) + "}"
    if isinstance(sample, (tuple, list)):
        return "(" + ", ".join(map(describe_sample, sample)) + ")"
    return type(sample).__name__
