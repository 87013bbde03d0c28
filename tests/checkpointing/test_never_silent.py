"""What would give wrong gradients is an error that names it and says what to do."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup import Checkpoint, checkpoint
from recoup.errors import (
    CheckpointError,
    InputChangedError,
    NothingToCheckpointError,
    RecoupError,
    ReplayMismatchError,
)


def fn(x: Tensor, *more: Any, scale: Tensor | None = None, table: Any = None) -> Tensor:
    return (x.sin() * 2).exp()


@dataclass
class Batch:
    mask: Tensor
    parts: list[Tensor]


def make() -> Tensor:
    return torch.randn(4, requires_grad=True) * 1


def changed(x: Tensor) -> None:
    with torch.no_grad():
        x.add_(1)


BATCH = Batch(torch.ones(2), [torch.ones(2), torch.ones(3)])


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "victim"),
    [
        ("argument 'x' ", lambda t: (t,), lambda t: {}, lambda t: t),
        ("argument argument 1 ", lambda t: (make(), t), lambda t: {}, lambda t: t),
        ("argument 'scale' ", lambda t: (make(),), lambda t: {"scale": t}, lambda t: t),
        (
            r"argument 'table'\['a'\]\[1\] ",
            lambda t: (make(),),
            lambda t: {"table": {"a": [1, t]}},
            lambda t: t,
        ),
        (
            r"argument 'table'\.parts\[1\] ",
            lambda t: (make(),),
            lambda t: {"table": BATCH},
            lambda t: BATCH.parts[1],
        ),
        ("argument 'x' ", lambda t: (t,), lambda t: {}, lambda t: t[1:]),  # through a view
    ],
)
def test_an_argument_changed_by_the_caller(name: str, args: Any, kwargs: Any, victim: Any) -> None:
    tensor = make()
    loss = checkpoint(fn, *args(tensor), **kwargs(tensor)).sum()
    changed(victim(tensor))
    with pytest.raises(
        InputChangedError, match=rf"fn \(test_never_silent.py:\d+\): {name}was changed in place between"
    ):
        loss.backward()


def test_an_argument_changed_by_the_function_itself() -> None:
    def in_place(x: Tensor, y: Tensor) -> Tensor:
        y.add_(1)
        return (x * y).sin()

    for call in (checkpoint, lambda f, *args: checkpoint(lambda *a: checkpoint(f, *a), *args)):
        loss = call(in_place, make(), torch.ones(4)).sum()
        with pytest.raises(
            InputChangedError, match=r"'y' was changed in place by the function itself.*x.clone\(\)"
        ):
            loss.backward()


def test_changing_an_argument_without_a_backward_is_fine() -> None:
    x = torch.ones(3)
    checkpoint(lambda x, w: w * x.add_(1), x, make()[:3])
    assert x.tolist() == [2, 2, 2]


@pytest.mark.parametrize("which", ["weight", "bias"])
def test_a_parameter_stepped_in_between(which: str) -> None:
    """The bias is saved by no operation, yet a replay would use its new value."""
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    optimizer = torch.optim.SGD([getattr(layer[0], which)], lr=0.1)
    x = torch.randn(2, 4)
    layer(x).sum().backward()
    loss = checkpoint(layer, x).sum()
    optimizer.step()
    with pytest.raises(
        InputChangedError,
        match=rf"parameter '0.{which}' of Sequential was changed in place between.*optimizer",
    ):
        loss.backward()


def test_a_parameter_in_a_closure_stepped_in_between() -> None:
    weight = nn.Parameter(torch.randn(4))
    loss = checkpoint(lambda x: (x * weight).sin(), make()).sum()
    changed(weight)
    with pytest.raises(InputChangedError, match="the captured tensor 'weight'"):
        loss.backward()


def test_a_parameter_of_which_only_a_view_is_saved() -> None:
    """No replay is needed for it, and the error still names the parameter."""
    layer = nn.Linear(4, 4)
    loss = checkpoint(lambda x: x + layer.weight.t().sin(), make()).sum()
    changed(layer.weight)
    with pytest.raises(
        InputChangedError, match=r"parameter 'layer.weight' of Linear was changed in place between"
    ):
        loss.backward()


class Scaled(nn.Module):
    """Calls what it is given, of which nothing is registered."""

    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.scale = scale
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.layer(x)).sin()


@dataclass
class Scaler:
    factor: Tensor

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.factor


class ScalerModule(nn.Module):
    def __init__(self, factor: Tensor) -> None:
        super().__init__()
        self.factor = nn.Parameter(factor, requires_grad=False)

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.factor


def scaled_by(x: Tensor, *, factor: Tensor) -> Tensor:
    return x * factor


def going_round(factor: Tensor) -> Any:
    made = partial(lambda x, factor, itself: x * factor, factor=factor)
    made.keywords["itself"] = made
    return made


CALLABLES: dict[str, Callable[[Tensor], Any]] = {
    "partial": lambda factor: partial(torch.mul, factor),
    "partial, keyword": lambda factor: partial(scaled_by, factor=factor),
    "partial of a method": lambda factor: partial(Scaler(factor).scaled),
    "partial of itself": going_round,
    "partial in a list": lambda factor: partial(lambda fns, x: fns[0](x), [partial(torch.mul, factor)]),
    "method of an object": lambda factor: Scaler(factor).scaled,
    "method of a module": lambda factor: ScalerModule(factor).scaled,
    "method of a tensor": lambda factor: factor.mul,
    "operator of a tensor": lambda factor: factor.__mul__,
    "method of a list": lambda factor: partial(lambda copied, x: copied()[0] * x, [factor].copy),
    "lambda": lambda factor: lambda x: x * factor,
}


@pytest.mark.parametrize("num_calls_before", [0, 9])
@pytest.mark.parametrize("bound", CALLABLES)
def test_a_tensor_behind_a_callable_attribute(bound: str, num_calls_before: int) -> None:
    factor = torch.full((4,), 2.0)
    model = nn.Sequential(Scaled(CALLABLES[bound](factor)))
    for _ in range(num_calls_before):
        Checkpoint(check="metadata")(model, make()).sum().backward()
    loss = Checkpoint(check="metadata")(model, make()).sum()
    changed(factor)
    with pytest.raises(InputChangedError, match="was changed in place between forward and backward"):
        loss.backward()


def test_a_callable_attribute_that_came_to_lead_to_a_tensor() -> None:
    """Another one of the same type, and what it is bound to, lead nowhere on the first call."""
    factor = torch.full((4,), 2.0)
    model = nn.Sequential(Scaled(partial(torch.mul, 2.0)))
    for scale in (model[0].scale, partial(torch.mul, factor)):
        model[0].scale = scale
        loss = Checkpoint(check="metadata")(model, make()).sum()
    changed(factor)
    with pytest.raises(InputChangedError, match="captured tensor 'scale argument 0' was changed in place"):
        loss.backward()


def test_a_leaf_that_only_the_graph_knows() -> None:
    weight = nn.Parameter(torch.randn(4))
    hidden = {index: None if index else weight for index in range(2000)}  # too many to be looked into
    loss = checkpoint(lambda x: x + hidden[0].sin(), make()).sum()
    changed(weight)
    with pytest.raises(InputChangedError, match="a captured tensor was changed"):
        loss.backward()


def test_a_saved_tensor_changed_in_place_inside() -> None:
    """The plain function fails; so must ours, although the replay could hand out the changed value."""

    def fn(x: Tensor) -> Tensor:
        y = x.exp()
        z = y.sin()
        y.add_(1)
        return z.cos() + y.square().sum()

    x = make()
    with pytest.raises(RuntimeError, match="inplace"):
        fn(x).sum().backward()
    loss = checkpoint(fn, x).sum()
    with pytest.raises(
        InputChangedError, match=r"saved tensor \d of \d .*changed in place after it was saved"
    ):
        loss.backward()


class Unsteady(nn.Module):
    """Saves something else every time it runs."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change
        self.layer = nn.Sequential(nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x.sin(), recoup.is_replaying()).cos()


CHANGES = {
    "shape": (
        lambda x, again: (x[:2] if again else x).exp(),
        r"float32\[4\] on cpu in the forward and is float32\[2\] on cpu",
    ),
    "dtype": (
        lambda x, again: (x.double() if again else x).exp(),
        r"float32\[4\] on cpu in the forward and is float64\[4\] on cpu",
    ),
    "device": (
        lambda x, again: (x.to("meta") if again else x).exp(),
        r"float32\[4\] on cpu in the forward and is float32\[4\] on meta",
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_other_metadata(kind: str) -> None:
    change, expected = CHANGES[kind]
    loss = checkpoint(nn.Sequential(nn.Tanh(), Unsteady(change)), make()).sum()
    with pytest.raises(ReplayMismatchError, match=r"Saved tensor \d of \d was " + expected) as caught:
        loss.backward()
    message = str(caught.value)
    assert "module Sequential" in message
    assert "Unsteady '1' of Sequential" in message
    assert "test_never_silent.py:" in message
    assert "Likely causes" in message
    assert "What to do" in message


def test_fewer_tensors() -> None:
    def shrinking(x: Tensor) -> Tensor:
        x = x.sin()
        return x if recoup.is_replaying() else x.exp().cos()

    loss = checkpoint(shrinking, make()).sum()
    with pytest.raises(
        ReplayMismatchError,
        match=r"shrinking .*forward saved 3 tensors, the replay only 1; tensor 2, float32\[4\]",
    ):
        loss.backward()


def test_more_tensors() -> None:
    def growing(x: Tensor) -> Tensor:
        x = x.sin()
        return x.exp().cos() if recoup.is_replaying() else x

    checkpoint(growing, make()).sum().backward()  # stops before it could matter
    loss = Checkpoint(early_stop=False)(growing, make()).sum()
    with pytest.raises(ReplayMismatchError, match="forward saved 1 tensors, the replay 3"):
        loss.backward()


def test_no_check_still_refuses_what_is_missing() -> None:
    loss = Checkpoint(check="none")(lambda x: x if recoup.is_replaying() else x.sin(), make()).sum()
    with pytest.raises(ReplayMismatchError, match="missing"):
        loss.backward()


def drifting(x: Tensor) -> Tensor:
    return (x * random.random()).sin()


def test_values_that_drift() -> None:
    Checkpoint(check="metadata")(drifting, make()).sum().backward()  # the metadata are the same
    for call in (Checkpoint(check="values"), checkpoint):
        loss = call(drifting, make()).sum()
        with pytest.raises(
            ReplayMismatchError, match=r"Saved tensor 1 of 1, float32\[4\] on cpu, has other values"
        ):
            loss.backward()


def test_values_that_only_change_places() -> None:
    def shuffled(x: Tensor) -> Tensor:
        return (x.flip(0) if recoup.is_replaying() else x).sin().exp()

    loss = Checkpoint(check="values")(shuffled, make()).sum()
    with pytest.raises(ReplayMismatchError, match="has other values"):
        loss.backward()


def test_routing_that_flips() -> None:
    def routed(x: Tensor) -> Tensor:
        rows = x > (0.5 if recoup.is_replaying() else -0.5)
        return x[rows].exp().sum() + x.sin().sum()

    x = torch.linspace(-1, 1, 9, requires_grad=True) * 1
    loss = recoup.Checkpoint(keep_decisions=False)(routed, x)
    with pytest.raises(ReplayMismatchError, match="mixture of experts"):
        loss.backward()


def test_nothing_to_run_on() -> None:
    with pytest.raises(
        NothingToCheckpointError, match=r"given no tensor and its result needs no gradient.*Pass its inputs"
    ):
        checkpoint(lambda: torch.ones(3))
    with pytest.raises(NothingToCheckpointError, match="given no tensor"):
        checkpoint(lambda scale: {"a": [scale * 2]}, 3)
    with torch.no_grad():
        assert checkpoint(lambda: 3) == 3


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match=r"checkpoint\(fn, x\). Got a Tensor"):
        checkpoint(torch.ones(1), torch.ones(1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Got a int as function"):
        Checkpoint()(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="check is 'sampled', 'metadata', 'values' or 'none'; got 'yes'"):
        Checkpoint(check="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="early_stop is True or False; got 'no'"):
        Checkpoint(early_stop="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="positional"):
        Checkpoint(torch.sin)  # type: ignore[misc]
    with pytest.raises(
        CheckpointError, match=r"iterator \(list_iterator\), which the replay would find used up. Pass a list"
    ):
        checkpoint(fn, make(), iter([1, 2]))


def test_the_errors_are_recoups_and_torchs_callers_can_catch_them() -> None:
    for error in (InputChangedError, ReplayMismatchError, NothingToCheckpointError):
        assert issubclass(error, CheckpointError)
        assert issubclass(error, RecoupError)
        assert issubclass(error, RuntimeError)


def test_a_function_that_swallows_everything() -> None:
    def stubborn(x: Tensor) -> Tensor:
        y = x.sin()
        try:
            return y.exp()
        except BaseException as error:
            raise ValueError("translated") from error

    x = make().detach().requires_grad_()
    checkpoint(stubborn, x * 1).sum().backward()
    assert torch.equal(x.grad, x.sin().exp() * x.cos())


def test_tensors_that_changed_but_are_not_read() -> None:
    """An optimizer that steps inside the backward, and functions that reach more layers than they run."""
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    results = []
    for call in (lambda f, h: f(h), checkpoint):
        torch.manual_seed(0)
        for layer in layers:
            layer.reset_parameters()

        def step(parameter: Tensor) -> None:
            with torch.no_grad():
                parameter.add_(parameter.grad, alpha=-0.1)
            parameter.grad = None

        handles = [p.register_post_accumulate_grad_hook(step) for p in layers.parameters()]
        h = torch.randn(2, 4)
        for index in range(3):
            h = call(lambda h, index=index: layers[index](h).tanh(), h)
        h.sum().backward()
        for handle in handles:
            handle.remove()
        results.append([parameter.detach().clone() for parameter in layers.parameters()])
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)


def test_a_captured_accumulator() -> None:
    total = torch.zeros(4)

    def accumulating(x: Tensor) -> Tensor:
        total.add_(x.detach())
        return x.sin().exp()

    loss = checkpoint(accumulating, make()).sum()
    with pytest.raises(
        InputChangedError, match="captured tensor 'total' was changed in place by the function itself"
    ):
        loss.backward()


def test_a_choice_of_expert_that_falls_differently() -> None:
    """Equal shapes everywhere: only the identity of the parameter tells."""
    experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def routed(x: Tensor) -> Tensor:
        return experts[int(recoup.is_replaying())](x.sin()).tanh()

    loss = checkpoint(routed, make().reshape(1, 4)).sum()
    with pytest.raises(
        ReplayMismatchError, match=r"another parameter than in the forward.*choice between modules"
    ):
        loss.backward()


def test_a_mismatch_in_a_function_that_uses_up_its_arguments() -> None:
    def popping(items: list[Tensor]) -> Tensor:
        x = items.pop()
        return (x[:2] if recoup.is_replaying() else x).sin().exp()

    loss = checkpoint(popping, [make()]).sum()
    with pytest.raises(
        ReplayMismatchError, match=r"is float32\[2\] on cpu in the replay \(at test_never_silent.py:\d+\)"
    ):
        loss.backward()


def test_a_bare_except_that_goes_on() -> None:
    def stubborn(x: Tensor) -> Tensor:
        y = x.sin()
        try:
            return y.exp()
        except BaseException:
            return y.cos().sin().exp().tanh()

    x = torch.randn(4, requires_grad=True)
    checkpoint(stubborn, x * 1).sum().backward()
    assert torch.equal(x.grad, x.sin().exp() * x.cos())


def test_changed_behind_hooks_that_hand_back_the_same_memory() -> None:
    x, h = torch.randn(4, requires_grad=True), torch.randn(4)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor):
        loss = checkpoint(lambda x, h: (x * h).sin(), x, h).sum()
    h.add_(1)
    with pytest.raises(InputChangedError, match="'h' was changed in place"):
        loss.backward()


def test_a_frozen_weight_that_changed_is_refused_before_the_replay_stops() -> None:
    """It is the last tensor that the backward needs, and the replay stops when autograd saves it."""
    frozen = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Tanh(), nn.Conv2d(3, 1, 1)).requires_grad_(False)
    loss = Checkpoint(check="metadata")(frozen, torch.ones(1, 3, 2, 2, requires_grad=True) * 1).sum()
    changed(frozen[2].weight)
    with pytest.raises(InputChangedError, match=r"parameter '2.weight' of Sequential"):
        loss.backward()


def test_a_captured_scale_that_changed_is_refused() -> None:
    scale = torch.ones(4)
    loss = Checkpoint(check="metadata")(lambda x: x * scale, make()).sum()
    changed(scale)
    with pytest.raises(InputChangedError, match="captured tensor 'scale'"):
        loss.backward()
