"""Several threads that share modules and generators get the gradients that one thread gets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recoup import Checkpoint, checkpoint
from recoup.checkpointing import Span, process_lock
from recoup.errors import RecoupWarning

THREADS, STEPS = 4, 12


class Noisy(nn.Module):
    """Depends on a generator that all threads share, on running statistics, and on an attribute that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.num_calls = 0
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return F.dropout(self.norm(self.linear(x)).tanh(), 0.5) * self.scale


def run_in_threads(work: Callable[[int], Any]) -> list[Any]:
    begin = threading.Barrier(THREADS)

    def begun(index: int) -> Any:
        begin.wait()
        return work(index)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(begun, range(THREADS)))


@pytest.mark.parametrize("how", ["checkpoint", "span", "nested"])
def test_threads_that_share_a_module(how: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Noisy() for _ in range(3)))
    calls: dict[str, Callable[..., Tensor]] = {
        "checkpoint": Checkpoint(check="values"),
        "span": lambda model, x: in_span(model, x),
        "nested": Checkpoint(check="values"),
    }
    if how == "nested":
        model = nn.Sequential(*(Outer(layer) for layer in model))

    inputs = torch.randn(THREADS, STEPS, 8, 16, requires_grad=True)

    def work(index: int) -> int:
        for x in inputs[index]:
            # The values are compared: a mask that another thread's replay disturbed would be an error.
            calls[how](model, x * 1).sum().backward()
        return index

    assert run_in_threads(work) == list(range(THREADS))
    assert (process_lock._owner.thread, process_lock._owner.depth) == (None, 0)
    noisy = [module for module in model.modules() if isinstance(module, Noisy)]
    # No forward's change was lost in another thread's replay.
    assert [module.norm.num_batches_tracked.item() for module in noisy] == [THREADS * STEPS] * 3


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x)


def in_span(model: Any, x: Tensor) -> Tensor:
    span = Span(Checkpoint(check="values"))
    for layer in model:
        x = span.call(layer, (x,), {})
    span.close()
    return x


def test_forwards_that_run_a_backward_inside() -> None:
    layer = nn.Linear(4, 4)

    def penalty(x: Tensor) -> Tensor:
        y = checkpoint(layer, x).tanh()
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + gradient

    def work(index: int) -> list[Tensor]:
        x = torch.full((3, 4), float(index), requires_grad=True)
        output = Checkpoint(check="metadata")(penalty, x * 1)
        return list(torch.autograd.grad(output.sum(), [x]))

    for index, gradients in enumerate(run_in_threads(work)):
        assert torch.equal(gradients[0], work(index)[0])


def test_who_waits_too_long_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that waits for the thread whose backward waits for it."""
    monkeypatch.setattr(process_lock, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(process_lock, "_impatient", set())
    layer, has_begun, may_end = nn.BatchNorm1d(4), threading.Event(), threading.Event()

    def slow(x: Tensor) -> Tensor:
        has_begun.set()
        may_end.wait()
        return x.sin()

    loss = checkpoint(layer, torch.randn(3, 4, requires_grad=True) * 1).sum()
    other = threading.Thread(target=checkpoint, args=(slow, torch.ones(3, requires_grad=True)))
    other.start()
    has_begun.wait()
    with pytest.warns(RecoupWarning, match=r"waited 0\.05 s for one on another thread"):
        loss.backward()
    may_end.set()
    other.join()
    assert (process_lock._owner.thread, process_lock._owner.depth) == (None, 0)


def test_slow_forwards_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three threads, each of whose forwards takes longer than a third of the patience."""
    monkeypatch.setattr(process_lock, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(process_lock, "_impatient", set())
    layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))

    def slow(x: Tensor) -> Tensor:
        threading.Event().wait(0.1)
        return layer(x).sin()

    inputs = torch.randn(THREADS, 3, 2, 4, requires_grad=True)

    def work(index: int) -> int:
        for x in inputs[index]:
            Checkpoint(check="values")(slow, x * 1).sum().backward()
        return index

    assert run_in_threads(work) == list(range(THREADS))
    assert not process_lock._impatient
