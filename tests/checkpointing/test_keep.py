"""`recoup.keep`: a replay gives the values that the forward had, bit for bit."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup import Checkpoint, checkpoint, keep
from recoup.checkpointing import Group, Span
from recoup.checkpointing.frame import Frame
from recoup.errors import ReplayMismatchError

OPTIONS = Checkpoint(check="values")


def drawn() -> Tensor:
    """Other numbers in each run."""
    return torch.tensor([random.random() for _ in range(4)])


def noisy(x: Tensor) -> Tensor:
    return (x * keep(drawn())).sin().exp()


def gradient(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    random.seed(0)
    return torch.autograd.grad(fn(x).sum(), x)[0]


def make() -> Tensor:
    return torch.randn(3, 4, requires_grad=True)


def test_values_that_drift() -> None:
    x = make()
    plain = gradient(noisy, x)
    assert torch.equal(gradient(lambda x: OPTIONS(noisy, x), x), plain)
    with pytest.raises(ReplayMismatchError, match="has other values"):
        gradient(lambda x: OPTIONS(lambda x: (x * drawn()).sin().exp(), x), x)


def test_gradients_flow_to_what_the_replay_computes() -> None:
    def fn(x: Tensor, weight: Tensor) -> Tensor:
        hidden = keep((x @ weight).tanh() if not recoup.is_replaying() else (x @ weight).tanh() + 1)
        return hidden.pow(3)

    x, weight = make(), torch.randn(4, 5, requires_grad=True)
    plain = torch.autograd.grad(fn(x, weight).sum(), [x, weight])
    kept = torch.autograd.grad(Checkpoint(check="metadata")(fn, x, weight).sum(), [x, weight])
    assert all(map(torch.equal, plain, kept))


def test_second_derivatives() -> None:
    def fn(x: Tensor) -> Tensor:
        return keep(x.sin()).pow(3)

    x = make()

    def twice(run: Callable[[Tensor], Tensor]) -> Tensor:
        (first,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0]

    assert torch.equal(twice(lambda x: checkpoint(fn, x)), twice(fn))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.complex64])
def test_any_dtype(dtype: torch.dtype) -> None:
    def fn(x: Tensor) -> Tensor:
        return x * keep((drawn() * 9).to(dtype)).to(torch.complex64).real

    x = make()
    assert torch.equal(gradient(lambda x: OPTIONS(fn, x), x), gradient(fn, x))


def test_it_is_a_copy_everywhere() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        kept = keep(y)
        kept += 1
        return (kept * y).exp()

    x = make()
    plain = gradient(fn, x)
    random.seed(0)
    loss = OPTIONS(fn, x).sum()
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(loss, x, retain_graph=True)[0], plain)
    with torch.no_grad():
        value = x.detach()
        assert torch.equal(keep(value), value)
        assert keep(value) is not value


def test_in_transforms_it_is_a_copy() -> None:
    x = make()
    assert torch.equal(torch.func.vmap(lambda row: keep(row) * 2)(x), x * 2)
    assert torch.equal(torch.func.grad(lambda x: keep(x).pow(2).sum())(x), 2 * x)


def test_inside_each_other() -> None:
    def outer(x: Tensor) -> Tensor:
        return checkpoint(noisy, checkpoint(noisy, x) * keep(drawn()))

    x = make()
    assert torch.equal(gradient(lambda x: checkpoint(outer, x), x), gradient(outer, x))


def test_a_backward_inside() -> None:
    def scaled(x: Tensor) -> Tensor:
        return (x * keep(torch.full((4,), 5.0 if recoup.is_replaying() else 2.0))).sin()

    def fn(x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (inner,) = torch.autograd.grad(checkpoint(scaled, scaled(y)).sum(), y)
        return scaled(x * inner).exp()

    x = make()
    assert torch.equal(gradient(lambda x: checkpoint(fn, x), x), gradient(fn, x))


@pytest.mark.parametrize("groups", [(), (Group(0, 1), Group(2, 3)), (Group(1, 3, (Group(2, 3),)),)])
def test_spans(groups: tuple[Group, ...]) -> None:
    def run(x: Tensor) -> Tensor:
        span = Span(OPTIONS, groups)
        for _ in range(4):
            x = span.call(noisy, (x,), {}) / 9
        return x

    def plain(x: Tensor) -> Tensor:
        for _ in range(4):
            x = noisy(x) / 9
        return x

    x = make()
    assert torch.equal(gradient(run, x), gradient(plain, x))


def test_it_is_kept_exactly_where_others_save_in_fewer_bits() -> None:
    """The arguments of a call go through hooks around it; what is kept does not."""
    seen: list[Tensor] = []

    def fn(x: Tensor) -> Tensor:
        seen.append(keep(drawn()))
        return x * seen[-1]

    x = make()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
        loss = checkpoint(fn, x).sum()
    loss.backward()
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[0].half().float())


def test_a_function_with_nothing_else_is_not_watched() -> None:
    """Only decisions need a mode."""
    from recoup.torch_private import num_dispatch_modes

    seen: list[int] = []

    def fn(x: Tensor) -> Tensor:
        seen.append(num_dispatch_modes())
        return x * keep(drawn())

    for _ in range(10):
        checkpoint(fn, make()).sum().backward()
    assert seen == [1, 0] * 8 + [0, 0] * 2  # the first eight calls are looked at


def test_a_replay_that_keeps_otherwise() -> None:
    def fn(x: Tensor) -> Tensor:
        return (x * keep(drawn()[:1] if recoup.is_replaying() else drawn())).exp()

    with pytest.raises(ReplayMismatchError, match=r"Decision 1 is keep of \[1\].*was keep of \[4\]"):
        gradient(lambda x: checkpoint(fn, x), make())


def test_other_than_tensors() -> None:
    with pytest.raises(TypeError, match=r"keep takes a tensor: keep\(x\). Got a float"):
        keep(1.0)  # type: ignore[arg-type]


def test_in_a_compiled_function() -> None:
    model = nn.Linear(4, 4)
    x = make()
    plain = torch.autograd.grad(keep(model(x).sin()).pow(2).sum(), x)[0]
    compiled = torch.compile(lambda x: keep(model(x).sin()).pow(2), backend="aot_eager", fullgraph=True)
    assert torch.equal(torch.autograd.grad(compiled(x).sum(), x)[0], plain)


def test_frames_do_not_outlive_their_graphs_where_graphs_keep() -> None:
    """From the ninth call on, only operations are watched that have kept something: that of graphs among them."""

    def fn(x: Tensor) -> Tensor:
        y = x * 2
        kept = torch.ops.recoup.keep(y.sin()) * y
        (slope,) = torch.autograd.grad(kept.square().sum(), y, create_graph=True)
        return slope.sum()

    def num_frames() -> int:
        gc.collect()
        return sum(type(one) is Frame for one in gc.get_objects())

    x, before = make(), num_frames()
    plain = torch.autograd.grad(fn(x), x)[0]
    for _ in range(14):
        checkpoint(fn, x)
        assert num_frames() == before
        assert torch.equal(torch.autograd.grad(checkpoint(fn, x), x)[0], plain)
