"""What a training step is: the model called on a sample and a loss, or a callable of the user that does it all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from recoup.errors import LossError, SampleError
from recoup.measuring.lazy import check_initialised

__all__ = ["TrainingStep"]


class TrainingStep:
    """One training step of a model, which measuring and verifying run as often as they need.

    Args:
        model: what is trained.
        sample: a tensor, a tuple of positional arguments or a dict of keyword arguments.
        loss: from the model's output to a scalar; unless given, the output's ``loss``, or the output itself.
        step: a callable that runs a whole step, instead of sample and loss.
    """

    def __init__(
        self,
        model: nn.Module,
        sample: Any = None,
        *,
        loss: Callable[[Any], Tensor] | None = None,
        step: Callable[[], Any] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise SampleError(f"The model must be a torch.nn.Module; got a {type(model).__name__}.")
        if (sample is None) == (step is None):
            raise SampleError(
                "Give either a sample (a tensor, a tuple of arguments or a dict of keyword arguments) or"
                " step=, a callable that runs a whole training step."
            )
        if step is not None and loss is not None:
            raise SampleError("loss= goes with a sample; a step= callable computes its own loss.")
        if step is not None and not callable(step):
            raise SampleError(f"step= must be callable; got a {type(step).__name__}.")
        if loss is not None and not callable(loss):
            raise SampleError(f"loss= must be callable; got a {type(loss).__name__}.")
        check_initialised(model)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise SampleError(
                f"No parameter of {type(model).__name__} needs a gradient, so there is no backward to make room"
                " for. Call requires_grad_() on what should be trained."
            )
        self.model = model
        self.sample = sample
        self.args, self.kwargs = _arguments(sample)
        self.loss = loss
        self.step = step

    @property
    def changes_parameters(self) -> bool:
        """Whether running it may step an optimizer."""
        return self.step is not None

    def forward(self) -> tuple[Any, Tensor]:
        """Runs the model and the loss; returns the output, which users hold during the backward, and the loss."""
        output = self.model(*self.args, **self.kwargs)
        return output, self.loss_of(output)

    def refusal(self, error: Exception) -> SampleError:
        """Says that the model itself failed on the sample, or the step."""
        if self.step is not None:
            return SampleError(
                f"step= failed: {type(error).__name__}: {error}. While it is measured, backward() leaves no gradients:"
                " leave out of it what reads them (scaling, logging), or give a sample and loss= instead."
            )
        return SampleError(
            f"{type(self.model).__name__} refuses the sample ({_describe(self.sample)}):"
            f" {type(error).__name__}: {error}. Give what the model takes: a tensor for model(x), a tuple for"
            " model(*sample), a dict for model(**sample)."
        )

    def loss_of(self, output: Any) -> Tensor:
        """The loss of an output, checked."""
        loss = _default_loss(output) if self.loss is None else self.loss(output)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = (
                f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            )
            raise LossError(
                f"The loss must be a scalar; got {what}. Give loss=, a function from the model's output to a scalar,"
                " such as loss=lambda output: output.mean()."
            )
        if not loss.requires_grad:
            raise LossError(
                "The loss does not depend on any parameter that needs a gradient. Check loss=, requires_grad and"
                " torch.no_grad inside the model."
            )
        return loss

    def run_unchecked(self) -> None:
        """Runs the forward alone, whatever its loss is like."""
        if self.step is None:
            self.model(*self.args, **self.kwargs)
            return
        with _backward_replaced(lambda loss: None):
            self.step()

    def run(self, at_backward: Callable[[Tensor, Any], None]) -> None:
        """Runs the step; ``at_backward(loss, output)`` stands in for each backward."""
        if self.step is None:
            output, loss = self.forward()
            at_backward(loss, output)
            return
        with _backward_replaced(lambda loss: at_backward(loss, None)):
            self.step()


@contextmanager
def _backward_replaced(replacement: Callable[[Tensor], None]) -> Any:
    """Gives every ``loss.backward()`` inside to ``replacement``."""

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        replacement(tensors if isinstance(tensors, Tensor) else tensors[0])

    original = torch.autograd.backward
    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = original


def _arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(sample, Mapping):
        return (), dict(sample)
    if isinstance(sample, (tuple, list)):
        return tuple(sample), {}
    return (sample,), {}


def _default_loss(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and output.get("loss") is not None:
        return output["loss"]
    loss = getattr(output, "loss", None)
    if loss is None:
        raise LossError(
            f"The model returns a {type(output).__name__} without a loss. Give loss=, a function from that output to a"
            " scalar, or a sample with labels."
        )
    return loss


def _describe(sample: Any) -> str:
    if isinstance(sample, Tensor):
        return f"{str(sample.dtype).removeprefix('torch.')}{list(sample.shape)}"
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{key}: {_describe(value)}" for key, value in sample.items()) + "}"
    if isinstance(sample, (tuple, list)):
        return "(" + ", ".join(map(_describe, sample)) + ")"
    return type(sample).__name__
