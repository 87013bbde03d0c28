"""One step of a chain, and calling it with errors that name it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from recoup.errors import ChainError
from recoup.stores.arrays import copy_array, dense, expect_array

__all__ = ["Step", "call_backward", "call_forward", "first_gradient"]


@dataclass(frozen=True)
class Step:
    """A function and how gradients pass back through it.

    Both may change their arguments in place. Both must give the same result whenever they are called with the
    same values: a step that draws random numbers has to remember them. Torch steps run without recording a
    graph; a backward that wants one opens ``torch.enable_grad()``, as in `torch.autograd.Function`.

    Attributes:
        forward: gives ``y`` for ``x``.
        backward: gives the gradient of ``x`` for ``x`` and the gradient of ``y``, or a pair: that, and
            anything that stands for the gradient of the step's parameters. None if it only runs forward.
        name: what errors call it; by default the name of the forward.

    >>> square = Step(lambda x: x * x, lambda x, grad_y: 2 * x * grad_y, name="square")
    >>> square.backward(3.0, 1.0)
    6.0
    """

    forward: Callable[[Any], Any]
    backward: Callable[[Any, Any], Any] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        for what, function in (("forward", self.forward), ("backward", self.backward)):
            if not callable(function) and not (what == "backward" and function is None):
                raise ChainError(f"A step's {what} must be a function; got {type(function).__name__}.")

    def label(self, unit: int) -> str:
        """Names the step at a place in a chain.

        >>> Step(abs).label(2)
        'step 2 (abs)'
        """
        return f"step {unit} ({self.called})"

    @property
    def called(self) -> str:
        """Its name, or else that of its forward."""
        return self.name or getattr(self.forward, "__name__", type(self.forward).__name__)


def call_forward(step: Step, unit: int, array: Any) -> Any:
    """Runs a step's forward on an array that it may change, and gives its result without gaps in memory.

    A result with gaps is copied at once, not only when it is stored: how numbers lie in memory can decide the
    last bit of a sum, and a replay from a copy has to see what the forward saw.

    Raises:
        ChainError: if the result is no array.
    """
    with _naming(f"forward of {step.label(unit)}"), torch.no_grad():
        result = step.forward(array)
    expect_array(f"The forward of {step.label(unit)} must return an array", result, ChainError)
    return dense(result)


def call_backward(step: Step, unit: int, array: Any, grad_output: Any) -> tuple[Any, Any]:
    """Runs a step's backward on arrays that it may change; gives the gradients of its input and parameters.

    Raises:
        ChainError: if the step has no backward, or what it returns is no gradient of its input.
    """
    if step.backward is None:
        raise ChainError(f"There is no backward for {step.label(unit)}. Give one: Step(forward, backward).")
    shape = tuple(array.shape)
    with _naming(f"backward of {step.label(unit)}"), torch.no_grad():
        result = step.backward(array, grad_output)
    is_pair = isinstance(result, tuple)
    if is_pair and len(result) != 2:
        raise ChainError(
            f"The backward of {step.label(unit)} returned {len(result)} values. Return the gradient of the "
            "input, or a pair: that and the gradient of the parameters."
        )
    grad_input, grad_parameters = result if is_pair else (result, None)
    expect_array(
        f"The backward of {step.label(unit)} must give the gradient of its input", grad_input, ChainError
    )
    if tuple(grad_input.shape) != shape:
        raise ChainError(
            f"The backward of {step.label(unit)} gave a gradient of shape {tuple(grad_input.shape)} for an "
            f"input of shape {shape}. The shapes must be equal."
        )
    # Both gradients of a pair may be one array (adding a bias), which the next backward may change in place.
    return copy_array(grad_input) if is_pair else dense(grad_input), grad_parameters


def first_gradient(grad_output: Any, output_shape: tuple[int, ...]) -> Any:
    """A copy of the gradient that a backward starts from.

    Raises:
        ChainError: if it is no array of the output's shape.
    """
    expect_array("The gradient of the output must be an array", grad_output, ChainError)
    if tuple(grad_output.shape) != output_shape:
        raise ChainError(
            f"The gradient of the output has shape {tuple(grad_output.shape)}; the output has shape "
            f"{output_shape}. Give one of the same shape."
        )
    return copy_array(grad_output)


@contextmanager
def _naming(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # Python 3.10 has no notes; the error passes as it is.
        add_note = getattr(error, "add_note", None)
        if add_note is not None:
            add_note(f"Raised in the {what}.")
        raise
