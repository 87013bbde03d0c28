"""Measuring leaves a model, its optimizer and the random generators as they were, also if the model raises."""

from __future__ import annotations

import copy
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
from tally import Tally
from torch import Tensor, nn

import recoup
from recoup.errors import SampleError, UnitError
from recoup.measuring import measure
from recoup.model.streaming import LeakError, UnitCall


class FailedError(Exception):
    pass


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.dropout = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.num_calls = 0
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.seen.append(len(x))
        self.last_output = x.detach() * (1 + 0 * np.random.rand() + 0 * random.random())
        return x + self.dropout(self.norm(self.layer(x)).relu())


class Model(nn.Module):
    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.register_buffer("steps", torch.zeros(()))
        self.fails_at = fails_at
        self.count = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.steps = self.steps + 1
        for block in self.blocks:
            x = block(x)
        if torch.is_grad_enabled() and x.requires_grad:
            CALLS.add()
            if len(CALLS) == self.fails_at:
                raise FailedError
        return x.square().mean()


CALLS = Tally()
"""Of the model's forward with gradients, in one test."""


@pytest.fixture(autouse=True)
def _no_calls_yet() -> None:
    CALLS.take()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that could tell a difference, by identity and by value."""
    state = optimizer.state_dict()["state"]
    return {
        "values": {name: value.clone() for name, value in model.state_dict().items()},
        "parameters": {name: id(value) for name, value in model.named_parameters()},
        "buffers": {name: id(value) for name, value in model.named_buffers()},
        "gradients": {name: id(value.grad) for name, value in model.named_parameters()},
        "gradient values": {name: value.grad.clone() for name, value in model.named_parameters()},
        "needs": {name: value.requires_grad for name, value in model.named_parameters()},
        "training": {name: module.training for name, module in model.named_modules()},
        "attributes": {name: list(vars(module)) for name, module in model.named_modules()},
        "hooks": {name: list(module._forward_hooks) for name, module in model.named_modules()},
        "counts": [(block.num_calls, list(block.seen), id(block.seen)) for block in model.blocks],
        "last": [id(block.last_output) for block in model.blocks],
        "optimizer": {
            f"{i} {key}": value.clone() for i, entry in state.items() for key, value in entry.items()
        },
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].tolist(),
        "python": random.getstate(),
    }


def assert_same(now: dict[str, Any], then: dict[str, Any]) -> None:
    for part, value in then.items():
        if isinstance(value, dict):
            assert list(now[part]) == list(value), part
            for key, item in value.items():
                same = (
                    torch.equal(now[part][key], item) if isinstance(item, Tensor) else now[part][key] == item
                )
                assert same, (part, key)
        elif isinstance(value, Tensor):
            assert torch.equal(now[part], value), part
        else:
            assert now[part] == value, part


def trained(fails_at: int = -1) -> tuple[Model, torch.optim.Optimizer, Tensor]:
    model, x = Model(fails_at), torch.randn(8, 6)
    model.blocks[1].norm.eval()
    model.blocks[2].layer.register_forward_hook(lambda module, args, output: output * 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(x).backward()
    optimizer.step()
    return model, optimizer, x


@contextmanager
def failing_or_not(fails: bool) -> Iterator[None]:
    if fails:
        with pytest.raises(FailedError):
            yield
    else:
        yield


# The first forward with gradients is the training's own, and one that fails while calls are watched is repeated;
# measuring then looks, times, and measures bytes and seconds.
@pytest.mark.parametrize("fails_at", [-1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("as_step", [False, True])
def test_everything_is_as_before(fails_at: int, as_step: bool) -> None:
    model, optimizer, x = trained(fails_at)
    before = state_of(model, optimizer)

    def step() -> None:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()

    with failing_or_not(fails_at > 2):
        measure(model, None if as_step else x, step=step if as_step else None, optimizer=optimizer)
    assert_same(state_of(model, optimizer), before)
    assert torch.autograd.backward.__module__ == "torch.autograd"


def test_a_model_that_refuses_its_sample() -> None:
    model, optimizer, _ = trained()
    sample = torch.randn(8, 5)
    before = state_of(model, optimizer)
    with pytest.raises(SampleError):
        measure(model, sample)
    assert_same(state_of(model, optimizer), before)


def test_a_training_run_goes_on_bit_equal() -> None:
    model, optimizer, x = trained()
    optimizer.zero_grad()
    other = copy.deepcopy(model)
    same = torch.optim.Adam(other.parameters(), lr=0.01)
    same.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    rng = torch.get_rng_state()
    for _ in range(2):
        other(x).backward()
        same.step()
        same.zero_grad()
    torch.set_rng_state(rng)
    for _ in range(2):
        model(x).backward()
        measure(model, x, optimizer=optimizer)  # with gradients that wait for their step
        optimizer.step()
        optimizer.zero_grad()
        measure(model, x, optimizer=optimizer)
    for name, value in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


class Remembers(nn.Module):
    """Keeps what it computed: a loss of its own, and a state for the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.losses = nn.Linear(6, 6), list[Tensor]()
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x if self.state is None else x + self.state.mean()).tanh()
        self.losses.append(y.square().mean())
        self.state = y
        return y


def test_what_a_model_keeps_of_a_watched_forward_does_not_reach_the_next() -> None:
    """Its graph has no saved tensors."""
    model, x = nn.Sequential(Remembers(), Remembers()), torch.randn(4, 6)

    def loss(output: Tensor) -> Tensor:
        return output.mean() + sum(loss for layer in model for loss in layer.losses)

    assert measure(model, x, loss=loss).plain_bytes > 0
    assert [(layer.losses, layer.state) for layer in model] == [([], None)] * 2


def test_no_hook_is_left_on_parameters() -> None:
    """Not even an empty dictionary of them, which each backward would look at."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    model[0].bias.register_hook(lambda gradient: gradient * 2)
    measure(model, torch.randn(4, 6), loss=torch.sum)
    assert model[0].weight._backward_hooks is None
    assert len(model[0].bias._backward_hooks or ()) == 1


def test_forwards_set_on_instances_stay() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    def own(x: Tensor) -> Tensor:
        return x * 2

    model[1].forward = own  # type: ignore[method-assign]
    measure(model, torch.randn(4, 6), loss=lambda output: output.sum())
    assert vars(model[1])["forward"] is own
    assert "forward" not in vars(model[0])


def test_a_list_that_units_fill_is_filled_once_for_the_code_after() -> None:
    class Collects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Collector() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            found: list[Tensor] = []
            for layer in self.layers:
                x = layer(x, found)
            assert len(found) == 3
            return (torch.stack(found) * x).mean()

    class Collector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.leaks = nn.Linear(6, 6), False

        def forward(self, x: Tensor, found: list[Tensor]) -> Tensor:
            y = self.layer(x)
            found.append(y if self.leaks else y.detach())
            return y.tanh()

    model = Collects()
    profile = measure(model, torch.randn(4, 6), units="layers.*")
    assert [unit.name for unit in profile.units] == ["layers.0", "layers.1", "layers.2", "loss"]
    model.layers[1].leaks = True
    with pytest.raises(
        UnitError, match=r"Unit .layers.1. gives a tensor to code outside by another way.*Return it"
    ):
        measure(model, torch.randn(4, 6), units="layers.*")


def test_a_glance_holds_nothing() -> None:
    layer = nn.Linear(6, 6)
    call = UnitCall(0, "layer", layer, layer.forward, (torch.randn(4, 6),), {})
    with pytest.raises(LeakError, match="layer"):
        call.glance().sum().backward()


# Collectors that hooks fill

_COLLECTOR: ContextVar[dict[str, list[Tensor]] | None] = ContextVar("collector", default=None)
_GLOBAL: list[Tensor] = []


def collect(place: list[Tensor], module: nn.Module, args: Any, output: Tensor) -> None:
    """A replay runs hooks too, long after the code that wants what they collect."""
    if not recoup.is_replaying():
        place.append(output)


class Recorder:
    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def add(self, module: nn.Module, args: Any, output: Tensor) -> None:
        collect(self.outputs, module, args, output)


class Hooked(nn.Module):
    """Uses what hooks of modules inside its blocks collect, and sets them up when it first runs."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.GELU()) for _ in range(4)
        )
        self.way, self.is_set_up, self.recorder, self.found = way, False, Recorder(), []

    def set_up(self) -> None:
        found, recorder = self.found, self.recorder

        def add(module: nn.Module, args: Any, output: Tensor) -> None:
            collect(found, module, args, output)

        def add_to_context(module: nn.Module, args: Any, output: Tensor) -> None:
            collector = _COLLECTOR.get()
            if collector is not None:
                collector["outputs"].append(output)

        def add_to_global(module: nn.Module, args: Any, output: Tensor) -> None:
            collect(_GLOBAL, module, args, output)

        hooks = {
            "closure": add,
            "context": add_to_context,
            "global": add_to_global,
            "object": recorder.add,
            "module": self.add,
            "partial": functools.partial(collect, found),
        }
        for block in self.blocks:
            block[1].register_forward_hook(hooks[self.way])

    def add(self, module: nn.Module, args: Any, output: Tensor) -> None:
        collect(self.found, module, args, output)

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set_up:
            self.set_up()
            self.is_set_up = True
        collected: dict[str, list[Tensor]] = {"outputs": []}
        token = _COLLECTOR.set(collected)
        try:
            for block in self.blocks:
                x = block(x)
        finally:
            _COLLECTOR.reset(token)
        found = [*collected["outputs"], *self.found, *self.recorder.outputs, *_GLOBAL]
        assert len(found) == len(self.blocks)
        for place in (self.found, self.recorder.outputs, _GLOBAL):
            place.clear()
        return (x * sum(output.detach() for output in found)).mean()


@pytest.mark.parametrize("is_set_up", [False, True])
@pytest.mark.parametrize("way", ["closure", "context", "global", "object", "module", "partial"])
def test_what_hooks_collect_is_collected_once(way: str, is_set_up: bool) -> None:
    model, x = Hooked(way), torch.randn(32, 6)
    if is_set_up:
        model(x)
    profile = measure(model, x, units="blocks.*")
    budget = (recoup.minimum_budget(profile) + profile.plain_bytes) // 2
    fitted = recoup.fit(model, x, budget=budget, units="blocks.*")
    assert fitted.verification is not None
    assert fitted.verification.gradients == "bit-equal"
    assert model.is_set_up is is_set_up
    assert len(model.blocks[0][1]._forward_hooks) == is_set_up
    assert model.found == model.recorder.outputs == _GLOBAL == []
    model(x).backward()


class Dropping(nn.Module):
    """Leaves layers out at random."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.Tanh()) for _ in range(6)
        )
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.draw() < 0.6:
                x = block(x)
        return self.blocks[0](x).mean()


@pytest.mark.parametrize("draw", [lambda: torch.rand(()).item(), random.random, np.random.rand])
def test_layers_left_out_at_random_are_there_when_measured(draw: Callable[[], float]) -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model, x = Dropping(draw), torch.randn(32, 6)
    profile = measure(model, x, units="blocks.*")
    assert {unit.module for unit in profile.units if unit.module} == {f"blocks.{index}" for index in range(6)}
    fitted = recoup.fit(
        model, x, budget=(recoup.minimum_budget(profile) + profile.plain_bytes) // 2, units="blocks.*"
    )
    assert [unit.name for unit in fitted.profile.units] == [unit.name for unit in profile.units]
    for seed in range(8):
        results = []
        for _ in range(2):
            for how in (torch.manual_seed, random.seed, np.random.seed):
                how(seed)
            model.zero_grad()
            model(x).backward()
            results.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
            recoup.remove(model)
        recoup.apply(model, fitted.plan)
        assert results[0].keys() == results[1].keys()
        assert all(torch.equal(gradient, results[1][name]) for name, gradient in results[0].items())


@pytest.mark.parametrize(
    ("choose", "what"),
    [
        (lambda run, index: index != 2 or run != 2, "'blocks.3' was called in the place of 'blocks.2'"),
        (lambda run, index: index != 5 or run < 3, "'blocks.5' was not called again"),
    ],
)
def test_a_step_that_calls_other_units_each_time(choose: Callable[[int, int], bool], what: str) -> None:
    runs = itertools.count()

    class Unsteady(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            run = next(runs)
            for index, block in enumerate(self.blocks):
                x = block(x) if choose(run, index) else x
            return x.mean()

    with pytest.raises(UnitError, match=f"does not call the same units each time that it runs: {what}"):
        measure(Unsteady(), torch.randn(8, 6), units="blocks.*")
