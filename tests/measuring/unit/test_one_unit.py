"""Bytes of one call by itself. Every number is worked out in the test from shapes: float32 is 4 bytes."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recoup.devices.meter import CpuMeter
from recoup.measuring.unit.one_unit import (
    CallBytes,
    Gradients,
    forward_and_backward,
    measure_bytes,
    time_call,
)
from recoup.model.recipe import KEEP, RECOMPUTE, InnerForward, Recipe
from recoup.model.replace_forward import intercepted
from recoup.model.streaming import UnitCall

X = 4 * 6 * 4
"""Bytes of the argument, [4, 6]."""


def call_of(module: nn.Module, *args: Any, **kwargs: Any) -> UnitCall:
    return UnitCall(0, "unit", module, module.forward, args, kwargs)


def measured(
    module: nn.Module,
    *args: Any,
    recipe: Recipe = KEEP,
    gradients: Gradients = Gradients.NONE,
    needs_grad: bool = True,
    **views: Sequence[bool],
) -> CallBytes:
    meter = CpuMeter()
    args = args or (torch.randn(4, 6, requires_grad=needs_grad),)
    with meter.watching():
        return measure_bytes(call_of(module, *args), recipe, meter, gradients=gradients, **views)


class Body(nn.Module):
    """A unit around a function."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, *args: Tensor) -> Any:
        return self.body(self, *args)


def residual(self: nn.Module, x: Tensor) -> Tensor:
    """Its backward begins with the argument's gradient; the square, and the gradient of the weight, come after that."""
    return x + (x * self.weight) ** 2


def square_of_next(self: nn.Module, x: Tensor) -> Tensor:
    y = x + 1
    return y * y


class TestMlp:
    # Linear(6, 10), GELU, Linear(10, 3) on [4, 6].
    hidden, out = 4 * 10 * 4, 4 * 3 * 4
    weight1, bias1, weight2, bias2 = 10 * 6 * 4, 10 * 4, 3 * 10 * 4, 3 * 4

    def make(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 3))

    def backward_peak(self) -> int:
        """Beyond both hidden values, which are held: they go once the operation that saved them has run."""
        second = self.out + self.hidden + self.weight2 + self.bias2
        after_gelu = self.weight2 + self.bias2 + self.hidden - 2 * self.hidden
        return max(second, after_gelu + X + self.weight1 + self.bias1)

    def test_keep(self) -> None:
        assert measured(self.make()) == CallBytes(
            forward_peak_bytes=2 * self.hidden + self.out,
            output_bytes=self.out,
            held_bytes=2 * self.hidden,
            holds_outputs=(False,),
            backward_peak_bytes=self.backward_peak(),
            holds_arguments=(True,),
        )

    def test_recompute(self) -> None:
        cost = measured(self.make(), recipe=RECOMPUTE)
        assert cost.held_bytes == 0
        assert not cost.holds_output
        # GELU's argument and result are the most that lives at once.
        assert cost.forward_peak_bytes == 2 * self.hidden
        assert cost.backward_peak_bytes == 2 * self.hidden + self.backward_peak()

    def test_recompute_one_module_inside(self) -> None:
        unit = self.make()
        with intercepted({module: InnerForward(module) for module in unit}):
            cost = measured(unit, recipe=Recipe(inner=("1",)))
        # GELU forgets nothing but its argument, which its own checkpoint holds: nothing is gained.
        assert cost.held_bytes == 2 * self.hidden

    def test_recompute_two_modules_inside(self) -> None:
        unit = nn.Sequential(nn.Sequential(nn.Linear(6, 10), nn.GELU()), nn.Linear(10, 3))
        with intercepted({module: InnerForward(module) for module in unit}):
            cost = measured(unit, recipe=Recipe(inner=("0",)))
        assert cost.held_bytes == self.hidden

    def test_an_argument_that_needs_no_gradient_gets_none(self) -> None:
        cost = measured(nn.Linear(6, 10), needs_grad=False)
        assert cost.backward_peak_bytes == self.hidden + self.weight1 + self.bias1

    def test_accumulated_gradients_are_no_part_of_it(self) -> None:
        unit = nn.Linear(6, 10)
        cost = measured(unit, gradients=Gradients.ACCUMULATED)
        # New ones are made beside them, then added in place.
        assert cost.backward_peak_bytes == self.hidden + X + self.weight1 + self.bias1
        assert unit.weight.grad is None

    def test_shared_gradients_are_added_up_beside_them(self) -> None:
        cost = measured(nn.Linear(6, 10, bias=False), gradients=Gradients.SHARED)
        # Once the gradient of the output is gone, the sum is made beside both of its terms, one of which counts.
        assert cost.backward_peak_bytes == X + 2 * self.weight1 > self.hidden + X + self.weight1

    def test_a_view_that_waits_is_added_to_at_once(self) -> None:
        """The sum is there while the rest of the backward runs: one gradient more."""
        first = measured(Body(residual))
        with_view = measured(Body(residual), as_views=(True,))
        assert with_view == replace(first, backward_peak_bytes=first.backward_peak_bytes + X)

    def test_a_view_that_waits_is_added_to_in_the_end(self) -> None:
        """The output's gradient has gone by then: the unit's own and the sum, in the place of these two."""
        first = measured(nn.Tanh())
        assert first.backward_peak_bytes == 2 * X
        assert measured(nn.Tanh(), as_views=(True,)) == first

    def test_an_output_s_gradient_that_is_a_view_is_not_counted(self) -> None:
        own = measured(nn.Tanh())
        view = measured(nn.Tanh(), begins_with_views=(True,))
        assert view == replace(own, backward_peak_bytes=X)

    def test_a_backward_that_peaks_when_it_has_used_the_output_s_gradient_up(self) -> None:
        """Of the sine's backward: its result, a cosine, and the gradient that it reads."""
        body = Body(lambda self, x: x.repeat(1, 8).sin().reshape(4, 8, 6).sum(1))
        own, view = measured(body), measured(body, begins_with_views=(True,))
        assert own == view
        assert own.backward_peak_bytes == 3 * 8 * X

    def test_frozen_parameters_get_no_gradient(self) -> None:
        cost = measured(nn.Linear(6, 10).requires_grad_(False))
        assert cost.backward_peak_bytes == self.hidden + X

    def test_nothing_needs_a_gradient(self) -> None:
        cost = measured(nn.Linear(6, 10).requires_grad_(False), needs_grad=False)
        assert cost == CallBytes(self.hidden, self.hidden, 0, (False,), 0, (False,))


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        # It saves its own output.
        (nn.Tanh(), CallBytes(X, X, 0, (True,), 2 * X, (False,))),
        (nn.ReLU(), CallBytes(X, X, 0, (True,), 2 * X, (False,))),
        # On the CPU dropout multiplies by a float mask, and does not save its argument.
        (nn.Dropout(0.5), CallBytes(2 * X, X, X, (False,), 2 * X, (False,))),
        # The gradient passes through.
        (Body(lambda self, x: x + 1), CallBytes(X, X, 0, (False,), X, (False,))),
        # A view takes no memory, nor does the gradient of its argument.
        (Body(lambda self, x: x.view(8, 3)), CallBytes(0, 0, 0, (False,), X, (False,))),
        (Body(lambda self, x: x.t()), CallBytes(0, 0, 0, (False,), X, (False,))),
        # x + 1 is saved for the gradients of both factors, and counts once.
        (Body(square_of_next), CallBytes(2 * X, X, X, (False,), 3 * X, (False,))),
        # The argument and the parameter live anyway; the graph holds them.
        (Body(lambda self, x: x * self.weight), CallBytes(X, X, 0, (False,), 3 * X + 6 * 4, (True,))),
    ],
    ids=["tanh", "relu", "dropout", "add", "view", "transpose", "saved twice", "parameter"],
)
def test_small_units(unit: nn.Module, expected: CallBytes) -> None:
    assert measured(unit) == expected


class TestArguments:
    """Who holds them: their storages live anyway, as the code around holds them."""

    def unit(self) -> nn.Module:
        """It adds to its argument, and saves a copy of it; but a checkpoint of its first layer holds the argument."""

        class Copying(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = Body(lambda self, x: (2 * x) * self.weight)

            def forward(self, x: Tensor, y: Tensor) -> Tensor:
                return x + self.layer(x).sigmoid() * y

        return Copying()

    def held(self, recipe: Recipe, *, needs_grad: bool = True) -> tuple[bool, ...]:
        unit = self.unit()
        args = torch.randn(4, 6, requires_grad=needs_grad), torch.randn(4, 6)
        with intercepted({unit.layer: InnerForward(unit.layer)}):
            return measured(unit, *args, recipe=recipe).holds_arguments

    @pytest.mark.parametrize("needs_grad", [False, True])
    def test_it_depends_on_the_recipe(self, needs_grad: bool) -> None:
        assert self.held(KEEP, needs_grad=needs_grad) == (False, True)
        assert self.held(Recipe(inner=("layer",)), needs_grad=needs_grad) == (True, True)
        assert self.held(RECOMPUTE, needs_grad=needs_grad) == (True, True)

    def test_a_view_of_an_argument(self) -> None:
        assert measured(Body(lambda self, x: x.view(8, 3).square())).holds_arguments == (True,)


def test_outputs_that_share_a_storage_count_once() -> None:
    def body(self: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 1
        return y, y[:1]

    cost = measured(Body(body))
    assert cost.output_bytes == X
    assert cost.held_bytes == 0


def test_several_outputs_of_unequal_size() -> None:
    cost = measured(Body(lambda self, x: {"a": x.tanh(), "b": (x[:1] * 2,)}))
    # The first is held, the second is not; what is held is all output.
    assert (cost.output_bytes, cost.held_bytes, cost.holds_output) == (X + X // 4, 0, True)


def test_arguments_are_used_as_they_are_and_cut_off() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    measured(nn.Linear(6, 10), x * 2)
    assert x.grad is None


def test_a_double_argument() -> None:
    unit = nn.Linear(6, 10).double()
    assert measured(unit, torch.randn(4, 6, dtype=torch.float64)).output_bytes == 4 * 10 * 8


def test_seconds_are_those_of_the_fastest_whole_call() -> None:
    calls = []

    def body(self: nn.Module, x: Tensor) -> Tensor:
        calls.append(1)
        return x * self.weight

    timing = time_call(call_of(Body(body), torch.randn(4, 6)), [KEEP], CpuMeter(), repeats=3, warm_up=1)[KEEP]
    assert len(calls) == 4
    assert timing.forward.device_s > 0
    assert timing.backward.device_s > 0
    assert (timing.forward.host_s, timing.backward.host_s) == (0, 0)


def test_no_garbage_is_collected_while_bytes_are_measured() -> None:
    """What goes meanwhile, and was there before, would count as less."""
    is_on = []

    def body(self: nn.Module, x: Tensor) -> Tensor:
        is_on.append(gc.isenabled())
        return (x * self.weight).tanh()

    measured(Body(body), recipe=RECOMPUTE)
    assert is_on == [False, False]
    assert gc.isenabled()


def test_a_recomputing_backward_runs_the_forward_again() -> None:
    calls = []

    def body(self: nn.Module, x: Tensor) -> Tensor:
        calls.append(1)
        return (x * self.weight).tanh()

    forward, backward = forward_and_backward(call_of(Body(body), torch.randn(4, 6)), RECOMPUTE)
    forward()
    assert len(calls) == 1
    backward()
    assert len(calls) == 2


def test_a_view_of_a_parameter_is_no_output_of_its_own() -> None:
    unit = Body(lambda self, x: (self.weight.expand(4, -1), x + 1))
    found = measured(unit, resident=(True, False))
    assert (found.output_bytes, found.held_bytes, found.holds_outputs) == (X, 0, (False, False))
