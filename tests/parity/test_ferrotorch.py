"""Section 3: ferrotorch's ``checkpoint`` and ``checkpoint_multi``, row by row, and what goes beyond it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recoup
from recoup import checkpoint, describe
from recoup.errors import InputChangedError, NothingToCheckpointError


def test_forward_records_nothing_and_backward_runs_again() -> None:
    replays = []

    def fn(x: Tensor) -> Tensor:
        replays.append(recoup.is_replaying())
        return x.sin().exp()

    x = torch.randn(3, requires_grad=True)
    loss = checkpoint(fn, x * 1).sum()
    assert replays == [False]
    loss.backward()
    assert replays == [False, True]


def test_an_input_that_needs_no_gradient_gets_none() -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3)
    checkpoint(torch.mul, x, y).sum().backward()
    assert y.grad is None
    assert torch.equal(x.grad, y)


def test_if_nothing_needs_a_gradient_the_plain_output_returns() -> None:
    y = checkpoint(torch.sin, torch.ones(3))
    assert not y.requires_grad
    assert y.grad_fn is None
    layer = nn.Linear(3, 3)
    assert checkpoint(layer, torch.ones(3)).requires_grad  # captured parameters count


@pytest.mark.gpu
def test_accelerator_rng_is_saved_restored_and_put_back() -> None:
    x = torch.randn(100, device="cuda", requires_grad=True)

    def run(fail: bool) -> tuple[Tensor, Tensor]:
        torch.cuda.manual_seed(3)

        def fn(x: Tensor) -> Tensor:
            y = F.dropout(x.sin(), 0.5).exp()
            if fail and recoup.is_replaying():
                raise ZeroDivisionError
            return y.cos()

        loss = checkpoint(fn, x * 1).sum()
        between = torch.rand(5, device="cuda")
        if fail:
            with pytest.raises(ZeroDivisionError):
                loss.backward()
        else:
            loss.backward()
        return between, torch.rand(5, device="cuda")

    torch.cuda.manual_seed(3)
    F.dropout(x.sin(), 0.5)
    expected = torch.rand(5, device="cuda"), torch.rand(5, device="cuda")
    for fail in (False, True):
        for left, right in zip(run(fail), expected, strict=True):
            assert torch.equal(left, right)


def test_empty_input_list_is_an_error() -> None:
    with pytest.raises(NothingToCheckpointError, match="Pass its inputs as arguments"):
        checkpoint(lambda: 1)


def test_readable_repr_of_the_backward_node() -> None:
    x, w = torch.ones(2, 3, requires_grad=True), torch.ones(3, dtype=torch.float64, requires_grad=True)

    def noisy(x: Tensor, w: Tensor) -> Tensor:
        return F.dropout(x * w, 0.5).sin()

    y = checkpoint(noisy, x * 1, w)
    assert describe(y).startswith(
        "<checkpoint of test_readable_repr_of_the_backward_node.noisy (test_ferrotorch.py:"
    )
    assert (
        "holds [float32[2, 3], float64[3]], gives [float64[2, 3]], 4 saved tensors to replay, RNG state of 1"
        " generator>" in describe(y)
    )
    several = checkpoint(lambda x: {"sum": x.sum(), "parts": [x.sin(), x.exp()[0]]}, x * 1)
    assert "gives [float32[], float32[2, 3], float32[3]]" in describe(several["parts"][0])
    nested = checkpoint(lambda x: checkpoint(torch.sin, x.exp()).cos(), x * 1)
    assert describe(nested).count("<checkpoint of") == 2
    assert "held by enclosing hooks" in describe(nested)
    y.sum().backward()
    assert describe(y) == "no checkpointed call"
    assert describe(torch.ones(1)) == "no checkpointed call"


def test_beyond_cpu_rng_is_managed() -> None:
    x = torch.ones(200, requires_grad=True)
    y = checkpoint(lambda x: F.dropout(x * 1, 0.5).square(), x)
    y.sum().backward()
    assert torch.equal(x.grad != 0, y != 0)


def test_beyond_an_input_changed_in_place_is_an_error() -> None:
    x, w = torch.randn(3, requires_grad=True), torch.ones(3)
    loss = checkpoint(lambda x, w: (x * w).sin(), x, w=w).sum()
    w.zero_()
    with pytest.raises(InputChangedError, match="'w' was changed in place"):
        loss.backward()


def test_beyond_grad_mode_on_other_threads() -> None:
    x = torch.randn(3, requires_grad=True)
    loss = checkpoint(lambda x: x.sin().exp(), x * 1).sum()
    errors: list[BaseException] = []

    def backward() -> None:
        try:
            torch.set_grad_enabled(False)
            loss.backward()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert not errors
    assert torch.equal(x.grad, x.sin().exp() * x.cos())


def test_work_on_other_threads_is_kept_and_its_gradients_are_right() -> None:
    x = torch.linspace(-1, 1, 6, requires_grad=True)
    with ThreadPoolExecutor(1) as pool:
        y = checkpoint(lambda x: pool.submit(torch.tanh, x).result(), x * 2)
    assert describe(y) == "no checkpointed call"
    (grad,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(torch.tanh(x * 2).sum(), x)
    assert torch.equal(grad, expected)
