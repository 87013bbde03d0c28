"""Plans made by hand: any recipes, segments and nesting, without measuring anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from recoup import planning
from recoup.engines import Leaf, ModelPlan, Segment
from recoup.measuring import Profile, ProfiledUnit, Recipe
from recoup.model.recipe import KEEP, RECOMPUTE
from recoup.planning import Action, Backward, Forward, Keep, Option, Problem, Schedule, Unit
from recoup.planning.solvers.base import ALL_SCHEDULES, Bound
from recoup.plans.profile import Residents
from recoup.plans.tree import Item

RECIPES = (KEEP, RECOMPUTE)
KEPT, REPLAYED = 0, 1
"""Options of those recipes."""


def keep(*units: int) -> list[Item]:
    return [Leaf(unit, KEPT) for unit in units]


def replay(*units: int) -> list[Item]:
    return [Leaf(unit, REPLAYED) for unit in units]


def segment(*items: Item | Sequence[Item]) -> Segment:
    flat: list[Item] = []
    for item in items:
        flat += item if isinstance(item, Sequence) else [item]
    return Segment(flat[0].first, flat[-1].last, tuple(flat))


def actions_of(items: Iterable[Item]) -> Iterator[Action]:
    """The schedule of nested segments: the way back from `tree_of`."""
    items = list(items)
    for item in items:
        if isinstance(item, Leaf):
            yield Forward(item.unit, keep=Keep.OPTION, option=item.option)
        else:
            yield Forward(item.first, keep=Keep.INPUT)
            yield from map(Forward, range(item.first + 1, item.last + 1))
    for item in reversed(items):
        if isinstance(item, Leaf):
            yield Backward(item.unit, option=item.option)
        else:
            yield from actions_of(item.items)


def problem_of(units: Sequence[ProfiledUnit]) -> Problem:
    """Numbers for units, unequal and otherwise of no meaning."""
    return Problem(
        [
            Unit(
                unit.name,
                [
                    Option(
                        recipe.name,
                        forward_s=index + 1.0,
                        backward_s=2.0 + number,
                        held_bytes=(7 + index) * (not recipe.whole),
                    )
                    for number, recipe in enumerate(unit.recipes)
                ],
                output_bytes=3 + index,
            )
            for index, unit in enumerate(units)
        ]
    )


def make_plan(
    model: nn.Module, calls: Sequence[str], items: Sequence[Item], recipes: Sequence[Recipe] = RECIPES
) -> ModelPlan:
    """A plan for a model whose step calls these modules; the loss follows and is kept."""
    seen: Counter[str] = Counter()
    units = []
    for name in calls:
        seen[name] += 1
        label = name if seen[name] == 1 else f"{name}#{seen[name]}"
        units.append(ProfiledUnit(label, name, seen[name] - 1, 0, tuple(recipes)))
    units.append(ProfiledUnit("loss", None, 0, -1, (KEEP,)))
    problem = problem_of(units)
    schedule = Schedule(actions_of([*items, Leaf(len(calls), 0)]))
    predicted = planning.simulate(problem, schedule)
    profile = Profile(type(model).__name__, "cpu", tuple(units), problem, Residents(0, 0, 0, 0, 0))
    bound = Bound(predicted.seconds, schedules=ALL_SCHEDULES)
    chosen = planning.Plan(problem, predicted.peak_bytes, schedule, "hand", bound, predicted)
    return ModelPlan(profile, chosen, predicted.peak_bytes)


COUNTS: Counter[str] = Counter()


class Counting(nn.Module):
    """A unit with dropout, BatchNorm and children that counts its forwards in `COUNTS`, by its label."""

    def __init__(self, label: str, width: int = 4) -> None:
        super().__init__()
        self.label = label
        self.norm = nn.BatchNorm1d(width)
        self.linear = Named(f"{label}.linear", width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        COUNTS[self.label] += 1
        return x + self.dropout(torch.tanh(self.linear(self.norm(x)))) * 0.5


class Named(nn.Linear):
    """A layer that counts its forwards."""

    def __init__(self, label: str, width: int) -> None:
        super().__init__(width, width)
        self.label = label

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        COUNTS[self.label] += 1
        return super().forward(x)


class Chain(nn.Module):
    """Units in a row, then a loss."""

    def __init__(self, num_units: int = 5) -> None:
        super().__init__()
        self.units = nn.ModuleList(Counting(str(index)) for index in range(num_units))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for unit in self.units:
            x = unit(x)
        return x.square().mean()

    @property
    def names(self) -> list[str]:
        return [f"units.{index}" for index in range(len(self.units))]


def chain_sample() -> tuple[Any, ...]:
    return (torch.randn(6, 4, generator=torch.Generator().manual_seed(8)),)


def count_step(model: nn.Module, sample: tuple[Any, ...]) -> dict[str, int]:
    """How often each forward runs in one step, by label."""
    COUNTS.clear()
    model(*sample).backward()
    model.zero_grad()
    return dict(COUNTS)
