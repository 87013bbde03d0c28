"""Exactly which operations of captured units run again, in steps under several budgets."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from capture.blocks import FeedForward
from capture.cuts import Operations
from engines.captured_models import run
from torch import Tensor, nn

import recoup
from recoup.capture.seconds import OperationSeconds
from recoup.engines import ModelPlan
from recoup.model.recipe import Recipe
from recoup.plans.profile import Profile
from recoup.plans.tree import leaves_of

# The compiler looks at the gradients of what it is given.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf.*:UserWarning"
)

ROWS, WIDTH, NUM_BLOCKS = 32, 16, 4
SECONDS = {"native_layer_norm": 2.0, "addmm": 10.0, "gelu": 1.0, "addmm_1": 10.0, "add": 1.0}
MADE = {"native_layer_norm": {"getitem", "getitem_1", "getitem_2"}, "addmm": {"addmm"}, "gelu": {"gelu"}}
"""The operations whose results a block's backward reads, and the names of these."""
FORWARD = {"native_layer_norm": 1, "addmm": 2, "gelu": 1}
"""How often a block's forward runs them."""


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FeedForward(WIDTH) for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch) -> Profile:
    """Measured in bytes; seconds are made up, so that no plan recomputes what it has room for."""
    monkeypatch.setattr(OperationSeconds, "__call__", lambda self, node: SECONDS[node.name])
    found = recoup.measure(Blocks(), torch.randn(ROWS, WIDTH), engine="captured")
    units = []
    for unit, profiled in zip(found.problem.units, found.units, strict=True):
        options = [
            replace(option, forward_s=24.0, backward_s=48.0 + again_s(recipe), again_s=0.0)
            for option, recipe in zip(unit.options, profiled.recipes, strict=True)
        ]
        units.append(replace(unit, options=tuple(options)))
    return replace(found, problem=replace(found.problem, units=tuple(units)))


def again_s(recipe: Recipe) -> float:
    if recipe.whole:
        return sum(SECONDS.values())
    return sum(SECONDS[name] for name in dropped(recipe))


def dropped(recipe: Recipe) -> list[str]:
    """The operations whose results a block's backward reads, and its forward does not keep."""
    if recipe.cut is None or recipe.cut.saves is None:
        return []
    return [name for name in MADE if not MADE[name] <= set(recipe.cut.saves)]


def expected(plan: ModelPlan) -> Counter[str]:
    """A whole forward for each replay of a block, and then, in its backward, what its cut does not keep."""
    found: Counter[str] = Counter()
    for leaf in leaves_of(plan.items):
        recipe = plan.recipe(leaf)
        if recipe.cut is not None:
            num_replays = plan.schedule.predicted.num_recomputes[leaf.unit] + recipe.whole
            found.update({name: num_replays * number for name, number in FORWARD.items()})
            found.update(dropped(recipe))
    return found


def test_as_many_as_the_plan_says_and_none_with_room_for_everything(profile: Profile) -> None:
    model, sample = Blocks(), (torch.randn(ROWS, WIDTH),)
    low, high = recoup.minimum_budget(profile), profile.plain_bytes
    seen = []
    for index in range(7):
        plan = recoup.plan(profile, low + (high - low) * index // 6)
        recoup.apply(model, plan)
        run(model, sample)  # nothing is compiled while operations are counted
        with Operations() as operations:
            run(model, sample)
        again = {name: operations.counts[name] - NUM_BLOCKS * number for name, number in FORWARD.items()}
        assert again == {name: expected(plan)[name] for name in FORWARD}
        seen.append(tuple(again.values()))
    assert sum(seen[0]) > 0
    assert seen[-1] == (0, 0, 0)
    assert len(set(seen)) > 3
