"""Captured units on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import recoup
from recoup.capture.options import cuts_of
from recoup.capture.run import capture, run_cut
from recoup.capture.seconds import OperationSeconds
from recoup.devices.meter import make_meter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]


class Layer(nn.Module):
    """Attention and a feed-forward, both with dropout; without biases, norms and smooth activations."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.p = p
        self.qkv, self.out = (nn.Linear(width, n * width, bias=False) for n in (3, 1))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + F.dropout(self.down(F.dropout(F.relu(self.up(x)), self.p)), self.p)


class Homogeneous(Layer):
    """The feed-forward alone: its output grows as its input does, whatever is dropped."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.dropout(F.relu(self.up(x)), self.p)), self.p)


def gradients(layer: nn.Module, x: Tensor, run: object) -> list[Tensor]:
    torch.manual_seed(3)
    x.grad = None
    layer.zero_grad()
    output: Tensor = run(x)  # type: ignore[operator]
    output.square().sum().backward()
    return [output.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]  # type: ignore[union-attr, list-item]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_is_bit_equal_to_eager_at_every_cut(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = Layer(64, 0.1).to("cuda", dtype)
    x = torch.randn(4, 128, 64, device="cuda", dtype=dtype, requires_grad=True)
    expected = gradients(layer, x, layer)
    graph = capture("captured", layer.forward, (x,), {})
    cuts = cuts_of(graph, "captured", OperationSeconds(make_meter(x.device)))
    assert len(cuts) > 2
    for cut in cuts:
        found = gradients(layer, x, lambda x, cut=cut: run_cut(cut, layer.forward, (x,), {}))
        for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(mine, theirs), (cut.name, number)


def test_compiled_draws_once_at_every_cut() -> None:
    """Of a function that grows as its input does, the output is the input times the gradient: for the same draws."""
    torch.manual_seed(0)
    layer = Homogeneous(64, 0.3).to("cuda")
    x = torch.randn(64, 128, 64, device="cuda", requires_grad=True)
    graph = capture("compiled", layer.forward, (x,), {})
    cuts = cuts_of(graph, "compiled", OperationSeconds(make_meter(x.device)))
    assert len(cuts) > 2
    weight = torch.randn(64, 128, 64, device="cuda")
    for cut in cuts:
        x.grad = None
        output = run_cut(cut, layer.forward, (x,), {})
        (output * weight).sum().backward()
        assert x.grad is not None
        total, size = (output * weight).sum(), (output * weight).norm() * output.numel() ** 0.5
        assert abs(total - (x * x.grad).sum()) < 1e-5 * size, cut.name


def test_compiled_draws_in_the_same_order_at_every_cut() -> None:
    torch.manual_seed(0)
    layer = Layer(64, 0.1).to("cuda")
    x = torch.randn(4, 128, 64, device="cuda", requires_grad=True)
    graph = capture("compiled", layer.forward, (x,), {})
    cuts = cuts_of(graph, "compiled", OperationSeconds(make_meter(x.device)))
    expected = gradients(layer, x, lambda x: run_cut(cuts[0], layer.forward, (x,), {}))
    for cut in cuts[1:]:
        found = gradients(layer, x, lambda x, cut=cut: run_cut(cut, layer.forward, (x,), {}))
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize("engine", ["captured", "compiled"])
@pytest.mark.parametrize("share", [0.2, 0.6])
def test_peaks_are_as_predicted(engine: str, share: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(256, 0.0) for _ in range(6))).to("cuda")
    x = torch.randn(8, 256, 256, device="cuda")
    units = [f"{number}" for number in range(6)]
    profile = recoup.measure(model, x, loss=lambda y: y.square().mean(), engine=engine, units=units)
    least = recoup.minimum_budget(profile)
    budget = int(least + share * (profile.plain_bytes - least))
    fitted = recoup.fit(model, x, loss=lambda y: y.square().mean(), engine=engine, units=units, budget=budget)
    assert fitted.verification is not None
    assert fitted.verification.peak_bytes <= budget
    assert fitted.verification.peak_bytes == pytest.approx(fitted.plan.predicted_bytes, rel=0.01)
    assert any(unit.recipes[0].cut is not None for unit in fitted.profile.units)
