"""Compiled modules run eagerly for a time, and are compiled again."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import pytest
import torch
from capture.blocks import Block
from torch import Tensor, nn

import recoup
from recoup.engines import is_applied
from recoup.model.uncompile import (
    EagerForward,
    _Hidden,
    inner_model,
    is_compiled,
    is_uncompiled,
    recompile,
    uncompile,
    uncompiled,
)
from recoup.policies import EveryN
from recoup.snapshot.own_code import is_compiled_function

# The compiler looks at the gradients of what it is given.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf.*:UserWarning"
)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Runs:
    """A backend that counts how often what it compiled runs."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.number += 1
            return module.forward(*args)

        return run


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def runs() -> Runs:
    return Runs()


def whole(model: Layers, backend: Any) -> nn.Module:
    return torch.compile(model, backend=backend)  # type: ignore[return-value]


def in_place(model: Layers, backend: Any) -> nn.Module:
    model.compile(backend=backend)
    return model


def blocks(model: Layers, backend: Any) -> nn.Module:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def wrapped_blocks(model: Layers, backend: Any) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=backend)  # type: ignore[assignment]
    return model


def bound_forwards(model: Layers, backend: Any) -> nn.Module:
    for block in model.blocks:
        compiled = torch.compile(Layer.forward, backend=backend)
        block.forward = MethodType(compiled, block)  # type: ignore[method-assign]
    return model


def forwards(model: Layers, backend: Any) -> nn.Module:
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=backend)  # type: ignore[method-assign]
    return model


WAYS = [whole, in_place, blocks, wrapped_blocks, forwards, bound_forwards]


@pytest.mark.parametrize("way", WAYS)
def test_runs_eagerly_until_it_is_compiled_again(way: Any, runs: Runs) -> None:
    model, x = Layers(), torch.randn(2, 4)
    expected = model(x)
    compiled = way(model, runs)
    names = [name for name, _ in compiled.named_parameters()]
    assert torch.equal(compiled(x), expected)
    before = runs.number
    assert before > 0

    uncompile(compiled)
    assert torch.equal(compiled(x), expected)
    assert runs.number == before
    uncompile(compiled)  # a second time changes nothing
    assert torch.equal(compiled(x), expected)
    assert runs.number == before
    assert [name for name, _ in compiled.named_parameters()] == names

    recompile(compiled)
    recoup.remove(compiled)
    assert torch.equal(compiled(x), expected)
    assert runs.number == 2 * before
    recompile(compiled)
    assert torch.equal(compiled(x), expected)
    assert runs.number == 3 * before


@pytest.mark.parametrize("way", WAYS)
def test_compiled_with_torch_s_own_backend(way: Any, runs: Runs) -> None:
    # Nothing is compiled before it runs.
    assert is_compiled(way(Layers(), "inductor"))
    assert not is_compiled(way(Layers(), runs))
    assert not is_compiled(way(Layers(), "aot_eager"))


def test_what_was_never_compiled() -> None:
    model, x = Layers(), torch.randn(2, 4)
    expected, before = model(x), dict(vars(model))
    assert not is_compiled(model)
    uncompile(model)
    recompile(model)
    assert torch.equal(model(x), expected)
    assert vars(model) == before
    assert "forward" not in vars(model)


@pytest.mark.parametrize("way", [blocks, wrapped_blocks, forwards])
def test_all_or_nothing(way: Any, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = way(Layers(), runs), torch.randn(2, 4)
    expected = model(x)
    before, counted = runs.number, 0

    def second_fails(begin: Callable[..., None]) -> Callable[..., None]:
        def begin_or_fail(*args: Any) -> None:
            nonlocal counted
            counted += 1
            if counted == 2:
                raise RuntimeError("no second one")
            begin(*args)

        return begin_or_fail

    for kind in (_Hidden, EagerForward):
        monkeypatch.setattr(kind, "__init__", second_fails(kind.__init__))
    with pytest.raises(RuntimeError, match="no second one"), uncompiled(model):
        pass
    monkeypatch.undo()
    assert not is_uncompiled(model)
    assert torch.equal(model(x), expected)
    assert runs.number == 2 * before


def test_what_torch_compile_was_given() -> None:
    model = Layers()
    assert inner_model(model) is model
    assert inner_model(torch.compile(model)) is model


def test_hooks_run_when_it_runs_eagerly(runs: Runs) -> None:
    model = torch.compile(Layers(), backend=runs)
    seen: list[int] = []
    model._orig_mod.register_forward_hook(lambda *_: seen.append(1))
    uncompile(model)  # type: ignore[arg-type]
    model(torch.randn(2, 4))
    assert seen == [1]


class Model(nn.Module):
    """Of blocks that are worth capturing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def seeded(model: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return model(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", [whole, in_place, blocks, wrapped_blocks])
def test_a_captured_plan_on_compiled_modules(way: Any, runs: Runs) -> None:
    model, x = Model(), torch.randn(64, 16)
    compiled = way(model, runs)
    expected = seeded(compiled, x)
    before = runs.number
    plain = inner_model(compiled)
    uncompile(compiled)
    profile = recoup.measure(plain, x, loss=torch.mean, engine="captured")
    recompile(compiled)
    recoup.remove(compiled)
    assert profile.is_captured
    runs.number = 0

    recoup.apply(compiled, recoup.plan(profile, recoup.minimum_budget(profile)))
    assert torch.equal(seeded(compiled, x), expected)
    assert runs.number == 0
    recoup.remove(compiled)
    assert torch.equal(seeded(compiled, x), expected)
    assert runs.number == before


def test_a_model_that_runs_eagerly_can_be_freed_and_copied() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.compile()
    uncompile(model)
    other = copy.deepcopy(model)
    assert not is_uncompiled(other)
    recompile(other)
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None


def test_a_compiled_forward_under_a_plan() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(4)))
    for block in model:
        block.forward = torch.compile(block.forward)
    recoup.apply(model, EveryN(2), units=[*model])
    recoup.measure(model, torch.zeros(3, 2), loss=torch.sum, engine="captured")
    assert is_applied(model)
    recoup.remove(model)
    assert all(is_compiled_function(block.forward) for block in model)
