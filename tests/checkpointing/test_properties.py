"""Random nested functions: checkpointed and plain must agree bit for bit, whatever is nested in what."""

from __future__ import annotations

from typing import Any

import models
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from recoup import Checkpoint

WIDTH = 4

LEAVES = st.sampled_from(
    ["sin", "exp", "linear", "dropout", "norm", "inplace", "split", "dict", "frozen", "view"]
)
PROGRAMS = st.recursive(
    LEAVES,
    lambda children: st.tuples(
        st.sampled_from(["checkpoint", "sequence", "residual", "pair"]),
        st.lists(children, min_size=1, max_size=3),
    ),
    max_leaves=10,
)
OPTIONS = st.builds(
    Checkpoint,
    early_stop=st.booleans(),
    check=st.sampled_from(["metadata", "values", "none"]),
    preserve_rng=st.just(True),
)


class Machine(nn.Module):
    """Runs a program, with ``call`` around everything that it says to checkpoint."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("frozen", torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("count", torch.zeros(()))

    def run(self, program: Any, x: Tensor) -> Tensor:
        match program:
            case ("checkpoint", parts):
                return self.call(self.run, ("sequence", parts), x)
            case ("sequence", parts):
                for part in parts:
                    x = self.run(part, x)
                return x
            case ("residual", parts):
                return x + self.run(("sequence", parts), x.tanh())
            case ("pair", parts):
                outputs = self.call(lambda x: [self.run(part, x) for part in parts], x)
                return outputs[0] + outputs[-1].tanh()
            case "sin":
                return x.sin()
            case "exp":
                return (x * 0.3).exp()
            case "linear":
                return F.gelu(self.linear(x))
            case "dropout":
                return F.dropout(x, 0.3) + torch.rand(WIDTH)
            case "norm":
                self.count += 1
                return self.norm(x) * float(self.count)
            case "inplace":
                return (x * 1).mul_(0.7).add_(0.1).relu_()
            case "split":
                left, right = x.chunk(2, dim=-1)
                return torch.cat([right.cos(), left * right], dim=-1)
            case "dict":
                return self.call(lambda table: table["a"][0].sigmoid() * table["b"], {"a": [x], "b": x})
            case "frozen":
                return (x * self.frozen).cos()
            case "view":
                return x.t().reshape(x.shape).square()
            case _:
                raise AssertionError(program)


def gradients(call: Any, program: Any, retain: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    machine = Machine(call)
    x = torch.randn(3, WIDTH, requires_grad=True)
    loss = machine.run(("checkpoint", [program, "sin"]), x * 1).square().sum()
    inputs = [x, *machine.parameters()]
    for last in [False, True] if retain else [True]:
        grads = torch.autograd.grad(loss, inputs, allow_unused=True, retain_graph=not last)
    seen = {f"gradient {index}": grad for index, grad in enumerate(grads) if grad is not None}
    return {**seen, **machine.state_dict(), "loss": loss.detach(), "rng": torch.get_rng_state()}


@settings(max_examples=150, deadline=None)
@given(program=PROGRAMS, options=OPTIONS, retain=st.booleans())
def test_checkpointed_equals_plain(program: Any, options: Checkpoint, retain: bool) -> None:
    expected = gradients(models.plainly, program, retain=False)
    found = gradients(options, program, retain)
    # A row of exponentials may overflow: what is no number plainly is none when checkpointed.
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=40, deadline=None)
@given(program=PROGRAMS)
def test_second_order_equals_plain(program: Any) -> None:
    def penalty(call: Any) -> Tensor:
        torch.manual_seed(0)
        machine = Machine(call).double().eval()
        x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
        y = machine.run(("checkpoint", [program]), x * 1).square().sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), x, allow_unused=True, materialize_grads=True)
        return second

    torch.testing.assert_close(penalty(Checkpoint()), penalty(models.plainly), rtol=0, atol=0, equal_nan=True)
