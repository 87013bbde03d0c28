"""Only the inputs are held, values go as they are used, and reference counting frees everything."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_own

import recoup
from recoup import Checkpoint, checkpoint
from recoup.measuring import MemoryTracker

pytestmark = pytest.mark.usefixtures("no_gc")

KIB = 1024


def deep(x: Tensor) -> Tensor:
    for _ in range(6):
        x = x.sin()
    return x


def leaf() -> Tensor:
    return torch.randn(256, requires_grad=True)  # 1 KiB


def test_only_the_input_and_the_output_are_held() -> None:
    x = leaf()
    with MemoryTracker() as memory:
        y = checkpoint(deep, x * 1)
        assert memory.current_bytes == 2 * KIB  # x * 1 and y
        y.sum().backward()
        del y
        assert memory.current_bytes == 1 * KIB  # x.grad


def test_replayed_tensors_go_as_they_are_used() -> None:
    """Between two steps of the backward, what is left shrinks by one tensor each time."""
    x, seen = leaf(), []
    memory = MemoryTracker()

    def fn(x: Tensor) -> Tensor:
        for _ in range(6):
            x = x.sin()
            if not recoup.is_replaying():
                x.register_hook(lambda grad: seen.append(memory.current_bytes // KIB))
        return x

    with memory:
        y = checkpoint(fn, x * 1)
        loss = y.sum()
        del y
        loss.backward()
    # Before the replay only the input; after it, also the replayed tensors that are still to be used and the
    # gradient on its way, one less at every step.
    assert seen == [1, 6, 5, 4, 3, 2]


def test_everything_is_freed_without_the_collector() -> None:
    x = leaf()
    inner = x * 1
    reference = weakref.ref(inner)
    loss = checkpoint(deep, inner).sum()
    del inner
    assert reference() is not None  # the input is held
    loss.backward()
    assert reference() is None  # and let go when the backward is over, though the loss still lives
    del loss


def test_a_graph_that_is_dropped_frees_its_inputs() -> None:
    x = leaf() * 1
    reference = weakref.ref(x)
    loss = checkpoint(deep, x).sum()
    del x
    assert reference() is not None
    del loss
    assert reference() is None


@pytest.mark.parametrize("options", [Checkpoint(), Checkpoint(early_stop=False), Checkpoint(check="values")])
def test_nothing_leaks(options: Checkpoint) -> None:
    def nested(x: Tensor, call: Any) -> Tensor:
        return call(deep, call(deep, x).cos()).exp()

    with MemoryTracker() as memory:
        for retain in (False, True):
            x = leaf()
            loss = options(nested, x * 1, options).sum()
            loss.backward(retain_graph=retain)
            del loss, x
            assert memory.current_bytes == 0


def test_partial_backward_leaves_nothing_behind() -> None:
    """Values that a backward did not ask for go when it ends, though the graph stays."""
    x, w = leaf(), leaf()

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin().exp().cos(), w.sin().exp().cos()

    with MemoryTracker() as memory:
        y, z = checkpoint(fn, x * 1, w * 1)
        held = memory.current_bytes
        assert held == 4 * KIB
        (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        del grad
        assert memory.current_bytes == held
        del y, z
        assert memory.current_bytes == 0


def test_a_failed_backward_leaves_no_cycle() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.sin().exp()
        if recoup.is_replaying():
            raise ValueError("in the replay")
        return y.cos()

    with MemoryTracker() as memory:
        x = leaf()
        loss = checkpoint(fn, x * 1).sum()
        with contextlib.suppress(ValueError):
            loss.backward()
        del loss, x
        assert memory.current_bytes == 0


def count_operations(calls: list[str], name: str) -> Any:
    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            calls.append(name)
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            return grad * x

    return Counted.apply


def test_the_replay_stops_when_the_last_needed_tensor_exists() -> None:
    calls: list[str] = []
    first, second = count_operations(calls, "a"), count_operations(calls, "b")

    def fn(x: Tensor) -> Tensor:
        x = second(first(x))
        calls.append("end")
        return x

    checkpoint(fn, leaf() * 1).sum().backward()
    assert calls == ["a", "b", "end", "a", "b"]
    calls.clear()
    Checkpoint(early_stop=False)(fn, leaf() * 1).sum().backward()
    assert calls == ["a", "b", "end", "a", "b", "end"]


def test_parts_of_the_graph_that_were_dropped_are_not_replayed() -> None:
    """torch stops here as well; what it cannot see is that parameters need no replay at all."""
    calls: list[str] = []
    first, second = count_operations(calls, "used"), count_operations(calls, "dropped")

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return first(x), second(x)

    y, z = checkpoint(fn, leaf() * 1)
    del z
    calls.clear()
    y.sum().backward()
    assert calls == ["used"]


def test_no_replay_for_parameters_alone() -> None:
    weight = nn.Parameter(torch.randn(256))
    calls = []

    def fn(x: Tensor) -> Tensor:
        calls.append(1)
        return x + weight.sin()  # saves the weight and nothing else

    checkpoint(fn, leaf() * 1).sum().backward()
    assert torch.equal(weight.grad, weight.cos())
    assert calls == [1]


def test_nested_checkpoints_hold_only_the_outermost_input() -> None:
    def block(x: Tensor) -> Tensor:
        return checkpoint(deep, checkpoint(deep, x))

    with MemoryTracker() as memory:
        x = leaf() * 1
        y = checkpoint(block, x)
        del x
        assert memory.current_bytes == 3 * KIB  # the leaf, its product, the output
        y.sum().backward()


@pytest.mark.parametrize(
    "call", [checkpoint, lambda f, *a: torch_own(f, *a, use_reentrant=False)], ids=["ours", "torch"]
)
def test_ours_inside_another_checkpoint(call: Any) -> None:
    def block(x: Tensor, pair: tuple[Tensor, ...]) -> Tensor:
        return checkpoint(lambda a, b: (a.sin() * b["k"][0]).exp(), x.cos(), {"k": [pair[0].tanh()]})

    with MemoryTracker() as memory:
        x, w = leaf(), leaf()
        y = call(block, x, (w,))
        assert memory.current_bytes == 3 * KIB
        y.sum().backward()
    a, b = (t.detach().requires_grad_() for t in (x, w))
    (a.cos().sin() * b.tanh()).exp().sum().backward()
    assert torch.equal(a.grad, x.grad)
    assert torch.equal(b.grad, w.grad)


def test_a_module_that_caches_its_output_does_not_chain_the_steps() -> None:
    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.last = self.linear(x).tanh()
            return self.last

    module, seen = Caches(), []
    with MemoryTracker() as memory:
        for _ in range(6):
            y = checkpoint(module, torch.randn(64, 16))
            seen.append(memory.current_bytes)
    assert seen[2] == seen[-1]
    del y
