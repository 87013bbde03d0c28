"""The primitive on a CUDA device. Skipped without one."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recoup
from recoup import Checkpoint, checkpoint
from recoup.checkpointing.sampling import sampling

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", models.ALL, ids=lambda kind: kind.__name__)
def test_training_matches(kind: type[nn.Module]) -> None:
    """Bit-equal under deterministic algorithms."""
    torch.use_deterministic_algorithms(True)
    try:
        plain, other = (model.cuda() for model in models.make_pair(kind, checkpoint))
        sample = tuple(tensor.cuda() for tensor in kind.sample())
        with torch.device("cuda"):
            models.assert_same(models.train(plain, sample), models.train(other, sample))
    finally:
        torch.use_deterministic_algorithms(False)


def test_dropout_replays_and_the_stream_goes_on() -> None:
    x = torch.randn(5000, device="cuda", requires_grad=True)
    results = []
    for call in (models.plainly, checkpoint):
        torch.cuda.manual_seed(1)
        y = call(lambda x: (F.dropout(x.sin(), 0.5) + torch.randn_like(x)).exp(), x).sum()
        between = torch.rand(3, device="cuda")
        (grad,) = torch.autograd.grad(y, x)
        results.append((y.detach(), between, grad, torch.rand(3, device="cuda")))
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)


def test_a_function_that_makes_its_own_tensors_on_the_device() -> None:
    """No argument lives there, yet its generator is the device's."""
    x = torch.randn(50, requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        return (x.cuda() * torch.rand(50, device="cuda")).exp()

    torch.cuda.manual_seed(1)
    (expected,) = torch.autograd.grad(fn(x).sum(), x)
    torch.cuda.manual_seed(1)
    (actual,) = torch.autograd.grad(checkpoint(fn, x).sum(), x)
    assert torch.equal(actual, expected)


def test_custom_generator_on_the_device() -> None:
    x = torch.randn(50, device="cuda", requires_grad=True)
    results = []
    for call in (models.plainly, checkpoint):
        generator = torch.Generator("cuda").manual_seed(4)
        y = call(lambda x, g: (x * torch.rand(50, device="cuda", generator=g)).sin(), x, g=generator).sum()
        results.append((*torch.autograd.grad(y, x), torch.rand(2, device="cuda", generator=generator)))
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)


def test_seed_and_offset_are_held_and_not_a_state_tensor() -> None:
    x = torch.randn(50, device="cuda", requires_grad=True)
    y = checkpoint(lambda x: F.dropout(x, 0.5).exp(), x * 1)
    assert "RNG state of 1 generator" in recoup.describe(y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    layer = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)).cuda()
    x = torch.randn(4, 64, device="cuda", requires_grad=True)
    results = []
    for call in (models.plainly, checkpoint):
        with torch.autocast("cuda", dtype):
            y = call(layer, x)
        assert y.dtype is dtype
        results.append(torch.autograd.grad(y.float().sum(), [x, *layer.parameters()]))
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("check", ["metadata", "sampled", "values"])
def test_only_the_input_is_held(check: Any) -> None:
    """What a compared call notes is held on the host."""
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)

    def deep(x: Tensor) -> Tensor:
        for _ in range(8):
            x = x.sin()
        return x

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with sampling("always"):
        y = Checkpoint(check=check)(deep, x * 1)
    assert torch.cuda.memory_allocated() - before == 2 * 4 * (1 << 20)  # the product and the output
    y.sum().backward()
    del y
    assert torch.cuda.memory_allocated() - before == 4 * (1 << 20)  # x.grad


def test_other_device_in_the_replay() -> None:
    x = torch.randn(4, device="cuda", requires_grad=True)
    loss = checkpoint(lambda x: (x.cpu() if recoup.is_replaying() else x).sin().exp().sum(), x * 1)
    with pytest.raises(
        recoup.errors.ReplayMismatchError, match=r"on cuda:0 in the forward and is .* on cpu in the replay"
    ):
        loss.backward()


def test_values_check() -> None:
    x = torch.randn(4, device="cuda", requires_grad=True)
    options = Checkpoint(check="values")
    options(lambda x: F.dropout(x, 0.5).exp(), x * 1).sum().backward()
    loss = options(lambda x: (x + float(recoup.is_replaying())).exp(), x * 1).sum()
    with pytest.raises(recoup.errors.ReplayMismatchError, match="has other values"):
        loss.backward()


def test_cpu_and_device_in_one_function() -> None:
    """Two autograd threads ask the same frame for its values."""
    x = torch.randn(1000, requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        for _ in range(5):
            x = x.cuda().sin().exp().cpu().cos().tanh()
        return x

    (expected,) = torch.autograd.grad(fn(x).sum(), x)
    for _ in range(20):
        (actual,) = torch.autograd.grad(checkpoint(fn, x).sum(), x)
        assert torch.equal(actual, expected)


@pytest.mark.filterwarnings("ignore")
def test_compiled_without_a_graph_break() -> None:
    layer = nn.Linear(64, 64).cuda()
    x = torch.randn(8, 64, device="cuda", requires_grad=True)

    def fn(x: Tensor) -> Any:
        return checkpoint(lambda x: layer(x).tanh().exp(), x).sum()

    expected = torch.autograd.grad(fn(x), [x, *layer.parameters()])
    actual = torch.autograd.grad(torch.compile(fn, fullgraph=True)(x), [x, *layer.parameters()])
    for left, right in zip(expected, actual, strict=True):
        torch.testing.assert_close(left, right)
