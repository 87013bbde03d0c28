"""Whatever is asked of a model, and whatever comes of it: everything reachable is as before."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from reachable import assert_as_before, print_of
from torch import Tensor, nn

import recoup
from recoup.engines import is_applied
from recoup.errors import BudgetError, SampleError

WIDTH = 8
ROWS = 16
SEEN: list[int] = []
CAPTURED = torch.ones(WIDTH, requires_grad=True)


class Slots:
    __slots__ = ("num_calls", "total")

    def __init__(self) -> None:
        self.num_calls, self.total = 0, torch.zeros(2)


class Record:
    pass


def _count_in_objects(block: Block, x: Tensor) -> Tensor:
    block.record.inner.num_calls += 1
    block.record.inner.last = [x.detach()]
    block.slots.num_calls += 1
    block.slots.total.add_(1)
    return x


def _count_in_containers(block: Block, x: Tensor) -> Tensor:
    block.recent.append(len(x))
    block.nested["a"][0][0].append(1)
    block.pair[0].add_(1)
    SEEN.append(len(SEEN))
    type(block).num_calls_of_all += 1
    return x


def _draw(block: Block, x: Tensor) -> Tensor:
    noise = torch.rand(WIDTH, generator=block.generator) + float(block.numpy_generator.random())
    return x + noise * random.random() * np.random.rand() + block.python_generator.random()


def _write_buffers(block: Block, x: Tensor) -> Tensor:
    with torch.no_grad():
        block.mean.add_(x.detach().mean(0))
        block.array += 1
    assert block.start.data_ptr() == block.mean.data_ptr()
    return x + block.start.sum()


def _rebind(block: Block, x: Tensor) -> Tensor:
    block.replaced = block.replaced + 1
    block.plain.data = block.plain.data + 1
    block.inner.bias.data = block.inner.bias.data * 0.5
    return x + block.replaced


def _hook_tensors(block: Block, x: Tensor) -> Tensor:
    block.inner.weight.register_hook(lambda gradient: gradient)
    block.inner.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    block.leaf.register_hook(lambda gradient: gradient)
    CAPTURED.register_hook(lambda gradient: gradient)
    return x * block.leaf * CAPTURED


def _hook_modules(block: Block, x: Tensor) -> Tensor:
    block.inner.register_forward_hook(lambda module, args, output: None)
    return x


def _change_settings(block: Block, x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    return x


def _spread(block: Block, x: Tensor) -> Tensor:
    block.graph.mul_(0.5)
    return torch.sparse.mm(block.graph, x)


def _normalise(block: Block, x: Tensor) -> Tensor:
    scaled: Tensor = block.dropout(block.norm(x)) * block.scale
    return scaled


HABITS: list[Callable[[Any, Tensor], Tensor]] = [
    _count_in_objects,
    _count_in_containers,
    _draw,
    _write_buffers,
    _rebind,
    _hook_tensors,
    _hook_modules,
    _change_settings,
    _spread,
    _normalise,
]


class Block(nn.Module):
    num_calls_of_all = 0

    def __init__(self, habits: list[Callable[[Any, Tensor], Tensor]], num_layers: int) -> None:
        super().__init__()
        self.habits = habits
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(num_layers)
        )
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)
        self.record, self.slots = Record(), Slots()
        self.record.inner = Record()  # type: ignore[attr-defined]
        self.record.inner.num_calls = 0  # type: ignore[attr-defined]
        self.recent: deque[int] = deque([1, 2], maxlen=3)
        self.nested: dict[str, Any] = {"a": [([],)]}
        self.pair = (torch.zeros(2), 1)
        self.generator = torch.Generator().manual_seed(1)
        self.numpy_generator, self.python_generator = np.random.default_rng(1), random.Random(1)
        self.array = np.zeros(3)
        self.plain, self.leaf = torch.zeros(2), torch.ones(WIDTH, requires_grad=True)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("start", self.mean[:2])
        self.register_buffer("replaced", torch.zeros(WIDTH))
        self.register_buffer("graph", torch.eye(ROWS).to_sparse())
        self.register_buffer("scale", torch.ones(WIDTH, requires_grad=True))

    def forward(self, x: Tensor) -> Tensor:
        for habit in self.habits:
            x = habit(self, x)
        x = self.inner(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


def random_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    choose = random.Random(seed)
    habits = [*HABITS[2 * seed : 2 * seed + 2], choose.choice(HABITS)]
    return nn.Sequential(*(Block(habits, choose.randint(1, 3)) for _ in range(choose.randint(2, 4))))


def mean(output: Tensor) -> Tensor:
    return output.mean()


def fit_and_remove(model: nn.Module, x: Tensor) -> None:
    recoup.fit(model, x, budget="1GB", loss=mean, insist=True)
    recoup.remove(model)


def fit_between(model: nn.Module, x: Tensor) -> None:
    """Under a plan that replays, or refused."""
    profile = recoup.measure(model, x, loss=mean)
    budget = (recoup.minimum_budget(profile) + profile.plain_bytes) // 2
    recoup.fit(model, x, budget=budget, loss=mean)
    recoup.remove(model)


def fit_with_splits(model: nn.Module, x: Tensor) -> None:
    """Below what whole blocks need."""
    profile = recoup.measure(model, x, loss=mean)
    recoup.fit(model, x, budget=int(0.9 * recoup.minimum_budget(profile)), loss=mean)
    recoup.remove(model)


def verify(model: nn.Module, x: Tensor) -> None:
    plan = recoup.plan(recoup.measure(model, x, loss=mean), "1GB")
    recoup.apply(model, plan)
    recoup.verify(model, plan, x, loss=mean)
    recoup.remove(model)


ENTRIES: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "fit": fit_and_remove,
    "fit under a plan": fit_between,
    "fit with splits": fit_with_splits,
    "fit refused": lambda model, x: recoup.fit(model, x, budget=1, loss=mean),
    "measure": lambda model, x: recoup.measure(model, x, loss=mean),
    "audit": lambda model, x: recoup.audit(model, x, loss=mean),
    "verify": verify,
}


@pytest.mark.parametrize("seed", range(len(HABITS) // 2))
@pytest.mark.parametrize("entry", ENTRIES)
def test_random_models(entry: str, seed: int) -> None:
    model, x = random_model(seed), torch.randn(ROWS, WIDTH)
    before = print_of(model, x, SEEN, CAPTURED, Block.num_calls_of_all)
    try:
        ENTRIES[entry](model, x)
    except BudgetError:
        assert entry != "fit"
    assert_as_before(print_of(model, x, SEEN, CAPTURED, Block.num_calls_of_all), before)


# Hooks, and buffers of unusual kinds, by themselves


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.register_buffer("buffer", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(self.prepared(x)).tanh())
        return y

    def prepared(self, x: Tensor) -> Tensor:
        return x * self.scale * self.buffer


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    owners = {
        name: tensor
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.requires_grad and tensor.is_leaf
    }
    for tensor in owners.values():
        tensor.grad = None
    model(x).mean().backward()
    return {name: tensor.grad for name, tensor in owners.items() if tensor.grad is not None}


def fitted_gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Under a plan that replays where anything can be, of a model that still has the gradients of a plain step."""
    profile = recoup.measure(model, x, loss=mean)
    budget = (2 * recoup.minimum_budget(profile) + profile.plain_bytes) // 3
    recoup.fit(model, x, budget=budget, loss=mean)
    return gradients(model, x)


class Hooked(Layer):
    def prepared(self, x: Tensor) -> Tensor:
        self.up.weight.register_hook(lambda gradient: gradient * 1)
        self.up.weight.register_post_accumulate_grad_hook(lambda parameter: None)
        return x


@pytest.mark.parametrize("budget", [1, "1GB"])
def test_hooks_that_a_forward_registers_are_as_many_as_before(budget: int | str) -> None:
    model, x = nn.Sequential(Hooked(), Hooked()), torch.randn(ROWS, WIDTH)
    model(x)
    weight: Any = model[0].up.weight
    hooks = list(weight._backward_hooks.items()), list(weight._post_accumulate_grad_hooks.items())
    try:
        recoup.fit(model, x, budget=budget, loss=mean)
    except BudgetError:
        assert budget == 1
    assert (list(weight._backward_hooks.items()), list(weight._post_accumulate_grad_hooks.items())) == hooks
    assert len(hooks[0]) == len(hooks[1]) == 1


def test_a_buffer_that_needs_a_gradient_gets_it() -> None:
    model, x = nn.Sequential(*(Layer() for _ in range(4))), torch.randn(ROWS, WIDTH)
    for layer in model:
        layer.buffer.requires_grad_()
    expected = copy.deepcopy(gradients(model, x))
    before = print_of(model, x)
    with pytest.raises(BudgetError):
        recoup.fit(model, x, budget=1, loss=mean)
    assert_as_before(print_of(model, x), before)
    for name, gradient in fitted_gradients(model, x).items():
        assert torch.equal(gradient, expected.pop(name)), name
    assert not expected


class Derived(Layer):
    """Its buffer is computed anew in each forward, with a history."""

    def prepared(self, x: Tensor) -> Tensor:
        self.buffer = self.scale * 2
        return x * self.buffer


def test_a_buffer_with_a_history_of_the_forward() -> None:
    model, x = nn.Sequential(*(Derived() for _ in range(4))), torch.randn(ROWS, WIDTH)
    expected = copy.deepcopy(gradients(model, x))
    for name, gradient in fitted_gradients(model, x).items():
        assert torch.equal(gradient, expected.pop(name)), name
    assert not expected
    assert is_applied(model)


@pytest.mark.parametrize("budget", [1, "1GB"])
@pytest.mark.parametrize("what", ["Buffer", "Attribute"])
def test_a_tensor_with_a_history_from_before_is_refused(what: str, budget: Any) -> None:
    """Its graph is still the user's: the first step goes through it, and no second one can."""
    model, x = nn.Sequential(*(Layer() for _ in range(4))), torch.randn(ROWS, WIDTH)
    if what == "Attribute":
        del model[2].buffer
    model[2].buffer = derived = model[2].scale * 2
    with pytest.raises(
        SampleError, match=rf"{what} '2\.buffer' of Sequential was computed with gradients before"
    ):
        recoup.fit(model, x, budget=budget, loss=mean)
    assert model[2].buffer is derived
    gradients(model, x)
    with pytest.raises(RuntimeError, match="second time"):
        gradients(model, x)


def test_histories_from_before_that_do_no_harm() -> None:
    """One that nothing goes through, and one of which a backward frees nothing."""
    model, x = nn.Sequential(*(Layer() for _ in range(4))), torch.randn(ROWS, WIDTH)
    model.last = last = model(x)
    model[2].buffer = part = model[1].scale[:]
    expected = copy.deepcopy(gradients(model, x))
    for name, gradient in fitted_gradients(model, x).items():
        assert torch.equal(gradient, expected.pop(name)), name
    assert not expected
    assert model.last is last
    assert model[2].buffer is part
    last.mean().backward()


def test_a_sample_with_a_history_is_refused() -> None:
    model, x = nn.Sequential(*(Layer() for _ in range(4))), torch.randn(ROWS, WIDTH, requires_grad=True)
    y = x.exp()
    with pytest.raises(
        SampleError, match=r"A tensor of the sample was computed with gradients.*its detach\(\)"
    ):
        recoup.fit(model, y, budget="1GB", loss=mean)
    y.sum().backward()
    recoup.fit(model, y.detach().requires_grad_(), budget="1GB", loss=mean)


def test_buffers_that_alias_each_other_stay_so() -> None:
    model, x = nn.Sequential(*(Layer() for _ in range(4))), torch.randn(ROWS, WIDTH)
    for layer in model:
        layer.register_buffer("same", layer.buffer)
        layer.register_buffer("part", layer.buffer[2:5])
    expected = copy.deepcopy(gradients(model, x))
    for name, gradient in fitted_gradients(model, x).items():
        assert torch.equal(gradient, expected[name]), name
    assert is_applied(model)
    for one in (copy.deepcopy(model), recoup.remove(model)):
        for layer in one:
            assert layer.same is layer.buffer
            assert layer.part.untyped_storage()._cdata == layer.buffer.untyped_storage()._cdata
