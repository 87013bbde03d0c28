"""Section 1: numr's ``checkpoint(f, inputs)``, row by row, and what goes beyond it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from recoup import checkpoint
from recoup.errors import NothingToCheckpointError


def scalar(value: float) -> Tensor:
    return torch.tensor(value, requires_grad=True)


def square(x: Tensor) -> Tensor:
    return x * x


def test_scalar_gradient_equals_the_uncheckpointed_one() -> None:
    x = scalar(3.0)
    checkpoint(square, x).backward()
    assert x.grad == 6


def test_several_inputs_one_gradient_each() -> None:
    x, y = scalar(2.0), scalar(5.0)
    checkpoint(lambda x, y: x * y, x, y).backward()
    assert (x.grad, y.grad) == (5, 2)


def test_chained_checkpoints_continue_through_the_inner_inputs_graph() -> None:
    x = scalar(2.0)
    checkpoint(square, checkpoint(square, x)).backward()
    assert x.grad == 32


def test_an_input_used_twice_accumulates() -> None:
    x = scalar(3.0)
    checkpoint(lambda x: (x + x) * x, x).backward()
    assert x.grad == 12


def test_vector_outputs_take_the_product_with_the_incoming_gradient() -> None:
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    checkpoint(square, x).backward(torch.ones(2))
    assert x.grad.tolist() == [4, 6]
    (grad,) = torch.autograd.grad(checkpoint(square, x), x, torch.tensor([1.0, -2.0]))
    assert grad.tolist() == [4, -12]


def test_a_leaf_hook_fires_when_the_gradient_is_ready() -> None:
    x, fired = scalar(3.0), []
    x.register_hook(fired.append)
    checkpoint(square, x).backward()
    assert fired == [6]


def test_calling_with_nothing_to_run_on_is_an_error() -> None:
    with pytest.raises(NothingToCheckpointError, match="given no tensor"):
        checkpoint(lambda: torch.tensor(1.0))


def test_beyond_keyword_and_nested_arguments_and_several_outputs() -> None:
    x, y = scalar(2.0), scalar(5.0)
    out = checkpoint(
        lambda pair, *, k: {"product": pair[0] * k["y"], "sum": pair[0] + k["y"]}, (x, 1), k={"y": y}
    )
    (out["product"] * 3 + out["sum"]).backward()
    assert (x.grad, y.grad) == (16, 7)


def test_beyond_second_order() -> None:
    x = scalar(3.0)
    (first,) = torch.autograd.grad(checkpoint(lambda x: x * x * x, x), x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    assert (first, second) == (27, 18)
    y = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(partial(checkpoint, torch.sin), y)


def test_beyond_closures_over_parameters() -> None:
    weight = nn.Parameter(torch.tensor(4.0))
    checkpoint(lambda: weight * weight).backward()
    assert weight.grad == 8
