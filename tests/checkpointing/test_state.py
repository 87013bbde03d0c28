"""Buffers, counters, flags and caches: the replay sees what the forward saw and leaves no trace."""

from __future__ import annotations

import copy
import threading
import time
from functools import partial
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from recoup import Checkpoint, checkpoint, is_replaying
from recoup.errors import CheckpointError, InputChangedError

norm = nn.BatchNorm1d(4)  # a global, for test_reached_as_a_global


def train_twice(make: Any, call: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = nn.BatchNorm1d(4, momentum=0.3)
    fn = make(module)
    x = torch.randn(6, 4)
    for _ in range(2):
        call(fn, x.clone().requires_grad_()).square().sum().backward()
    return {**module.state_dict(), **{f"{name}.grad": p.grad for name, p in module.named_parameters()}}


class Owner:
    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def run(self, x: Tensor) -> Tensor:
        return self.module(x).sin()


class Holder(Owner):
    def __call__(self, x: Tensor) -> Tensor:
        return self.module(x).sin()


def apply(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).sin()


WAYS = {
    "the function": lambda module: module,
    "bound self": lambda module: module.forward,
    "bound self of an object": lambda module: Owner(module).run,
    "callable object": lambda module: Holder(module),
    "partial": lambda module: partial(apply, module),
    "partial keyword": lambda module: partial(lambda x, m: apply(m, x), m=module),
    "closure": lambda module: lambda x: module(x).sin(),
    "closure of a closure": lambda module: (lambda inner: lambda x: inner(x))(lambda x: module(x).sin()),
    "list in a closure": lambda module: (lambda layers: lambda x: layers["a"][0](x).sin())({"a": [module]}),
    "default": lambda module: lambda x, m=module: m(x).sin(),
    "inside another module": lambda module: nn.Sequential(nn.Identity(), nn.Sequential(module, nn.Tanh())),
}


@pytest.mark.parametrize("way", WAYS)
def test_batch_norm_statistics(way: str) -> None:
    models.assert_same(train_twice(WAYS[way], models.plainly), train_twice(WAYS[way], checkpoint))


def test_captured_containers_may_hold_themselves() -> None:
    layers: list[Any] = [nn.Linear(4, 4)]
    layers.append(layers)
    x = torch.randn(2, 4, requires_grad=True)
    loss = checkpoint(lambda x: layers[0](x).sin(), x).sum()
    with torch.no_grad():
        layers[0].bias.add_(1)
    with pytest.raises(InputChangedError, match=r"parameter 'layers\[0\].bias' of Linear"):
        loss.backward()


def test_batch_norm_as_an_argument() -> None:
    def call(fn: Any, x: Tensor) -> Tensor:
        return checkpoint(apply, fn, x)

    models.assert_same(
        train_twice(lambda module: lambda x: apply(module, x), models.plainly),
        train_twice(lambda module: module, call),
    )


def test_reached_as_a_global() -> None:
    x = torch.randn(6, 4, requires_grad=True)
    expected = copy.deepcopy(norm)
    expected(x).sum().backward()
    checkpoint(lambda x: norm(x).sin(), x).sum().backward()
    models.assert_same(dict(expected.state_dict()), dict(norm.state_dict()))


def test_functional_batch_norm_on_a_modules_own_buffers() -> None:
    """No version counter moves here at all."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("var", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(x, self.mean, self.var, training=True).sin()

    x = torch.randn(6, 4, requires_grad=True)
    plain, other = Own(), Own()
    plain(x).sum().backward()
    checkpoint(other, x).sum().backward()
    models.assert_same(dict(plain.state_dict()), dict(other.state_dict()))


class Counter(nn.Module):
    """Counts in every way a module can: in place, by assignment, as a plain number, in a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("in_place", torch.zeros(()))
        self.register_buffer("assigned", torch.zeros(()))
        self.register_buffer("large", torch.zeros(300, 300))
        self.number = 0
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.in_place += 1
        self.assigned = self.assigned + 2
        self.large.add_(1)
        self.number += 1
        y = (x * self.in_place * self.assigned * (self.number + self.large[0, 0])).sin()
        if self.last is not None:
            y = y + self.last
        self.last = y.detach()
        return y.exp()


@pytest.mark.parametrize("num_calls", [1, 3])
def test_every_kind_of_counter(num_calls: int) -> None:
    results = []
    for call in (models.plainly, checkpoint):
        module, x = Counter(), torch.linspace(0.1, 0.7, 5, requires_grad=True)
        losses = [call(module, x).sum() for _ in range(num_calls)]
        (grad,) = torch.autograd.grad(losses[-1], x)
        last, number = module.last, module.number
        results.append({**module.state_dict(), "grad": grad, "last": last, "number": torch.tensor(number)})
    models.assert_same(*results)


def test_a_recurrent_state_kept_on_the_module() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(3, 3)
            self.hidden: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.hidden = self.cell(x, self.hidden)
            return self.hidden

    results = []
    for call in (models.plainly, checkpoint):
        torch.manual_seed(0)
        module, xs = Keeps(), torch.randn(3, 2, 3)
        loss = sum(call(module, x).square().sum() for x in xs)
        results.append(dict(enumerate(torch.autograd.grad(loss, list(module.parameters())))))
    models.assert_same(*results)


def test_a_shared_module_called_twice_in_a_step() -> None:
    plain, other = models.make_pair(models.ResNet, checkpoint)
    for model in (plain, other):
        model.blocks[1] = model.blocks[2] = model.blocks[0]
    sample = models.ResNet.sample()
    models.assert_same(models.train(plain, sample), models.train(other, sample))


def test_spectral_norm() -> None:
    results = []
    for call in (models.plainly, checkpoint):
        torch.manual_seed(0)
        layer, x = spectral_norm(nn.Linear(4, 4)), torch.randn(2, 4, requires_grad=True)
        for _ in range(2):
            call(nn.Sequential(layer, nn.Tanh()), x).sum().backward()
        results.append({**layer.state_dict(), "grad": x.grad})
    models.assert_same(*results)


def test_eval_between_forward_and_backward() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())
    x = torch.randn(8, 4, requires_grad=True)
    results = []
    for call in (models.plainly, checkpoint):
        torch.manual_seed(0)
        loss = call(module.train(), x).sum()
        module.eval()
        results.append(torch.autograd.grad(loss, x)[0])
        assert not module.training
        assert not module[1].training
    assert torch.equal(*results)


def test_functional_call_swaps_parameters_only_for_the_forward() -> None:
    class Model(nn.Module):
        def __init__(self, call: Any) -> None:
            super().__init__()
            self.call = call
            self.layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return self.call(self.layer, x).sin()

    other = {
        "layer.0.weight": torch.randn(3, 3, requires_grad=True),
        "layer.0.bias": torch.randn(3, requires_grad=True),
    }
    x = torch.randn(2, 3)
    results = []
    for call in (models.plainly, checkpoint):
        loss = torch.func.functional_call(Model(call), other, (x,)).sum()
        results.append(dict(enumerate(torch.autograd.grad(loss, list(other.values())))))
    models.assert_same(*results)


def test_lazy_modules_are_refused_until_they_are_made() -> None:
    layer = nn.Sequential(nn.LazyLinear(3), nn.BatchNorm1d(3), nn.Tanh())
    x = torch.randn(4, 5, requires_grad=True)
    with pytest.raises(CheckpointError, match=r"LazyLinear has not run yet.*Run the model once"):
        checkpoint(layer, x)
    layer(x)
    checkpoint(layer, x).sum().backward()
    assert int(layer[1].num_batches_tracked) == 2


def test_inference_tensors_in_modules() -> None:
    class Offset(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.inference_mode():
                self.register_buffer("offset", torch.randn(3))
                self.scale = torch.randn(3)

        def forward(self, x: Tensor) -> Tensor:
            return ((x + self.offset) + self.scale).sin()

    module, x = Offset(), torch.randn(3, requires_grad=True)
    checkpoint(module, x).sum().backward()
    assert torch.equal(x.grad, (x + module.offset + module.scale).cos())


def test_large_buffers_that_stay_are_not_held() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(200, 200))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.mask).sin()

    module, x = Masked(), torch.randn(200, 200, requires_grad=True)
    loss = checkpoint(module, x).sum()
    module.mask.mul_(2)
    with pytest.raises(InputChangedError, match=r"buffer 'mask' of Masked .* changed in place"):
        loss.backward()


def test_preserve_buffers_off_refuses_a_change() -> None:
    options = Checkpoint(preserve_buffers=False)
    x = torch.randn(4, 3, requires_grad=True)
    options(nn.Linear(3, 3), x).sum().backward()
    options(nn.BatchNorm1d(3).eval(), x).sum().backward()
    with pytest.raises(
        InputChangedError, match=r"buffer 'num_batches_tracked' of BatchNorm1d .*preserve_buffers=True"
    ):
        options(nn.BatchNorm1d(3), x)


def test_a_scripted_module() -> None:
    scripted = torch.jit.trace(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3))
    x = torch.randn(2, 3, requires_grad=True)
    (expected,) = torch.autograd.grad(scripted(x).sum(), x)
    loss = checkpoint(scripted, x).sum()
    (actual,) = torch.autograd.grad(loss, x)
    assert torch.equal(actual, expected)
    loss = checkpoint(scripted, x).sum()
    with torch.no_grad():
        next(scripted.parameters()).add_(1)
    with pytest.raises(InputChangedError, match="parameter"):
        loss.backward()


def check_both_ways(run: Any) -> None:
    """``run(call)`` gives tensors; plain and checkpointed must agree."""
    results = []
    for call in (models.plainly, checkpoint):
        torch.manual_seed(0)
        results.append(dict(enumerate(run(call))))
    models.assert_same(*results)


def test_a_loop_variable_that_moved_on() -> None:
    """Late binding: without help every replay would run the last layer."""

    def run(call: Any) -> Any:
        layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3)]
        h = torch.randn(2, 4)
        for layer in layers:
            h = call(lambda h: layer(h), h)
        h.sum().backward()
        return [parameter.grad for layer in layers for parameter in layer.parameters()]

    check_both_ways(run)


factor: Any = None


def test_a_global_that_moved_on() -> None:
    def run(call: Any) -> Any:
        global factor
        x = torch.randn(3, requires_grad=True)
        h = x * 1
        for factor in (0.5, 2, torch.ones(3)):
            h = call(lambda h: (h * factor).sin().exp(), h)
        last = factor
        h.sum().backward()
        assert factor is last
        return [x.grad]

    check_both_ways(run)


def test_a_nonlocal_counter() -> None:
    def run(call: Any) -> Any:
        count = 0

        def counting(x: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return (x * count).sin().exp()

        x = torch.randn(3, requires_grad=True)
        call(counting, call(counting, x)).sum().backward()
        return [x.grad, torch.tensor(count)]

    check_both_ways(run)


def test_requires_grad_switched_in_between() -> None:
    def run(call: Any) -> Any:
        layer, weight = nn.Linear(3, 3).requires_grad_(False), torch.randn(3, requires_grad=True)
        data = torch.randn(3, 3)
        y = call(lambda x: layer(x) * weight, data)
        layer.requires_grad_(True)
        data.requires_grad_(True)
        y.sum().backward()
        assert layer.weight.requires_grad
        return [weight.grad]

    check_both_ways(run)


def test_forward_hooks_removed_and_added_in_between() -> None:
    def run(call: Any) -> Any:
        module, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3, requires_grad=True)
        handle = module[0].register_forward_hook(lambda module, args, output: output * 2)
        y = call(module, x)
        handle.remove()
        module[1].register_forward_pre_hook(lambda module, args: (args[0] * 3,))
        y.sum().backward()
        return [x.grad]

    check_both_ways(run)


class Deeper(nn.Module):
    """State where nobody registers it."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["hidden"] = nn.BatchNorm1d(4)
        self.listed = [nn.BatchNorm1d(4)]
        self.history: list[int] = []
        self.table: dict[str, int] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.history.append(1)
        self.table["calls"] = self.table.get("calls", 0) + 1
        x = self.listed[0](self.__dict__["hidden"](x))
        return (x * len(self.history) * self.table["calls"]).sin().exp()


def test_state_in_lists_dictionaries_and_unregistered_modules() -> None:
    def run(call: Any) -> Any:
        module, x = Deeper(), torch.randn(6, 4, requires_grad=True)
        (call(module, x) + call(module, x)).sum().backward()
        counts = [torch.tensor(len(module.history)), torch.tensor(module.table["calls"])]
        return [x.grad, *counts, *module.listed[0].buffers(), *module.__dict__["hidden"].buffers()]

    check_both_ways(run)


def test_attributes_that_trade_names() -> None:
    class Mode(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * (2.0 if hasattr(self, "first") else 5.0)).sin().exp()

    def run(call: Any) -> Any:
        module, x = Mode(), torch.randn(3, requires_grad=True)
        module.first = True
        y = call(module, x)
        del module.first
        module.second = True
        y.sum().backward()
        assert not hasattr(module, "first")
        return [x.grad]

    check_both_ways(run)


def test_a_large_buffer_changed_without_a_version() -> None:
    """The usual style of a codebook that follows its data."""

    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.ones(300, 100))

        def forward(self, x: Tensor) -> Tensor:
            self.codes.data.mul_(0.5).add_(1)
            return (x * self.codes[0, :3]).sin().exp()

    def run(call: Any) -> Any:
        module, x = Codebook(), torch.randn(3, requires_grad=True)
        call(module, call(module, x)).sum().backward()
        return [x.grad, module.codes]

    results = []
    for call in (models.plainly, checkpoint):
        torch.manual_seed(0)
        results.append(run(call))
    assert torch.equal(results[0][1], results[1][1])


def test_hooks_that_the_function_registers_on_its_argument() -> None:
    def run(call: Any) -> Any:
        def scaled(h: Tensor) -> Tensor:
            h.register_hook(lambda grad: grad * 3)
            return h.sin().exp()

        x = torch.randn(3, requires_grad=True)
        call(scaled, x * 1).sum().backward()
        return [x.grad]

    check_both_ways(run)


def test_two_threads_replay_one_module() -> None:
    """The second must not take the first one's copies for the real buffers."""
    inner = nn.BatchNorm1d(4)
    real, meet = inner.running_mean, threading.Barrier(2, timeout=5)

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor, wait: float) -> Tensor:
            y = self.inner(x)
            if is_replaying():
                time.sleep(wait)
            return y.exp()

    module = Slow()
    losses = [
        checkpoint(module, torch.randn(8, 4, requires_grad=True), 0.05 * (i + 1)).sum() for i in range(2)
    ]
    values = real.clone()

    def backward(index: int) -> None:
        meet.wait()
        losses[index].backward()

    threads = [threading.Thread(target=backward, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inner.running_mean is real
    assert torch.equal(real, values)


def test_globals_of_an_installed_function_are_those_of_its_forward() -> None:
    """Once a package is installed, its files lie among those of libraries."""
    found: dict[str, Any] = {"SCALE": 2.0}
    exec(compile("def scaled(x):\n    return (x * SCALE).exp()", torch.__file__, "exec"), found)
    x = torch.randn(4, requires_grad=True)
    expected = torch.autograd.grad(found["scaled"](x).sum(), x)[0]
    for _ in range(20):  # the first replays are compared with their forwards
        found["SCALE"] = 2.0
        output = checkpoint(found["scaled"], x)
        found["SCALE"] = 3.0
        assert torch.equal(torch.autograd.grad(output.sum(), x)[0], expected)
        assert found["SCALE"] == 3.0
