"""RNG, autocast, grad mode, deterministic settings, default device: the replay stands where the forward stood."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recoup
from recoup import Checkpoint, checkpoint
from recoup.snapshot import random_state


def noisy(x: Tensor) -> Tensor:
    return (F.dropout(x.sin(), 0.5) + torch.randn_like(x)).exp()


def test_dropout_replays_and_the_stream_goes_on() -> None:
    x = torch.randn(50, requires_grad=True)
    results = []
    for call in (models.plainly, checkpoint):
        torch.manual_seed(1)
        y = call(noisy, x).sum()
        between = torch.rand(3)
        (grad,) = torch.autograd.grad(y, x)
        results.append((y.detach(), between, grad, torch.rand(3)))
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)


def test_rng_is_put_back_when_the_replay_raises() -> None:
    def fn(x: Tensor) -> Tensor:
        y = F.dropout(x.sin(), 0.5)
        if recoup.is_replaying():
            torch.rand(5)
            raise ZeroDivisionError("from the replay")
        return y.exp()

    x = torch.randn(8, requires_grad=True)
    loss = checkpoint(fn, x).sum()
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError, match="from the replay"):
        loss.backward()
    assert torch.equal(torch.get_rng_state(), before)
    assert not recoup.is_replaying()
    assert torch.is_grad_enabled()


def test_without_preserve_rng_the_stream_is_left_alone() -> None:
    x = torch.ones(1000, requires_grad=True)
    loss = Checkpoint(preserve_rng=False, check="metadata")(lambda x: F.dropout(x * 1, 0.5).sin(), x).sum()
    before = torch.get_rng_state()
    loss.backward()
    assert not torch.equal(torch.get_rng_state(), before)


def test_a_function_without_randomness_never_touches_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, requires_grad=True)
    loss = checkpoint(lambda x: x.sin().exp(), x).sum()
    monkeypatch.setattr(
        random_state,
        "_CPU",
        random_state.Accessor(lambda: pytest.fail("read"), lambda state: pytest.fail("written")),
    )
    loss.backward()


class Noisy(nn.Module):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        return (x * torch.rand(x.shape, generator=self.generator)).sin()


def with_generator(x: Tensor, generator: torch.Generator) -> Tensor:
    return (x * torch.rand(x.shape, generator=generator)).sin()


@pytest.mark.parametrize("where", ["argument", "keyword", "nested", "closure", "module"])
def test_custom_generators(where: str) -> None:
    x = torch.randn(20, requires_grad=True)
    results = []
    for call in (models.plainly, checkpoint):
        generator = torch.Generator().manual_seed(4)
        ways: dict[str, Any] = {
            "argument": lambda: call(with_generator, x, generator),
            "keyword": lambda: call(with_generator, x, generator=generator),
            "nested": lambda: call(lambda x, more: with_generator(x, more["g"][0]), x, {"g": [generator]}),
            "closure": lambda: call(lambda x: with_generator(x, generator), x),
            "module": lambda: call(Noisy(generator), x),
        }
        y = ways[where]().sum()
        between = torch.rand(2, generator=generator)
        (grad,) = torch.autograd.grad(y, x)
        results.append((y.detach(), between, grad, torch.rand(2, generator=generator)))
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("inside", [False, True], ids=["autocast around", "autocast around the backward"])
def test_autocast(inside: bool) -> None:
    layer = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    x = torch.randn(4, 8, requires_grad=True)
    results = []
    for call in (models.plainly, checkpoint):
        with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
            y = call(layer, x)
        assert y.dtype is (torch.float32 if inside else torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            results.append(torch.autograd.grad(y.float().sum(), [x, *layer.parameters()]))
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)
    assert not torch.is_autocast_enabled("cpu")


def test_deterministic_settings() -> None:
    seen = []

    def fn(x: Tensor) -> Tensor:
        seen.append((torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark))
        return x.sin().exp()

    x = torch.randn(3, requires_grad=True)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = True
    loss = checkpoint(fn, x).sum()
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False
    loss.backward()
    assert seen == [(True, True), (True, True)]
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark


def test_default_device() -> None:
    x = torch.randn(3, requires_grad=True)
    seen = []

    def fn(x: Tensor) -> Tensor:
        seen.append(torch.empty(1).device.type)
        return x.sin().exp()

    with torch.device("meta"):
        loss = checkpoint(fn, x).sum()
    loss.backward()
    assert seen == ["meta", "meta"]


def test_grad_mode_inside_the_function() -> None:
    seen = []

    def fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.square().mean()
        seen.append(torch.is_grad_enabled())
        return (x * scale).sin().exp()

    x = torch.randn(3, requires_grad=True)
    checkpoint(fn, x).sum().backward()
    assert seen == [True, True]


def test_accelerators_with_whole_states_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator whose module offers get_rng_state and set_rng_state, as XPU and MPS do."""
    states = [torch.tensor([1], dtype=torch.uint8), torch.tensor([5], dtype=torch.uint8)]

    class Module:
        @staticmethod
        def get_rng_state(device: int) -> Tensor:
            return states[device].clone()

        @staticmethod
        def set_rng_state(state: Tensor, device: int) -> None:
            states[device] = state.clone()

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: Module)
    monkeypatch.setattr(random_state, "_other_accelerators", random_state._other_accelerators.__wrapped__)
    noted = random_state.RandomState([])
    states[1] += 2  # only the second device's generator is drawn from
    assert noted.settle()
    assert len(noted) == 1
    put_back = noted.restore()
    assert [int(state) for state in states] == [1, 5]
    put_back()
    assert [int(state) for state in states] == [1, 7]
