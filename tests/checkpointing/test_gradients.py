from __future__ import annotations

from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass
from functools import partial
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import recoup
from recoup import Checkpoint, checkpoint

CALLS = [checkpoint, Checkpoint(early_stop=False), Checkpoint(check="values"), Checkpoint(check="none")]


@pytest.mark.parametrize("call", CALLS, ids=["default", "no early stop", "values", "no check"])
@pytest.mark.parametrize("kind", models.ALL, ids=lambda kind: kind.__name__)
def test_training_is_bit_equal(kind: type[nn.Module], call: Any) -> None:
    plain, other = models.make_pair(kind, call)
    sample = kind.sample()
    models.assert_same(models.train(plain, sample), models.train(other, sample))


@pytest.mark.parametrize("kind", models.ALL, ids=lambda kind: kind.__name__)
def test_nested_training_is_bit_equal(kind: type[nn.Module]) -> None:
    def twice(fn: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(checkpoint, fn), *args, **kwargs)

    plain, other = models.make_pair(kind, twice)
    sample = kind.sample()
    models.assert_same(models.train(plain, sample), models.train(other, sample))


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_whole_model_around_checkpointed_blocks(depth: int) -> None:
    plain, other = models.make_pair(models.GPT, checkpoint)

    def wrapped(*args: Tensor) -> Tensor:
        fn: Any = other
        for _ in range(depth):
            fn = partial(checkpoint, fn)
        return fn(*args)

    tokens = models.GPT.sample()
    torch.manual_seed(5)
    plain(*tokens).backward()
    torch.manual_seed(5)
    wrapped(*tokens).backward()
    for (name, left), right in zip(plain.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad), name


Pair = namedtuple("Pair", "left right")


@dataclass
class State:
    hidden: Tensor
    history: list[Tensor]
    label: str


@dataclass(frozen=True)
class Frozen:
    value: Tensor


class Tagged(OrderedDict):
    pass


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def check_gradients(fn: Any, inputs: list[Tensor], call: Any = checkpoint) -> None:
    """``fn(call, *inputs)`` gives a scalar; both ways must give the same gradients."""
    expected = torch.autograd.grad(fn(models.plainly, *inputs), inputs, allow_unused=True)
    actual = torch.autograd.grad(fn(call, *inputs), inputs, allow_unused=True)
    for index, (left, right) in enumerate(zip(expected, actual, strict=True)):
        assert (left is None) == (right is None), index
        assert left is None or torch.equal(left, right), index


def test_tensors_anywhere_in_the_arguments() -> None:
    def inner(
        a: Tensor, pair: Pair, *, state: State, table: dict[str, Any], frozen: Frozen, tagged: Tagged
    ) -> Tensor:
        assert isinstance(pair, Pair)
        assert state.label == "s"
        assert type(tagged) is Tagged
        y = (a.sin() * pair.left.cos()).exp() + pair.right[0].tanh() * state.hidden.sigmoid()
        return (
            y * state.history[1].exp() + table["deep"]["er"][0].sin() * frozen.value * tagged["x"].cos()
        ).sin()

    def outer(
        call: Any, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor, g: Tensor, h: Tensor
    ) -> Tensor:
        state = State(hidden=d, history=[a, e], label="s")
        return call(
            inner,
            a * 2,
            Pair(b, [c]),
            state=state,
            table={"deep": {"er": (f, 1)}},
            frozen=Frozen(g),
            tagged=Tagged(x=h),
        ).sum()

    check_gradients(outer, leaves(*[(3,)] * 8))
    check_gradients(lambda call, *xs: checkpoint(partial(outer, call), *xs), leaves(*[(3,)] * 8))


def test_packed_sequences_as_arguments() -> None:
    rnn = nn.RNN(2, 3)

    def outer(call: Any, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x * 2, torch.tensor([4, 2]))
        return call(lambda p: rnn(p)[1].sin(), packed).sum()

    check_gradients(outer, leaves((4, 2, 2)))


def test_any_nested_output() -> None:
    def inner(x: Tensor) -> Any:
        return {"a": [x.sin(), (x.cos(), None, 3)], "b": State(x.exp(), [x.tanh()], "t")}

    def outer(call: Any, x: Tensor) -> Tensor:
        out = call(inner, x)
        assert out["a"][1][2] == 3
        return (out["a"][0] * out["a"][1][0] * out["b"].hidden * out["b"].history[0]).sum()

    check_gradients(outer, leaves((5,)))


def test_arguments_that_need_no_gradient_get_none() -> None:
    x, w = torch.randn(4, requires_grad=True), torch.randn(4)
    checkpoint(lambda x, w: (x * w).sin(), x, w).sum().backward()
    assert w.grad is None
    assert torch.equal(x.grad, w * (x * w).cos())


def test_functions_that_only_close_over_parameters() -> None:
    weight = nn.Parameter(torch.randn(3, 3))
    data = torch.randn(2, 3)

    def outer(call: Any, weight: Tensor) -> Tensor:
        return call(lambda: (data @ weight).relu().square()).sum()

    check_gradients(outer, [weight])


def test_parameters_only_and_data_without_gradient() -> None:
    layer = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    data = torch.randn(5, 3)
    check_gradients(lambda call, *_: call(layer, data).square().sum(), list(layer.parameters()))


def test_one_output_used_of_several() -> None:
    def inner(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.sin() * y, (x * y).exp(), y.tanh().cos()

    for used in range(3):
        check_gradients(lambda call, x, y: call(inner, x, y)[used].sum(), leaves((3,), (3,)))


def test_gradient_of_any_subset_of_inputs_and_parameters() -> None:
    layer = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, y = leaves((5, 3), (5, 2))
    everything = [x, y, *layer.parameters()]

    def run(call: Any) -> Tensor:
        return call(lambda x, y: (layer(x) * y).sin(), x, y).sum()

    for wanted in ([0], [1], [2], [5], [0, 3], [4, 1], list(range(6))):
        inputs = [everything[index] for index in wanted]
        expected = torch.autograd.grad(run(models.plainly), inputs)
        for left, right in zip(expected, torch.autograd.grad(run(checkpoint), inputs), strict=True):
            assert torch.equal(left, right), wanted


def test_retain_graph_replays_for_each_backward() -> None:
    calls = []

    def fn(x: Tensor) -> Tensor:
        calls.append(recoup.is_replaying())
        return x.sin().exp().cos()

    x = torch.randn(3, requires_grad=True)
    loss = checkpoint(fn, x).sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    second = torch.autograd.grad(loss, x)[0]
    assert torch.equal(first, second)
    assert calls == [False, True, True]
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_second_order() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return (x.sin() * y.exp()).tanh()

    x, y = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(partial(checkpoint, fn), (x, y))
    assert torch.autograd.gradgradcheck(partial(checkpoint, fn), (x, y))
    assert torch.autograd.gradgradcheck(partial(checkpoint, partial(checkpoint, fn)), (x, y))


def test_create_graph_matches_plain_bit_for_bit() -> None:
    layer = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(5, 3, requires_grad=True)

    def penalty(call: Any) -> tuple[Tensor, ...]:
        (grad,) = torch.autograd.grad(call(layer, x).sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [x, *layer.parameters()], allow_unused=True)

    for left, right in zip(penalty(models.plainly), penalty(checkpoint), strict=True):
        assert (left is None and right is None) or torch.equal(left, right)


def test_backward_inside_the_function() -> None:
    """Forces from an energy: the function itself calls autograd."""

    def forces(x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.requires_grad_() if x.is_leaf else x
            energy = (x.sin() * x.square()).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force.tanh()

    check_gradients(lambda call, x: call(forces, x * 1).sum(), leaves((4,)))
    check_gradients(lambda call, x: call(forces, x * 1).sum(), leaves((4,)), Checkpoint(early_stop=False))
    check_gradients(lambda call, x: checkpoint(lambda y: call(forces, y * 1), x * 2).sum(), leaves((4,)))


def test_chained_checkpoints() -> None:
    def outer(call: Any, x: Tensor) -> Tensor:
        for scale in (0.5, 1.5, 2.5):
            x = call(lambda x, scale=scale: (x * scale).sin(), x)
        return x.sum()

    check_gradients(outer, leaves((4,)))


@pytest.mark.parametrize("depth", [2, 3, 6, 30])
def test_nesting_to_any_depth(depth: int) -> None:
    def layer(x: Tensor, level: int, call: Any) -> Tensor:
        x = (x * 0.9).sin()
        if level:
            x = call(layer, x, level - 1, call)
        return x.cos() * x

    check_gradients(lambda call, x: call(layer, x, depth, call).sum(), leaves((3,)))


def test_in_place_operations_inside() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.clone()
        y.mul_(2).sin_()
        y[0].exp_()
        return torch.relu_(y + 0.1) * y

    check_gradients(lambda call, x: call(fn, x).sum(), leaves((4, 2)))


def test_views_and_aliases_as_outputs() -> None:
    check_gradients(lambda call, x: call(lambda x: x, x * 2).sin().sum(), leaves((4, 2)))
    check_gradients(lambda call, x: call(lambda x: x[:2].t(), x * 2).sin().sum(), leaves((4, 2)))
    check_gradients(lambda call, x: call(lambda x: (x.sin(), x), x * 2)[1].exp().sum(), leaves((4, 2)))


def test_non_float_and_complex_tensors() -> None:
    index = torch.tensor([2, 0, 1])
    check_gradients(lambda call, x: call(lambda x, i: x[i].sin(), x, index).sum(), leaves((3, 2)))
    z = torch.randn(3, dtype=torch.complex64, requires_grad=True)
    check_gradients(
        lambda call, z: call(lambda z: (z.exp() * z.conj()).abs(), z).sum(), [z], Checkpoint(check="values")
    )


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, _ = ctx.saved_tensors
        _, y = ctx.saved_tensors
        x, _ = ctx.saved_tensors
        return grad * y, grad * x


def test_saved_tensors_read_twice() -> None:
    calls = []

    def fn(x: Tensor, y: Tensor) -> Tensor:
        calls.append(recoup.is_replaying())
        x, y = x.sin(), y.exp()
        for _ in range(3):
            x = ReadsTwice.apply(x, y)
        return x.cos()

    check_gradients(lambda call, x, y: call(fn, x, y).sum(), leaves((3,), (3,)))
    # Plain, forward, replay, and one more replay whose values stay: not one per reading.
    assert calls == [False, False, True, True]


def test_decorator_method_and_direct_call() -> None:
    options = Checkpoint()

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        @options
        def forward(self, x: Tensor) -> Tensor:
            """Doc."""
            return (x * self.weight).sin()

    layer = Layer()
    assert Layer.forward.__doc__ == "Doc."
    x = torch.randn(3, requires_grad=True)
    layer(x).sum().backward()
    assert torch.equal(x.grad, layer.weight * (x * layer.weight).cos())
    assert torch.equal(options(layer, x), options(layer)(x))


def test_no_grad_is_a_plain_call() -> None:
    calls = []
    x = torch.randn(3, requires_grad=True)
    with torch.no_grad():
        y = checkpoint(lambda x: calls.append(1) or x.sin(), x)
    assert not y.requires_grad
    with torch.inference_mode():
        checkpoint(torch.sin, x)
    assert calls == [1]


def test_inference_tensors_as_arguments() -> None:
    with torch.inference_mode():
        frozen = torch.randn(3)
    x = torch.randn(3, requires_grad=True)
    checkpoint(lambda x, f: (x + f).sin(), x, frozen).sum().backward()
    assert torch.equal(x.grad, (x + frozen).cos())


def test_the_callers_containers_may_change_afterwards() -> None:
    a, b = leaves((3,), (3,))
    batch = {"items": [a], "other": b}
    loss = checkpoint(lambda batch: (batch["items"][0].sin() * batch["other"]).exp(), batch).sum()
    batch["items"][0] = torch.zeros(3)
    batch["items"].append(b)
    del batch["other"]
    loss.backward()
    x = a.detach().requires_grad_()
    (x.sin() * b.detach()).exp().sum().backward()
    assert torch.equal(a.grad, x.grad)


def test_a_container_that_the_function_changes() -> None:
    def fn(cache: dict[str, Tensor], x: Tensor) -> Tensor:
        cache["y"] = cache["x"].sin() * x
        cache["x"] = cache["y"].exp()
        return cache["x"]

    a, x = leaves((3,), (3,))
    check_gradients(lambda call, a, x: call(fn, {"x": a}, x).sum(), [a, x])


def test_reading_saved_tensors_outside_of_a_backward() -> None:
    x = torch.randn(3, requires_grad=True)
    y = checkpoint(lambda x: x.sin().exp(), x)
    assert torch.equal(y.grad_fn._saved_result, y)
    y.sum().backward()
    assert torch.equal(x.grad, x.sin().exp() * x.cos())


class Scaled(tuple):
    scale: float


class Picky(dict):
    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("read only")


def test_containers_of_every_kind() -> None:
    check_gradients(
        lambda call, x: call(lambda top: top.values.sin().exp(), torch.topk(x, 2)).sum(), leaves((5,))
    )

    def scaled(call: Any, x: Tensor) -> Tensor:
        pair = Scaled((x * 1, x * 2))
        pair.scale = 3.0
        return call(lambda pair: (pair[0] * pair[1] * pair.scale).sin().exp(), pair).sum()

    check_gradients(scaled, leaves((5,)))
    check_gradients(
        lambda call, x: call(lambda q: (q[0] * q[-1]).sin(), deque([x, x * 2], maxlen=2)).sum(), leaves((5,))
    )
    check_gradients(lambda call, x: call(lambda d: d["a"].sin().exp(), Picky(a=x)).sum(), leaves((5,)))


def test_outputs_that_are_hard_to_look_into() -> None:
    weight = torch.randn(3, requires_grad=True)
    (out,) = checkpoint(lambda: deque([weight.sin()]))
    assert out.requires_grad

    class Loop:
        def __init__(self) -> None:
            self.me, self.y = self, weight.sin()

    assert checkpoint(Loop).y.requires_grad


def test_under_fake_tensors_and_transforms() -> None:
    with FakeTensorMode():
        x = torch.randn(4, 3, requires_grad=True)
        checkpoint(nn.Linear(3, 3), x * 1).sum().backward()
        assert x.grad.shape == (4, 3)
    _, tangent = torch.func.jvp(lambda x: checkpoint(torch.sin, x), (torch.ones(3),), (torch.ones(3),))
    assert torch.equal(tangent, torch.ones(3).cos())
