"""What a first look at a step sees. float32 everywhere; sizes are all unequal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from recoup.devices.meter import CpuMeter
from recoup.measuring.stream.seen import Structure
from recoup.measuring.stream.structure import look
from recoup.model.calls import watch_calls
from recoup.model.step import TrainingStep
from recoup.model.units import children_of, find_units


class Body(nn.Module):
    def __init__(self, forward: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.body = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *args: Any) -> Any:
        return self.body(self, *args)


def seen(model: nn.Module, sample: Any, units: Any = "*") -> Structure:
    step = TrainingStep(model, sample)
    root = watch_calls(step)
    modules = find_units(root, units)
    return look(step, modules, CpuMeter(), {module: children_of(root, module) for module in modules})


def sizes(storages: dict[int, int]) -> list[int]:
    return sorted(storages.values())


X, A, B = 5 * 6 * 4, 5 * 10 * 4, 5 * 7 * 4
"""Bytes of [5, 6], [5, 10] and [5, 7]."""


def layers() -> dict[str, nn.Module]:
    return {"a": nn.Linear(6, 10), "b": nn.Linear(10, 7)}


def test_a_chain() -> None:
    structure = seen(Body(lambda self, x: self.b(self.a(x)).sum(), **layers()), torch.randn(5, 6))
    a, b = structure.calls
    assert (a.name, b.name) == ("a", "b")
    # The sample is resident.
    assert (a.arguments, a.saved_arguments, a.argument_gradients) == ({}, frozenset(), {})
    assert sizes(a.outputs) == sizes(a.gradients) == [A]
    assert b.arguments == a.outputs
    assert b.saved_arguments == frozenset(a.outputs)
    assert b.argument_gradients == a.gradients
    assert (b.code.saved, b.code.transient_bytes, b.code.backward_bytes) == ({}, 0, 0)
    assert structure.tail.code.saved == {}
    # The sum, 4 bytes; in its backward, its gradient, which takes nothing to expand.
    assert structure.tail.code.transient_bytes == structure.tail.code.backward_bytes == 4
    assert structure.tail.code.gives_gradients == b.outputs
    assert structure.tail.code.views.storages == {structure.tail.code.views.owners[k]: 4 for k in b.outputs}
    assert sizes(structure.tail.loss) == [4, 4]
    assert structure.tail.output == {}
    assert not structure.accumulates


def test_code_between_units() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.b(self.a(x).exp() * 2).sum()

    a, b = seen(Body(forward, **layers()), torch.randn(5, 6)).calls
    # exp saves its result; the product is the unit's argument, which its own graph saves.
    assert sizes(b.code.saved) == [A]
    # Once exp has run, nobody needs its argument, which lived when the code began.
    assert b.code.transient_bytes == A
    assert b.code.gives_gradients == a.outputs
    # The gradient of the product, and exp's own; or that of exp's result and the product's.
    assert b.code.backward_bytes == 2 * A
    assert sizes(b.arguments) == [A]
    assert not b.arguments.keys() & a.outputs.keys()


def test_code_that_saves_nothing_still_gives_gradients() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        a = self.a(x)
        return (self.b(a)[:, :5] + a[:, :5]).sum()

    structure = seen(Body(forward, **layers()), torch.randn(5, 6))
    assert structure.tail.code.saved == {}
    assert structure.tail.code.gives_gradients == structure.calls[0].outputs | structure.calls[1].outputs


def test_gradients_that_are_views_of_a_larger_one() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(a)
        return self.c(torch.cat([a, b], 1)).sum()

    model = Body(forward, a=nn.Linear(6, 10), b=nn.Linear(10, 7), c=nn.Linear(17, 3))
    a, b, c = seen(model, torch.randn(5, 6), ["a", "b", "c"]).calls
    (first,), (second,) = a.outputs, b.outputs
    # Both are views of the gradient of what was joined.
    assert c.code.gives_gradients == {first: A, second: B}
    assert c.code.views.owners[first] == c.code.views.owners[second]
    assert c.code.views.storages == {c.code.views.owners[first]: A + B}


def test_gradients_of_earlier_code_belong_to_that_code() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        stream = self.a(x) * self.scale
        return (stream + self.c(stream)).sum()

    model = Body(forward, a=nn.Linear(6, 10), c=nn.Linear(10, 10))
    model.scale = nn.Parameter(torch.rand(10))
    structure = seen(model, torch.randn(5, 6), ["a", "c"])
    a, c = structure.calls
    assert c.code.gives_gradients == a.outputs
    assert c.code.parameters == {id(model.scale): 10 * 4}
    # The tail's part of the graph ends at the stream, which was the second unit's argument.
    assert structure.tail.code.gives_gradients.keys() == {*c.arguments, *c.outputs}
    assert structure.tail.code.parameters == {}


def test_arguments_that_a_unit_does_not_save() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.b(self.a(x)).sum()

    structure = seen(Body(forward, a=nn.Linear(6, 10), b=nn.Dropout(0.5)), torch.randn(5, 6))
    assert structure.calls[1].saved_arguments == frozenset()
    assert sizes(structure.calls[1].arguments) == [A]


def test_views_are_one_storage() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        a = self.a(x)
        return self.b(a.view(10, 5).t().reshape(10, 5).view(5, 10)).sum() + a[0].sum()

    a, b = seen(Body(forward, **layers()), torch.randn(5, 6)).calls
    assert sizes(b.alive) == [A, A]
    assert sizes(a.outputs) == [A]


def test_what_is_inside_a_unit() -> None:
    block = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 7), nn.ReLU(inplace=True))
    model = Body(lambda self, x: self.block(x).sum(), block=block)
    call = seen(model, torch.randn(5, 6), "block").calls[0]
    # By module: GELU saves its argument, the second layer its own. What changes its argument is left out.
    assert call.saved_inside == {"1": A, "2": A}


def test_values_that_wait_for_a_later_unit_are_alive() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(a)
        return self.c(b, a).sum()

    class Second(nn.Module):
        def forward(self, b: Tensor, a: Tensor) -> Tensor:
            return b + a[:, :7]

    a, b, c = seen(Body(forward, **layers(), c=Second()), torch.randn(5, 6)).calls
    assert a.outputs.keys() <= b.alive.keys()
    assert sizes(c.arguments) == [B, A]
    assert c.saved_arguments == frozenset()
    assert sizes(c.argument_gradients) == [B, A]


def test_gradients_given_twice() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.a(self.a(x)).sum()

    calls = seen(Body(forward, a=nn.Linear(6, 6)), torch.randn(5, 6), "a").calls
    assert [(call.name, call.shares) for call in calls] == [("a", True), ("a#2", False)]


def test_a_backward_inside_the_forward() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        weight = torch.ones(10, requires_grad=True)
        y = (weight * 2).exp()
        a = self.a(x) * y
        b = self.b(a)
        # Through code from before the last unit.
        (slope,) = torch.autograd.grad(y.sum(), weight, retain_graph=True)
        return b.sum() * slope.sum()

    structure = seen(Body(forward, **layers()), torch.randn(5, 6))
    assert [call.name for call in structure.calls] == ["a", "b"]


def test_a_step_that_accumulates() -> None:
    model = nn.Sequential(nn.Linear(6, 6))

    def step() -> None:
        for _ in range(2):
            model(torch.randn(5, 6)).sum().backward()

    training = TrainingStep(model, step=step)
    assert look(training, [model[0]], CpuMeter(), {}).accumulates


class Expanded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10))

    def forward(self, num_rows: int) -> Tensor:
        return self.weight.expand(num_rows, -1)


def test_a_view_of_a_parameter_has_a_gradient_but_no_bytes() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        view = self.view(len(x))
        return self.b(self.a(x) * view).sum()

    structure = seen(Body(forward, view=Expanded(), **layers()), torch.randn(5, 6))
    view, a, b = structure.calls
    assert (sizes(view.outputs), sizes(view.gradients)) == ([0], [A])
    assert (view.resident_outputs, a.resident_outputs) == ((True,), (False,))
    assert b.code.gives_gradients == view.gradients | a.gradients
    # The product saves what a made, and the parameter, which is resident.
    assert sizes(b.code.saved) == [A]


def test_what_a_pass_leaves_for_the_next_one() -> None:
    model, sample = Body(lambda self, x: self.b(self.a(x)).sum(), **layers()), torch.randn(5, 6)

    def step() -> Tensor:
        loss = model(sample)
        loss.backward()
        moved = [parameter.grad * 0.1 for parameter in model.parameters()]
        model.zero_grad()
        model(sample).backward()
        return loss.detach() + moved[0].sum()

    structure = look(TrainingStep(model, step=step), [model.a, model.b], CpuMeter(), {})
    assert not structure.accumulates
    # The weights' and biases' shares; the first loss, the second one, and its gradient.
    assert sizes(structure.tail.loss) == sorted([6 * 10 * 4, 10 * 4, 10 * 7 * 4, 7 * 4, 4, 4, 4])
