"""A replay leaves everything as it found it, and runs in what surrounded the forward."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import recoup
from recoup import Checkpoint, checkpoint
from recoup.errors import ReplayMismatchError
from recoup.measuring import MemoryTracker


def make(*shape: int) -> Tensor:
    return torch.randn(*(shape or (4,)), requires_grad=True) * 1


def gradients(fn: Any, x: Tensor, wanted: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(fn(x).sum(), wanted))


# Hooks on what outlives the replay


def double(weight: Tensor) -> None:
    weight.grad.mul_(2)


class Hooking(nn.Module):
    """Registers hooks in each forward, as some regularizers do."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "tensor":
            self.weight.register_hook(lambda gradient: gradient * 2)
        else:
            self.weight.register_post_accumulate_grad_hook(double)
        return (x * self.weight).sin()


@pytest.mark.parametrize("kind", ["tensor", "accumulated"])
def test_hooks_that_a_forward_registers_run_once(kind: str) -> None:
    torch.manual_seed(0)
    plain, ours = Hooking(kind), Hooking(kind)
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(4)
    plain(x).sum().backward()
    checkpoint(ours, x).sum().backward()
    assert torch.equal(ours.weight.grad, plain.weight.grad)
    hooks = [
        len(getattr(model.weight, name) or {})
        for model in (plain, ours)
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
    ]
    assert hooks[:2] == hooks[2:]


def test_hooks_on_a_captured_leaf_run_once() -> None:
    weight = torch.randn(4, requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        weight.register_hook(lambda gradient: gradient * 2)
        return (x * weight).sin()

    x = make()
    (found,) = gradients(lambda x: checkpoint(fn, x), x, [weight])
    assert len(weight._backward_hooks) == 1
    weight._backward_hooks.clear()
    (expected,) = gradients(fn, x, [weight])
    assert torch.equal(found, expected)


# Surroundings


def test_the_default_dtype_of_the_forward() -> None:
    def fn(x: Tensor) -> Tensor:
        return (x * torch.ones(4).mul_(1 / 3)).sin()

    x = torch.randn(4, dtype=torch.float64, requires_grad=True) * 1
    torch.set_default_dtype(torch.float64)
    try:
        (expected,) = torch.autograd.grad(fn(x).sum(), x)
        loss = checkpoint(fn, x).sum()
    finally:
        torch.set_default_dtype(torch.float32)
    (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, expected)
    assert torch.get_default_dtype() is torch.float32


class Doubling(TorchFunctionMode):
    """Every sine is twice as large."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return output * 2 if func is Tensor.sin else output


@pytest.mark.parametrize("check", ["metadata", "values"])
def test_function_modes_of_the_forward(check: str) -> None:
    x = make()
    call = Checkpoint(check=check)
    fn = lambda x: x.sin().exp()  # noqa: E731
    with Doubling():
        expected = gradients(fn, x, [x])
        loss = call(fn, x).sum()
    (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, expected[0])
    plain = call(fn, x).sum()
    with Doubling(), Doubling():
        (found,) = torch.autograd.grad(plain, x)
        assert torch._C._len_torch_function_stack() == 2
    assert torch.equal(found, gradients(fn, x, [x])[0])


def test_a_function_mode_does_not_keep_the_replay_from_stopping() -> None:
    """While an operation runs, the mode that handles it is not there."""
    runs = []

    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        runs.append(1)
        return y

    with Doubling():
        loss = checkpoint(fn, make()).sum()
        loss.backward()
    assert runs == [1]


@pytest.mark.parametrize("early_stop", [True, False])
def test_settings_that_a_function_changes_and_puts_back(early_stop: bool) -> None:
    """It stops early in the middle of that, were it not for us."""

    def fn(x: Tensor) -> Tensor:
        state = torch.get_rng_state()
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(71)
        torch.use_deterministic_algorithms(True)
        x = (x * torch.rand(4).float()).sin()
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
        torch.set_rng_state(state)
        return x

    x = make()
    (expected,) = gradients(fn, x, [x])
    loss = Checkpoint(early_stop=early_stop)(fn, x).sum()
    state = torch.get_rng_state()
    (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, expected)
    assert torch.get_default_dtype() is torch.float32
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_replay_that_fails_puts_settings_back() -> None:
    def fn(x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64 if recoup.is_replaying() else torch.float32)
        return x.sin() if recoup.is_replaying() else x.sin().exp()

    loss = checkpoint(fn, make()).sum()
    with pytest.raises(ReplayMismatchError):
        loss.backward()
    assert torch.get_default_dtype() is torch.float32


# Buffers


class Aliased(nn.Module):
    """Writes to one buffer and reads the other, a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("all", torch.zeros(2, 4))
        self.register_buffer("first", self.all[0])
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.all += 1
        return torch.sin(self.linear(x) * self.first)


def test_buffers_in_the_same_memory_stay_there() -> None:
    model, x = Aliased(), make(3, 4)
    wanted = [x, *model.parameters()]
    expected = gradients(model, x, wanted)
    model.all.zero_()
    found = gradients(lambda x: checkpoint(model, x), x, wanted)
    assert all(map(torch.equal, found, expected))
    assert model.first.tolist() == [1.0] * 4
    assert model.first.untyped_storage().data_ptr() == model.all.untyped_storage().data_ptr()


class Learning(nn.Module):
    """A buffer that needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.randn(4, requires_grad=True))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).sin()


def test_a_buffer_that_needs_a_gradient_gets_it() -> None:
    model, x = Learning(), make()
    expected = gradients(model, x, [x, model.scale])
    assert all(map(torch.equal, gradients(lambda x: checkpoint(model, x), x, [x, model.scale]), expected))


class Recurrent(nn.Module):
    """A buffer with a history: each call goes on from the last."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.state = torch.tanh(self.linear(x + self.state))
        return self.state * 1


def test_a_buffer_with_a_history_carries_gradients_back() -> None:
    def run(call: Any) -> list[Tensor]:
        torch.manual_seed(3)
        model, x = Recurrent(), torch.ones(4, requires_grad=True)
        loss = sum(call(model, x * step).sum() for step in (1, 2, 3))
        return list(torch.autograd.grad(loss, [x, *model.parameters()]))

    assert all(map(torch.equal, run(checkpoint), run(lambda model, x: model(x))))


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(200, 200))  # more than what is copied in any case
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sin()


def test_a_large_buffer_that_nobody_reads_may_change() -> None:
    """The replay of the outer call makes the inner one again, and with it a copy of the changed buffer."""
    model, x = Wide(), make()
    expected = gradients(lambda x: model(x.sin()).exp(), x, [x])
    loss = checkpoint(lambda x: checkpoint(model, x.sin()).exp(), x).sum()
    model.table.add_(1)
    (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, expected[0])


# Memory


def num_inputs_alive(model: nn.Module) -> int:
    """After twenty forwards without a backward, by reference counting alone."""
    inputs = []
    gc.disable()
    try:
        for _ in range(20):
            x = make()
            inputs.append(weakref.ref(x))
            checkpoint(model, x)
            del x
        return sum(reference() is not None for reference in inputs)
    finally:
        gc.enable()


class Remembering(nn.Module):
    """Keeps its last output, as samplers and recurrent cells do."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.where = where
        self.held: Any = [None] if where == "list" else {}
        self.register_buffer("last", None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).sin()
        if self.where == "buffer":
            self.last = y
        elif self.where == "tuple":
            self.held = (y, 1)
        elif self.where == "attribute":
            self.held = y
        else:
            self.held[0] = y
        return y * 1


@pytest.mark.parametrize("where", ["list", "dict", "tuple", "buffer", "attribute"])
def test_the_last_output_does_not_lead_to_all_inputs(where: str) -> None:
    assert num_inputs_alive(Remembering(where)) <= 1


class Rebinding(nn.Module):
    """Binds a new container to its last output each time."""

    def __init__(self, make_last: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.make_last = make_last
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).sin()
        self.last = self.make_last(y)
        return y * 1


@pytest.mark.parametrize(
    "make_last", [lambda y: [y], lambda y: {"y": y}, lambda y: {"a": [y]}, lambda y: (y, [y])]
)
def test_a_container_that_is_made_anew_does_not_lead_to_all_inputs(make_last: Any) -> None:
    assert num_inputs_alive(Rebinding(make_last)) <= 1


@pytest.mark.parametrize("hold", [lambda h: [h], lambda h: {"k": [h]}, lambda h: (h,)])
def test_hooks_on_a_tensor_with_a_history_run_once(hold: Any) -> None:
    def run(call: Any) -> Tensor:
        x, y = torch.full((3,), 0.5, requires_grad=True), torch.full((3,), 0.7, requires_grad=True)
        held = hold(x * 2)

        def find(held: Any) -> Tensor:
            while not isinstance(held, Tensor):
                held = next(iter(held.values() if isinstance(held, dict) else held))
            return held

        def fn(y: Tensor) -> Tensor:
            find(held).register_hook(lambda gradient: gradient * 2)
            return (find(held) * y).exp()

        call(fn, y * 1).sum().backward()
        return x.grad

    assert torch.equal(run(checkpoint), run(lambda fn, y: fn(y)))


def test_hooks_of_accumulated_gradients_on_an_argument_run_once() -> None:
    weight = torch.ones(4, requires_grad=True)

    def fn(x: Tensor, weight: Tensor) -> Tensor:
        weight.register_post_accumulate_grad_hook(double)
        return (x * weight).sin()

    checkpoint(fn, make(), weight).sum().backward()
    assert len(weight._post_accumulate_grad_hooks) == 1


def test_aliased_buffers_are_copied_without_the_rest_of_their_memory() -> None:
    whole = torch.zeros(1_000_000)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model.register_buffer("a", whole[500_000:500_004])
    model.register_buffer("b", whole[500_002:500_008])
    with MemoryTracker() as memory:
        y = checkpoint(model, make())
        assert memory.current_bytes < 4096
        y.sum().backward()


def test_what_torch_returns_keeps_its_names() -> None:
    x, y = torch.randn(3, 4, requires_grad=True), make(3)
    found = (x * 2).max(dim=1)
    checkpoint(lambda y: (y * found.values).exp(), y).sum().backward()
    assert x.grad is not None


def test_more_children_than_items_are_looked_at() -> None:
    norms = nn.ModuleList(nn.BatchNorm1d(4) for _ in range(1001))
    for _ in range(3):
        checkpoint(lambda x: norms[7](x).sin(), make(3, 4)).sum().backward()
    assert norms[7].num_batches_tracked.item() == 3


class Node:
    def __init__(self, after: Any) -> None:
        self.after = after


class Strange:
    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


def test_deep_and_strange_objects_are_in_nobodys_way() -> None:
    node: Any = None
    for _ in range(400):
        node = Node(node)
    strange = Strange()
    checkpoint(lambda x: (x, node, strange)[0].sin(), make()).sum().backward()


def test_classes_are_not_kept_alive() -> None:
    def build() -> Any:
        held = torch.ones(4)

        class Local(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return super().__repr__() and (x * held).sin()

        checkpoint(Local(), make()).sum().backward()
        return weakref.ref(held)

    held = build()
    gc.collect()
    assert held() is None
