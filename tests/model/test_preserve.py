from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim

from recoup.measuring import MemoryTracker, preserving


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("wide", torch.zeros(1).expand(5), persistent=False)
        self.register_buffer("nowhere", torch.zeros(3, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.second(self.drop(torch.relu(self.norm(self.first(x)))))


class FailedError(Exception):
    pass


@contextmanager
def failing_or_not(fails: bool) -> Iterator[None]:
    if fails:
        with pytest.raises(FailedError):
            yield
    else:
        yield


def run(model: nn.Module) -> None:
    model(torch.randn(8, 6)).square().sum().backward()


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if not value.is_meta}


def check_equal(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, value in values_of(model).items():
        assert torch.equal(value, expected[name]), name


both = pytest.mark.parametrize("fails", [False, True])


@both
def test_buffers_come_back_as_the_same_tensors(fails: bool) -> None:
    model = Tied()
    run(model)
    buffers, expected = dict(model.named_buffers()), values_of(model)
    versions = {name: buffer._version for name, buffer in buffers.items()}
    with failing_or_not(fails), preserving(model):
        run(model)
        assert model.calls == 2
        model.norm.running_mean.data = torch.ones(3)
        model.norm.running_var.resize_(100)
        model.register_buffer("new", torch.zeros(1))
        model.nowhere = None
        if fails:
            raise FailedError
    after = dict(model.named_buffers())
    assert list(after) == list(buffers)
    assert all(after[name] is buffer for name, buffer in buffers.items())
    check_equal(model, expected)
    assert model.wide._version == versions["wide"]
    assert "wide" not in model.state_dict()
    run(model)


@both
def test_gradients_are_out_of_the_way_inside_and_back_after(fails: bool) -> None:
    model = Tied()
    model.second.bias.requires_grad_(False)
    run(model)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert gradients["first.weight"] is not None
    assert gradients["second.bias"] is None
    expected = {name: None if grad is None else grad.clone() for name, grad in gradients.items()}
    with failing_or_not(fails), preserving(model):
        assert all(parameter.grad is None for parameter in model.parameters())
        model.second.bias.requires_grad_(True)
        model.first.bias.requires_grad_(False)
        run(model)
        assert model.second.bias.grad is not None
        if fails:
            raise FailedError
    for name, parameter in model.named_parameters():
        assert parameter.grad is gradients[name], name
        assert parameter.grad is None or torch.equal(parameter.grad, expected[name]), name
        assert parameter.requires_grad == (name != "second.bias")


@both
def test_training_mode_and_hooks(fails: bool) -> None:
    model = Tied()
    model.norm.eval()
    calls: list[str] = []
    handle = model.first.register_forward_hook(lambda *_: calls.append("before"))
    with failing_or_not(fails), preserving(model):
        model.eval()
        model.norm.train()
        handle.remove()
        model.first.register_forward_hook(
            lambda *_: calls.append("inside"), always_call=True, with_kwargs=True
        )
        model.first.register_full_backward_hook(lambda *_: calls.append("backward"))
        model.register_forward_pre_hook(lambda *_: calls.append("pre"))
        if fails:
            raise FailedError
    assert [module.training for module in (model, model.first, model.norm, model.drop)] == [
        True,
        True,
        False,
        True,
    ]
    run(model)
    assert calls == ["before"]
    handle.remove()
    run(model)
    assert calls == ["before"]


@both
def test_random_state(fails: bool) -> None:
    def draw() -> tuple[Any, ...]:
        return torch.rand(3).tolist(), random.random(), np.random.rand(2).tolist()

    state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    expected = draw()
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])
    with failing_or_not(fails), preserving(nn.Dropout()):
        draw()
        if fails:
            raise FailedError
    assert draw() == expected


def train(model: nn.Module, optimizer: optim.Optimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        run(model)
        optimizer.step()


OPTIMIZERS = {
    "adam": lambda params: optim.Adam(params, lr=0.1),
    "adam_lr_tensor": lambda params: optim.Adam(params, lr=torch.tensor(0.1)),
    "sgd": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
    "adagrad": lambda params: optim.Adagrad(params, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("num_before", [0, 2])
@both
def test_training_goes_on_as_if_undisturbed(name: str, num_before: int, fails: bool) -> None:
    results = []
    for disturbed in (False, True):
        torch.manual_seed(1)
        model = Tied()
        optimizer = OPTIMIZERS[name](model.parameters())
        train(model, optimizer, num_before)
        if disturbed:
            with failing_or_not(fails), preserving(model, optimizer, everything=True):
                train(model, optimizer, 3)
                if fails:
                    raise FailedError
        train(model, optimizer, 2)
        results.append(values_of(model))
    for key in results[0]:
        assert torch.equal(results[0][key], results[1][key]), key


def test_parameters_and_optimizer_keep_their_objects() -> None:
    model = Tied()
    optimizer = optim.Adam(model.parameters())
    train(model, optimizer, 1)
    model.second.bias.requires_grad_(False)
    del optimizer.state[model.second.bias]
    weight, expected = model.first.weight, values_of(model)
    state, entry, mean = optimizer.state, optimizer.state[weight], optimizer.state[weight]["exp_avg"]
    mean_value, pointer = mean.clone(), weight.data_ptr()
    scheduler_step = optimizer.step
    with preserving(model, optimizer, everything=True):
        model.second.bias.requires_grad_(True)
        train(model, optimizer, 1)
        assert model.second.bias in optimizer.state
        optimizer.param_groups[0]["lr"] = 7.0
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        entry["extra"] = torch.zeros(2)
        optimizer.step = None  # type: ignore[method-assign]
    assert model.first.weight is model.second.weight is weight
    assert weight.data_ptr() == pointer
    check_equal(model, expected)
    assert optimizer.state is state
    assert state[weight] is entry
    assert entry["exp_avg"] is mean
    assert list(entry) == ["step", "exp_avg", "exp_avg_sq"]
    assert torch.equal(mean, mean_value)
    assert model.second.bias not in state
    assert len(optimizer.param_groups) == 1
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert optimizer.step == scheduler_step


@pytest.mark.usefixtures("no_gc")
def test_what_the_block_replaces_is_freed_inside_and_made_again() -> None:
    model = nn.Linear(100, 100, bias=False)
    with MemoryTracker() as memory:
        optimizer = optim.SGD(model.parameters(), momentum=0.9)
        model.weight.grad = torch.ones(100, 100)
        optimizer.step()
        entry = optimizer.state[model.weight]
        expected = entry["momentum_buffer"].clone()
        num_bytes = memory.current_bytes
        with preserving(model, optimizer, everything=True):
            entry["momentum_buffer"] = torch.zeros(1)
            model.weight.data = torch.zeros(100, 100)
            assert memory.current_bytes == num_bytes + 4
        assert torch.equal(entry["momentum_buffer"], expected)


def test_without_everything_the_parameters_are_the_blocks_own() -> None:
    model = nn.Linear(2, 2)
    with preserving(model), torch.no_grad():
        model.weight.fill_(3)
    assert torch.equal(model.weight, torch.full((2, 2), 3.0))


def test_a_graph_from_before_survives() -> None:
    model = nn.BatchNorm1d(4).eval()
    x = torch.randn(5, 4, requires_grad=True)
    output = model(x)  # saves the running statistics
    with preserving(model, everything=True):
        model.train()
        model(torch.randn(5, 4))
    output.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, (1 + model.eps) ** -0.5))


def test_memory_of_a_step_that_did_not_fit_is_freed_before_the_way_back() -> None:
    layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    held_bytes: list[int] = []

    @contextmanager
    def watching(memory: MemoryTracker) -> Iterator[None]:
        try:
            yield
        finally:  # while the error is on its way, as the restoring is
            held_bytes.append(memory.current_bytes)

    x = torch.zeros(64, 64)
    memory = MemoryTracker(limit_bytes=100_000)
    with memory, pytest.raises(torch.OutOfMemoryError), watching(memory), preserving(layers):
        layers(x).sum().backward()
    assert held_bytes == [0]


def test_modules_without_parameters_and_lazy_ones() -> None:
    activation, lazy = nn.ReLU(), nn.LazyLinear(3)
    with preserving(activation, everything=True):
        activation.train(False)
    assert activation.training
    with preserving(lazy, everything=True):
        lazy.train(False)
    assert lazy.training
    assert lazy.has_uninitialized_params()


@pytest.mark.gpu
def test_old_gradients_leave_the_device_and_come_back() -> None:
    model = nn.Linear(1024, 1024, bias=False).cuda()
    optimizer = optim.Adam(model.parameters())
    model(torch.ones(2, 1024, device="cuda")).sum().backward()
    optimizer.step()
    gradient, expected = model.weight.grad, model.weight.grad.clone()
    moment, weight = optimizer.state[model.weight]["exp_avg"], model.weight.detach().clone()
    random_state = torch.cuda.get_rng_state()
    held_bytes = torch.cuda.memory_allocated()
    with preserving(model, optimizer, everything=True):
        assert torch.cuda.memory_allocated() == held_bytes - 2**22
        torch.rand(3, device="cuda")
        model(torch.ones(2, 1024, device="cuda")).sum().backward()
        optimizer.step()
    assert torch.cuda.memory_allocated() == held_bytes
    assert model.weight.grad is gradient
    assert torch.equal(gradient, expected)
    assert optimizer.state[model.weight]["exp_avg"] is moment
    assert torch.equal(model.weight, weight)
    assert torch.equal(torch.cuda.get_rng_state(), random_state)


@pytest.mark.gpu
def test_gradients_that_share_their_storage_stay() -> None:
    model = nn.Linear(4, 4, bias=False).cuda()
    bucket = torch.ones(16, device="cuda")
    model.weight.grad = bucket.view(4, 4)
    with preserving(model):
        assert torch.equal(bucket, torch.ones(16, device="cuda"))
    assert model.weight.grad.data_ptr() == bucket.data_ptr()
