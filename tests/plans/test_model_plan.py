"""Plans for a measured model: budgets, the smallest one, the frontier, and what they say."""

from __future__ import annotations

import functools
import math
import pickle
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
import torch
from handmade import Chain, keep, make_plan, replay, segment
from slowly import slow_but
from torch import nn
from zoo import Llama

import recoup
from recoup.engines import Leaf, ModelPlan, frontier, minimum_budget, plan
from recoup.errors import BudgetError, SizeError
from recoup.measuring import Profile, Recipe
from recoup.model.recipe import KEEP, RECOMPUTE
from recoup.planning import simulate
from recoup.planning.plan import Session


def block(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


@functools.cache
def profile_of(num_units: int, accumulates: bool = False) -> Profile:
    torch.manual_seed(0)
    model = nn.Sequential(*(block(8) for _ in range(num_units)))
    return recoup.measure(model, torch.randn(64, 8), loss=torch.sum, accumulates=accumulates)


@functools.cache
def unequal_profile() -> Profile:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8 * n), nn.GELU(), nn.Linear(8 * n, 8)) for n in (3, 1, 4, 2))
    )
    return recoup.measure(model, torch.randn(64, 8), loss=torch.sum)


@pytest.mark.parametrize("profile", [unequal_profile, lambda: profile_of(12), lambda: profile_of(12, True)])
def test_the_smallest_budget_is_feasible_and_the_one_below_is_not(profile: object) -> None:
    measured = profile()
    smallest = minimum_budget(measured)
    found = plan(measured, smallest)
    assert found.predicted_bytes == found.budget_bytes == smallest
    with pytest.raises(
        BudgetError, match=rf"smallest feasible budget is .* \({smallest} bytes, predicted\)"
    ) as caught:
        plan(measured, smallest - 1)
    assert caught.value.smallest_bytes == smallest
    assert caught.value.budget_bytes == smallest - 1
    assert caught.value.unit in {unit.name for unit in measured.units}
    assert frontier(measured, num_points=3)[0] == found


@pytest.mark.parametrize("device", slow_but(["cuda:0 (a test)"], ["cpu", "cuda:0 (a test)"]))
def test_the_smallest_budget_is_the_same_whatever_was_timed(device: str) -> None:
    """Segments hold copies of buffers, which ones depends on seconds: `plan` and `frontier` begin at one figure."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(12)]
    measured = recoup.measure(nn.Sequential(*layers), torch.randn(64, 8), loss=torch.sum)
    found = set()
    for seed in range(6):
        random = Random(seed)
        units = []
        for unit in measured.problem.units:
            options = [
                replace(option, forward_s=random.uniform(1, 9), backward_s=random.uniform(1, 9))
                for option in unit.options
            ]
            units.append(replace(unit, options=tuple(options)))
        problem = replace(measured.problem, units=tuple(units))
        profile = replace(measured, problem=problem, device=device)
        smallest = minimum_budget(profile)
        points = frontier(profile, num_points=4)
        assert len(points) <= 4
        assert points[0] == plan(profile, smallest)
        assert all(
            a.budget_bytes < b.budget_bytes and a.predicted_s > b.predicted_s for a, b in pairwise(points)
        )
        with pytest.raises(BudgetError) as caught:
            plan(profile, smallest - 1)
        assert caught.value.smallest_bytes == smallest
        assert frontier(profile, budgets=[smallest - 1]) == ()
        assert frontier(profile, budgets=[smallest])[0] == points[0]
        found.add(smallest)
    assert len(found) == 1


def test_on_a_gpu_plans_leave_a_little_room() -> None:
    profile = replace(unequal_profile(), device="cuda:0 (a test)")
    smallest = minimum_budget(profile)
    assert smallest > minimum_budget(unequal_profile())
    for budget in (smallest, (smallest + profile.plain_bytes) // 2, profile.plain_bytes):
        chosen = plan(profile, budget)
        assert chosen.budget_bytes == budget
        assert 0.5 * budget < chosen.predicted_bytes <= budget - budget // 1000
    with pytest.raises(BudgetError) as caught:
        plan(profile, smallest - 1)
    assert caught.value.smallest_bytes == smallest
    assert all(p.predicted_bytes <= p.budget_bytes - p.budget_bytes // 1000 for p in frontier(profile))


def test_the_optimizers_step_needs_no_room() -> None:
    profile = replace(unequal_profile(), device="cuda:0 (a test)")
    residents = replace(profile.residents, optimizer_transient_bytes=10 * profile.plain_bytes)
    profile = replace(profile, residents=residents)
    assert minimum_budget(profile) == residents.optimizer_peak_bytes
    assert plan(profile, residents.optimizer_peak_bytes).predicted_bytes == residents.optimizer_peak_bytes


def test_more_bytes_never_take_more_seconds() -> None:
    profile = unequal_profile()
    low, high = minimum_budget(profile), profile.plain_bytes
    plans = [plan(profile, low + (high - low) * step // 20) for step in range(21)]
    assert all(found.predicted_bytes <= found.budget_bytes for found in plans)
    assert all(b.predicted_s <= a.predicted_s * (1 + 1e-9) for a, b in pairwise(plans))
    assert plans[-1].keeps_everything
    assert plans[-1].predicted_s == pytest.approx(profile.plain.seconds)


def test_budgets_are_sizes() -> None:
    profile = unequal_profile()
    assert plan(profile, "1GiB").budget_bytes == 2**30
    assert plan(profile, "1GiB").keeps_everything
    with pytest.raises(SizeError, match="8 apples"):
        plan(profile, "8 apples")


def test_the_optimizers_floor_is_no_matter_of_activations() -> None:
    profile = unequal_profile()
    heavy = replace(profile, residents=replace(profile.residents, optimizer_transient_bytes=10**8))
    floor = heavy.residents.optimizer_peak_bytes
    with pytest.raises(
        BudgetError, match=r"The optimizer's own step needs 95\.\d MiB .*lighter optimizer"
    ) as caught:
        plan(heavy, floor - 1)
    assert caught.value.smallest_bytes == minimum_budget(heavy) == floor
    assert plan(heavy, floor).predicted_bytes == floor
    assert plan(heavy, floor).keeps_everything


def test_a_floor_without_an_optimizer() -> None:
    profile = unequal_profile()
    residents = replace(
        profile.residents, optimizer_bytes=0, optimizer_transient_bytes=0, gradient_bytes=10**8
    )
    heavy = replace(profile, residents=residents)
    with pytest.raises(BudgetError, match=r"^Apart from activations, the step needs 95\.\d MiB") as caught:
        plan(heavy, residents.optimizer_peak_bytes - 1)
    assert "optimizer" not in str(caught.value)


def test_what_segments_hold_besides_their_input_counts() -> None:
    """Buffers are copied for the replay: that is part of the prediction."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(12)]
    profile = recoup.measure(nn.Sequential(*layers), torch.randn(64, 8), loss=torch.sum, accumulates=True)
    found = plan(profile, minimum_budget(profile))
    assert any(not isinstance(item, Leaf) for item in found.items)
    assert found.predicted_bytes == found.schedule.predicted.peak_bytes
    without = [value for value in profile.problem.values if value.name != "copies for a replay"]
    copied_bytes = (2 * 8 + 2) * 4
    assert {v.num_bytes for v in profile.problem.values if v not in without} == {copied_bytes}
    alone = simulate(replace(profile.problem, values=tuple(without)), found.schedule.schedule)
    num_units = sum(item.last - item.first + 1 for item in found.items if not isinstance(item, Leaf))
    assert 0 < found.predicted_bytes - alone.peak_bytes <= num_units * copied_bytes


# Depth


def activation_bytes(num_units: int) -> int:
    """At the smallest budget, with all gradients there from the start: nothing but activations can give way."""
    profile = profile_of(num_units, True)
    fixed = profile.residents.total_bytes + profile.residents.gradient_bytes
    return minimum_budget(profile) - fixed


@pytest.mark.parametrize(
    "depths",
    slow_but([(25, 50, 100)], [(25, 50, 100), (50, 100, 200), (50, 100, 400), (50, 100, 200, 400, 1000)]),
)
def test_the_smallest_budget_grows_with_the_logarithm_of_the_depth(depths: tuple[int, ...]) -> None:
    """Up to a few hundred units. More are planned in a hundred groups, whose inner outputs are there together."""
    sizes = {depth: activation_bytes(depth) for depth in depths}
    output_bytes = 64 * 8 * 4
    for depth, size in sizes.items():
        grown = (size - sizes[50]) / output_bytes
        assert grown <= max(math.log2(depth / 50), depth / 100), depth
    assert sizes[depths[-1]] < math.sqrt(depths[-1] / 50) * sizes[50]


# The frontier


def test_frontier() -> None:
    profile = unequal_profile()
    points = frontier(profile, num_points=8)
    assert 2 <= len(points) <= 8
    assert points[0].budget_bytes == minimum_budget(profile)
    assert points[-1].keeps_everything
    assert all(point.predicted_bytes == point.budget_bytes for point in points)
    assert all(a.budget_bytes < b.budget_bytes and a.predicted_s > b.predicted_s for a, b in pairwise(points))
    for point in points:
        assert plan(profile, point.budget_bytes).predicted_s == pytest.approx(point.predicted_s)


def test_frontier_at_chosen_budgets() -> None:
    profile = unequal_profile()
    low = minimum_budget(profile)
    points = frontier(profile, budgets=[low - 1, low, "1GiB"])
    assert [point.predicted_bytes for point in points] == [low, profile.plain_bytes]


# What a plan says


def handmade(items: list[object]) -> ModelPlan:
    model = Chain(6)
    recipes = (KEEP, RECOMPUTE, Recipe(inner=("linear",)), Recipe(whole=True, inner=("norm", "linear")))
    return make_plan(model, model.names, items, recipes)


def test_units_that_are_treated_alike_share_a_line() -> None:
    items = [*keep(0, 1), *replay(2, 3, 4), Leaf(5, 2)]
    assert handmade(items).describe_units() == [
        ("units.0-1", "keep"),
        ("units.2-4", "recompute"),
        ("units.5", "recompute linear"),
    ]


def test_segments_have_lines_of_their_own() -> None:
    items = [segment(keep(0, 1)), segment(segment(keep(2)), keep(3)), segment(Leaf(4, 2)), Leaf(5, 3)]
    assert handmade(items).describe_units() == [
        ("units.0-1", "segment of 2, recomputed together"),
        ("units.2-3", "segment of 2, recomputed together, nested 2 deep"),
        ("units.4", "recompute, then again linear"),
        ("units.5", "recompute, then again norm, linear"),
    ]


def test_neighbours_of_other_names_are_spelled_out() -> None:
    profile = unequal_profile()
    assert plan(profile, "1GiB").describe_units() == [("0[0:2] to 3", "keep")]


def test_a_plan_prints() -> None:
    found = handmade([*replay(0, 1, 2), *keep(3, 4, 5)])
    lines = str(found).splitlines()
    assert lines[0].startswith(
        f"Chain within {found.budget_bytes} B: predicted peak {found.predicted_bytes} B (plain "
    )
    assert lines[1:] == ["  units.0-2: recompute", "  units.3-5: keep"]
    assert repr(found).startswith("ModelPlan(schedule=Plan(")


def test_what_segments_hold_does_not_take_many_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner does not know of it, so a plan may need more than the budget, and is then made again for less."""
    model = Llama(64, 12, 4, 1, 176, 1000)

    def in_double(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = x.double()  # a copy, so that a kept block does without its input and a replayed one does not
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight

    monkeypatch.setattr(type(model.norm), "forward", in_double)
    torch.manual_seed(0)
    profile = recoup.measure(model, torch.randint(500, (2, 128)))
    low, high = minimum_budget(profile), profile.plain_bytes
    calls: list[int] = []
    solve = Session.find
    monkeypatch.setattr(Session, "find", lambda *args: (calls.append(1), solve(*args))[1])
    for share in (0.0, 0.001, 0.01, 0.02, 0.05, 0.1, 0.2):
        calls.clear()
        assert plan(profile, int(low + share * (high - low))).predicted_bytes <= low + share * (high - low)
        assert len(calls) <= 16


def test_a_refused_budget_says_what_it_consists_of_and_what_would_lower_it() -> None:
    """Activations of a leaf, or parameters and the optimizer's state: other advice for each."""
    small, large = nn.Sequential(nn.Linear(8, 8), nn.MaxPool1d(2)), nn.Sequential(nn.Linear(256, 256))
    sample = torch.randn(4096, 8)
    with pytest.raises(BudgetError, match=r"128 KiB sample and other tensors\).*smaller batch"):
        recoup.fit(small, sample, budget="100KiB", loss=lambda y: y.square().mean())
    with pytest.raises(
        BudgetError, match=r"128 KiB sample.* activations and workspace there\. Raise"
    ) as caught:
        recoup.fit(small, sample, budget="140KiB", loss=lambda y: y.square().mean())
    assert "split" not in str(caught.value)
    assert "lighter optimizer" not in str(caught.value)
    profile = recoup.measure(
        large, torch.randn(8, 256), loss=torch.sum, optimizer=torch.optim.AdamW(large.parameters())
    )
    # Above what the optimizer's own step needs, below what the loss needs beside it.
    floor = profile.residents.optimizer_peak_bytes
    with pytest.raises(BudgetError, match="optimizer") as caught:
        recoup.plan(profile, floor - 1)
    assert "lighter optimizer" in str(caught.value)


def test_what_a_profile_knows_of_its_tightest_plan_is_small() -> None:
    """Ranks send profiles to each other: with the tables of its solvers, one of 40 units had 330 MB."""
    torch.manual_seed(0)
    model = nn.Sequential(*(block(8) for _ in range(24)))
    profile = recoup.measure(model, torch.randn(64, 8), loss=torch.sum)
    smallest = minimum_budget(profile)
    for budget in (smallest, smallest + 64):
        plan(profile, budget)
    with pytest.raises(BudgetError):
        plan(profile, smallest - 1)
    other = recoup.measure(model, torch.randn(64, 8), loss=torch.sum)
    plan(other, smallest)
    for one in (profile, other):
        assert len(pickle.dumps(one)) < 10 * len(one.to_json())
    assert plan(pickle.loads(pickle.dumps(profile)), smallest).schedule == plan(profile, smallest).schedule
