"""Every way to run a unit, alone and in segments: results bit for bit those of the plain model, exact counts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import models
import pytest
import torch
from handmade import COUNTS, Chain, Counting, chain_sample, count_step, keep, make_plan, replay, segment
from torch import Tensor, nn

from recoup.engines import Leaf, apply, remove
from recoup.measuring import Recipe
from recoup.model.recipe import KEEP, RECOMPUTE
from recoup.plans.tree import Item

PARTIAL = Recipe(inner=("linear",))
NESTED = Recipe(whole=True, inner=("norm", "linear"))
RECIPES = (KEEP, RECOMPUTE, PARTIAL, NESTED)

# Items for five units, how often each runs in a step, and how often the layer inside it does.
CASES: dict[str, tuple[list[Item], list[int], list[int]]] = {
    "keep": (keep(0, 1, 2, 3, 4), [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]),
    "recompute": (replay(0, 1, 2, 3, 4), [2, 2, 2, 2, 2], [2, 2, 2, 2, 2]),
    "recompute some": (
        [*keep(0), *replay(1), *keep(2), *replay(3), *keep(4)],
        [1, 2, 1, 2, 1],
        [1, 2, 1, 2, 1],
    ),
    "recompute a child": ([Leaf(unit, 2) for unit in range(5)], [1, 1, 1, 1, 1], [2, 2, 2, 2, 2]),
    # The unit's replay ends before its layer has run: the layer's own replay follows.
    "recompute, then children again": ([Leaf(unit, 3) for unit in range(5)], [2] * 5, [3] * 5),
    "all four": (
        [Leaf(0, 1), Leaf(1, 2), Leaf(2, 3), Leaf(3, 0), Leaf(4, 1)],
        [2, 1, 2, 1, 2],
        [2, 2, 3, 1, 2],
    ),
    "one segment": ([segment(keep(0, 1, 2)), *keep(3, 4)], [2, 2, 2, 1, 1], [2, 2, 2, 1, 1]),
    "a segment of everything": ([segment(keep(0, 1, 2, 3, 4))], [2, 2, 2, 2, 2], [2, 2, 2, 2, 2]),
    "two segments": ([segment(keep(0, 1)), segment(keep(2, 3)), *keep(4)], [2, 2, 2, 2, 1], [2, 2, 2, 2, 1]),
    "segments of one": (
        [segment(keep(0)), segment(keep(1)), *keep(2, 3, 4)],
        [2, 2, 1, 1, 1],
        [2, 2, 1, 1, 1],
    ),
    "recompute inside a segment": (
        [segment(replay(0), keep(1), replay(2)), *keep(3, 4)],
        [3, 2, 2, 1, 1],
        [3, 2, 2, 1, 1],
    ),
    "children inside a segment": (
        [segment(Leaf(0, 2), Leaf(1, 3)), *keep(2, 3, 4)],
        [2, 2, 1, 1, 1],
        [3, 3, 1, 1, 1],
    ),
    "nested": (
        [segment(segment(keep(0, 1)), keep(2, 3)), *keep(4)],
        [3, 3, 2, 2, 1],
        [3, 3, 2, 2, 1],
    ),
    "only the input kept": (
        [segment(segment(segment(segment(segment(keep(0)), keep(1)), keep(2)), keep(3)), keep(4))],
        [6, 5, 4, 3, 2],
        [6, 5, 4, 3, 2],
    ),
    "nested in the middle": (
        [segment(keep(0), segment(keep(1), replay(2)), keep(3)), *replay(4)],
        [2, 3, 3, 2, 2],
        [2, 3, 3, 2, 2],
    ),
}


def planned(model: Chain, items: Sequence[Item]) -> Chain:
    fitted = copy.deepcopy(model)
    apply(fitted, make_plan(fitted, fitted.names, items, RECIPES))
    return fitted


@pytest.mark.parametrize(("items", "num_runs", "num_inside"), CASES.values(), ids=CASES)
def test_option(items: list[Item], num_runs: list[int], num_inside: list[int]) -> None:
    plain, sample = Chain(), chain_sample()
    fitted = planned(plain, items)
    models.assert_same(models.train(plain, sample), models.train(fitted, sample))
    counts = count_step(fitted, sample)
    assert [counts[str(unit)] for unit in range(5)] == num_runs
    assert [counts[f"{unit}.linear"] for unit in range(5)] == num_inside


@pytest.mark.parametrize("kind", models.ALL)
def test_models_in_one_nested_segment(kind: type[nn.Module]) -> None:
    """Skips, keyword arguments, masks, tied weights, tuples between the units."""
    plain, fitted = models.make_pair(kind, models.plainly)
    children = [name for name, child in plain.named_modules() if type(child) in UNITS[kind]]
    calls = children * (4 if kind is models.Recurrent else 1)
    middle = len(calls) // 2
    nested = segment(segment(keep(*range(middle))), keep(*range(middle, len(calls))))
    apply(fitted, make_plan(fitted, calls, [nested]))
    sample = kind.sample()
    models.assert_same(models.train(plain, sample), models.train(fitted, sample))


UNITS = {
    models.GPT: {models.Block},
    models.ResNet: {models.Residual},
    models.UNet: {nn.Conv2d},
    models.MoE: {models.Experts},
    models.EncoderDecoder: {models.Block},
    models.Recurrent: {nn.LSTMCell},
}


# Shared modules


class Shared(nn.Module):
    """One module, called at every step."""

    def __init__(self, num_calls: int = 4) -> None:
        super().__init__()
        self.cell, self.num_calls = Counting("cell"), num_calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_calls):
            x = self.cell(x)
        return x.square().mean()


@pytest.mark.parametrize(
    ("items", "num_runs", "num_inside"),
    [
        ([Leaf(0, 0), Leaf(1, 1), Leaf(2, 2), Leaf(3, 3)], 4 + 2, 4 + 4),
        ([Leaf(0, 1), segment(keep(1, 2)), Leaf(3, 0)], 4 + 3, 4 + 3),
        ([segment(segment(keep(0)), Leaf(1, 2), Leaf(2, 1)), Leaf(3, 1)], 4 + 5, 4 + 6),
    ],
)
def test_a_shared_module_runs_each_call_as_planned(items: list[Item], num_runs: int, num_inside: int) -> None:
    plain, sample = Shared(), chain_sample()
    fitted = copy.deepcopy(plain)
    apply(fitted, make_plan(fitted, ["cell"] * 4, items, RECIPES))
    models.assert_same(models.train(plain, sample), models.train(fitted, sample))
    assert count_step(fitted, sample) == {"cell": num_runs, "cell.linear": num_inside}


def test_calls_are_counted_anew_in_each_step_though_the_model_itself_is_never_called() -> None:
    """A loop of the user's calls the parts."""
    model, (x,) = Shared(), chain_sample()
    apply(model, make_plan(model, ["cell"] * 3, [*keep(0), *replay(1), *keep(2)], RECIPES))
    for _ in range(3):
        COUNTS.clear()
        model.cell(model.cell(model.cell(x))).sum().backward()
        assert COUNTS["cell"] == 4


def test_a_module_inside_two_units_is_recomputed_where_planned_only() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Counting("first"), Counting("second")
            self.second.linear = self.first.linear

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x)).square().mean()

    plain, sample = Twice(), chain_sample()
    fitted = copy.deepcopy(plain)
    apply(fitted, make_plan(fitted, ["first", "second"], [Leaf(0, 0), Leaf(1, 2)], RECIPES))
    models.assert_same(models.train(plain, sample), models.train(fitted, sample))
    assert count_step(fitted, sample) == {"first": 1, "second": 1, "first.linear": 3}
    remove(fitted)
    assert "forward" not in vars(fitted.first.linear)


# Code between the units


class Glued(nn.Module):
    """Code of its own between the units: it adds, changes in place, splits, and reads an early value late."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Counting(str(index)) for index in range(4))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.units[0](x)
        y = self.units[1](first + self.bias)
        y.mul_(1.5)
        left, right = self.units[2](y).chunk(2, -1)
        z = self.units[3](torch.cat([right, left], -1) * first)
        return (z + first).square().mean()


@pytest.mark.parametrize(
    "items",
    [
        [*replay(0, 1, 2, 3)],
        [*keep(0), segment(keep(1, 2)), *replay(3)],
        [segment(segment(keep(0)), keep(1, 2)), *keep(3)],
        [segment(keep(0, 1, 2, 3))],
    ],
)
def test_code_between_units(items: list[Item]) -> None:
    plain, sample = Glued(), chain_sample()
    fitted = copy.deepcopy(plain)
    apply(fitted, make_plan(fitted, [f"units.{index}" for index in range(4)], items, RECIPES))
    models.assert_same(models.train(plain, sample), models.train(fitted, sample))


# User code that does something else than in the measured step


class Wayward(nn.Module):
    """Calls its units in any order."""

    def __init__(self, order: Sequence[int]) -> None:
        super().__init__()
        self.units = nn.ModuleList(Counting(str(index)) for index in range(4))
        # Units that are not called get gradients, too.
        self.order = list(order)

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.units[index](x)
        return x.square().mean() + sum(p.sum() for p in self.parameters()) * 0


ITEMS = {
    "recomputed": replay(0, 1, 2, 3),
    "a segment": [segment(keep(0, 1, 2)), *keep(3)],
    "all in one": [segment(keep(0, 1, 2, 3))],
    "nested": [segment(segment(keep(0, 1)), keep(2)), *replay(3)],
    "nested twice": [segment(segment(segment(keep(0)), keep(1)), keep(2), keep(3))],
}
ORDERS = {
    "as measured": [0, 1, 2, 3],
    "skips the first": [1, 2, 3],
    "skips inside": [0, 2, 3],
    "skips the last": [0, 1, 2],
    "skips all but one": [1],
    "once more": [0, 1, 2, 3, 3, 3],
    "once more inside": [0, 1, 1, 1, 2, 3],
    "the first again and again": [0, 0, 0, 1, 2, 3],
    "everything twice": [0, 1, 2, 3, 0, 1, 2, 3],
    "backwards": [3, 2, 1, 0],
    "leaves and comes back": [0, 3, 1, 2],
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("items", ITEMS.values(), ids=ITEMS)
def test_another_order_of_calls(items: list[Item], order: list[int]) -> None:
    plain, sample = Wayward(order), chain_sample()
    fitted = copy.deepcopy(plain)
    apply(fitted, make_plan(fitted, [f"units.{index}" for index in range(4)], items, RECIPES))
    models.assert_same(models.train(plain, sample, 2), models.train(fitted, sample, 2))


@pytest.mark.parametrize("num_calls", [1, 3, 5, 9])
def test_another_number_of_calls_of_a_shared_module(num_calls: int) -> None:
    plain, sample = Shared(num_calls), chain_sample()
    fitted = copy.deepcopy(plain)
    items: list[Item] = [Leaf(0, 1), segment(keep(1), replay(2)), Leaf(3, 3)]
    apply(fitted, make_plan(fitted, ["cell"] * 4, items, RECIPES))
    models.assert_same(models.train(plain, sample, 2), models.train(fitted, sample, 2))


@pytest.mark.parametrize("items", ITEMS.values(), ids=ITEMS)
def test_other_batches_and_several_forwards_before_one_backward(items: list[Item]) -> None:
    plain = Wayward([0, 1, 2, 3])
    fitted = copy.deepcopy(plain)
    apply(fitted, make_plan(fitted, [f"units.{index}" for index in range(4)], items, RECIPES))
    batches = [torch.randn(size, 4) for size in (2, 9, 3)]

    def losses(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(2)
        sum(model(batch) for batch in batches).backward()
        return [parameter.grad for parameter in model.parameters()]

    for expected, found in zip(losses(plain), losses(fitted), strict=True):
        assert torch.equal(expected, found)


class Calling(Counting):
    """A unit that calls another one, which is no child of it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.others[0](x))


class Crossed(nn.Module):
    def __init__(self, caller: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(
            (Calling if index == caller else Counting)(str(index)) for index in range(3)
        )
        self.units[caller].others = [self.units[(caller + 1) % 3]]

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x.square().mean()


@pytest.mark.parametrize("caller", [0, 1, 2])
@pytest.mark.parametrize(
    "items", [replay(0, 1, 2), [segment(keep(0, 1, 2))], [segment(segment(keep(0, 1)), replay(2))]]
)
def test_a_unit_that_another_unit_calls_runs_plainly_there(items: list[Item], caller: int) -> None:
    """As it was measured: what a unit calls belongs to it."""
    plain, sample = Crossed(caller), chain_sample()
    fitted = copy.deepcopy(plain)
    apply(fitted, make_plan(fitted, [f"units.{index}" for index in range(3)], items, RECIPES))
    models.assert_same(models.train(plain, sample), models.train(fitted, sample))


def test_a_forward_that_raises_leaves_nothing_behind() -> None:
    class Failing(Chain):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.units[1](self.units[0](x))
            if self.fails:
                raise KeyError("no more data")
            return self.units[3](self.units[2](x)).square().mean()

    plain, sample = Failing(4), chain_sample()
    fitted = copy.deepcopy(plain)
    apply(fitted, make_plan(fitted, fitted.names, [segment(keep(0, 1, 2)), *keep(3)], RECIPES))
    for model in (plain, fitted):
        model.fails = True
        torch.manual_seed(1)
        with pytest.raises(KeyError, match="no more data"):
            model(*sample)
        model.fails = False
    models.assert_same(models.train(plain, sample), models.train(fitted, sample))
    assert count_step(fitted, sample)["2"] == 2


def test_a_unit_frozen_later_still_trains_the_rest() -> None:
    plain, sample = Chain(4), chain_sample()
    fitted = planned_frozen(plain, [segment(keep(0, 1)), *replay(2, 3)])

    def gradients(model: nn.Module) -> dict[str, Any]:
        torch.manual_seed(3)
        model(*sample).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    models.assert_same(gradients(plain), gradients(fitted))


def planned_frozen(plain: Chain, items: Sequence[Item]) -> Chain:
    fitted = copy.deepcopy(plain)
    apply(fitted, make_plan(fitted, fitted.names, items, RECIPES))
    for model in (plain, fitted):
        model.units[0].requires_grad_(False)
        model.units[2].requires_grad_(False)
    return fitted
