"""What plans of every kind are predicted to need, against real steps under them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from real_steps import real_peak_bytes
from torch import Tensor, nn

import recoup
from recoup.engines import ModelPlan
from recoup.measuring import Profile, measure
from recoup.planning import Action, Backward, Forward, Keep, Phase, Problem, Schedule, Use, simulate


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def plan_of(profile: Profile, schedule: Schedule) -> ModelPlan:
    """A plan that no planner need find."""
    plain = recoup.plan(profile, profile.plain_bytes)
    predicted = simulate(profile.problem, schedule)
    found = replace(plain.schedule, schedule=schedule, predicted=predicted)
    return ModelPlan(profile, found, predicted.peak_bytes)


def missed_bytes(model: nn.Module, sample: Any, profile: Profile, schedule: Schedule) -> int:
    """What a real step under a schedule needs beyond its prediction."""
    chosen = plan_of(profile, schedule)
    recoup.apply(model, chosen)
    try:
        peak_bytes = real_peak_bytes(model, sample, mean_square)
    finally:
        recoup.remove(model)
    return profile.problem.resident_bytes + peak_bytes - chosen.predicted_bytes


def missed_by_plans(model: nn.Module, sample: Any, kind: Any) -> list[int]:
    """The same under a dozen random schedules of a kind."""
    profile, rng = measure(model, sample, loss=mean_square), random.Random(0)
    return [missed_bytes(model, sample, profile, kind(profile.problem, rng)) for _ in range(12)]


def options_each(problem: Problem, rng: random.Random) -> Schedule:
    """Every unit under any of its options."""
    chosen = [rng.randrange(len(unit.options)) for unit in problem.units]
    forwards = [Forward(unit, keep=Keep.OPTION, option=option) for unit, option in enumerate(chosen)]
    backwards = [Backward(unit, option=option) for unit, option in enumerate(chosen)]
    return Schedule([*forwards, *reversed(backwards)])


def segments(problem: Problem, rng: random.Random) -> Schedule:
    """Units that are kept, and segments whose units are kept when they are replayed."""
    forwards: list[Action] = []
    backwards: list[list[Action]] = []
    unit = 0
    while unit < problem.num_units:
        last = unit
        if not problem.units[unit].runs_once and rng.random() < 0.6:
            forwards.append(Forward(unit, keep=Keep.INPUT))
            while not problem.units[last + 1].runs_once and rng.random() < 0.5:
                last += 1
                forwards.append(Forward(last))
            replay: list[Action] = list(kept(unit, last))
        else:
            forwards.append(Forward(unit, keep=Keep.OPTION, option=0))
            replay = []
        backwards.append([*replay, *(Backward(k, option=0) for k in reversed(range(unit, last + 1)))])
        unit = last + 1
    return Schedule([*forwards, *(action for part in reversed(backwards) for action in part)])


def kept(first: int, last: int) -> Iterator[Forward]:
    return (Forward(unit, keep=Keep.OPTION, option=0) for unit in range(first, last + 1))


class TestLayersThatCopyTheirInput:
    """An encoder's layers save a copy of their input and not the input, unless a checkpoint inside them does."""

    def make(self) -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(4, 16, 32)

    input_bytes = 4 * 16 * 32 * 4
    norm_bytes = 32 * 4
    """A backward is taken to need the gradients of all parameters at once; the last one comes when room is free."""

    def test_only_options_that_do_without_it_free_it(self) -> None:
        model, sample = self.make()
        problem = measure(model, sample, loss=mean_square).problem
        for index, unit in enumerate(problem.units[1:4], start=1):
            [given] = [value for value in problem.values if value.made == Use(Phase.FORWARD, index - 1)]
            assert given.num_bytes == self.input_bytes
            [read] = [use for use in given.read if (use.phase, use.unit) == (Phase.BACKWARD, index)]
            held = {unit.options[option].name for option in read.options}
            assert "keep" not in held
            assert held >= {"recompute", *(o.name for o in unit.options if "self_attn" in o.name)}

    @pytest.mark.parametrize("kind", [options_each, segments])
    def test_no_plan_needs_more_than_predicted(self, kind: Any) -> None:
        missed = missed_by_plans(*self.make(), kind)
        assert all(-self.norm_bytes <= num_bytes <= 0 for num_bytes in missed), missed


class Level(nn.Module):
    """A level of a U-Net, whose skip is joined with what the levels below make of it."""

    def __init__(self, width: int, below: nn.Module | None) -> None:
        super().__init__()
        self.first, self.below = nn.Sequential(nn.Linear(width, width), nn.Tanh()), below
        self.down = nn.Sequential(nn.Linear(width, 2 * width), nn.Softplus())
        self.last = nn.Sequential(nn.Linear(3 * width, width), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(x)
        y = self.down(skip)
        if self.below is not None:
            y = self.below(y)
        return self.last(torch.cat([skip, y], 1))


class TestSkips:
    """A skip's gradient waits as part of the gradient of what it was joined to, also while units are replayed."""

    def make(self) -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        return Level(8, Level(16, Level(32, None))), torch.randn(512, 8)

    def test_a_skip_waits_with_all_that_its_gradient_is_a_view_of(self) -> None:
        model, sample = self.make()
        problem = measure(model, sample, loss=mean_square).problem
        names = [unit.name for unit in problem.units]
        made = Use(Phase.BACKWARD, names.index("before last"))
        [joined] = [value for value in problem.values if value.made == made]
        assert joined.num_bytes == 512 * 3 * 8 * 4
        assert [names[use.unit] for use in joined.read] == ["down", "below.last"]
        # The user holds the output, and the loss has a gradient too.
        assert sum(value.num_bytes for value in problem.values if value.stays) == (
            problem.resident_bytes + 512 * 8 * 4 + 4 + 4
        )

    @pytest.mark.parametrize("kind", [options_each, segments])
    def test_no_plan_needs_more_than_predicted(self, kind: Any) -> None:
        missed = missed_by_plans(*self.make(), kind)
        assert max(missed) == 0, missed


class Switched(nn.Module):
    """What it saves, and what it makes, depends on a setting that is no module and is not printed."""

    def __init__(self, saves: bool, makes: bool) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(16, 16), (saves, makes)

    def forward(self, x: Tensor) -> Tensor:
        saves, makes = self.how
        y = self.layer(x).tanh()
        if makes:
            y = y + 1
        return y.exp() * y.sin() if saves else y.exp()


class TestUnitsOfOneClassThatDiffer:
    def make(self) -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        ways = [(False, False), (True, False), (False, True), (True, True), (False, False)]
        return nn.Sequential(*(Switched(*way) for way in ways)), torch.randn(64, 16)

    def test_each_way_is_a_kind(self) -> None:
        profile = measure(*self.make(), loss=mean_square)
        assert [unit.kind for unit in profile.units] == [0, 1, 2, 3, 4, -1]
        assert profile.units[0].recipes == profile.units[4].recipes

    @pytest.mark.parametrize("kind", [options_each, segments])
    def test_no_plan_needs_more_than_predicted(self, kind: Any) -> None:
        missed = missed_by_plans(*self.make(), kind)
        assert max(missed) == 0, missed


def test_a_unit_that_is_replayed_again_in_a_segment_copies_its_buffers_twice() -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(4)]
    model, sample = nn.Sequential(*layers), torch.randn(64, 8)
    profile = measure(model, sample, loss=mean_square)
    option = [recipe.name for recipe in profile.units[0].recipes].index("recompute")
    forwards = [Forward(unit, keep=Keep.INPUT) for unit in range(4)]
    actions: list[Action] = [*forwards, Forward(4, keep=Keep.OPTION, option=0), Backward(4, option=0)]
    for unit in reversed(range(4)):
        actions += [Forward(unit, keep=Keep.OPTION, option=option), Backward(unit, option=option)]
    # Mean, variance and number of batches. While a unit is replayed, a third copy of its own lives.
    assert missed_bytes(model, sample, profile, Schedule(actions)) <= 2 * 8 * 4 + 8


class Routed(nn.Module):
    """Rows go to two of four experts each; the choice is kept for the replay."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, 4)
        self.experts = nn.Linear(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(self.norm(x)).topk(2)
        made = self.experts(x).tanh().view(len(x), 4, -1)
        picked = made.gather(1, chosen[..., None].expand(-1, -1, made.shape[-1]))
        return x + (picked * weights.softmax(-1)[..., None]).sum(1)


class TestDecisions:
    """A segment holds the decisions of all its calls until the backward of the first has run."""

    @pytest.mark.parametrize("kind", [options_each, segments])
    def test_no_plan_needs_more_than_predicted(self, kind: Any) -> None:
        torch.manual_seed(0)
        model, sample = nn.Sequential(*(Routed(8) for _ in range(5))), torch.randn(256, 8)
        missed = missed_by_plans(model, sample, kind)
        assert max(missed) == 0, missed


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        self.up, self.gelu, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(self.gelu(self.up(self.norm(x)))))


class TestSumsBetweenUnits:
    """Each block's sum is code: it makes something, though as much goes meanwhile."""

    @pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
    def test_exactly(self, share: float) -> None:
        torch.manual_seed(0)
        model, sample = nn.Sequential(*(Residual(16) for _ in range(4))), torch.randn(64, 16)
        profile = measure(model, sample, loss=mean_square, units=["*.*"])
        assert [unit.name for unit in profile.units if unit.is_code] == [
            "before 1.norm", "before 2.norm", "before 3.norm", "loss"
        ]  # fmt: skip
        low = recoup.minimum_budget(profile)
        chosen = recoup.plan(profile, int(low + share * (profile.plain_bytes - low)))
        assert missed_bytes(model, sample, profile, chosen.schedule.schedule) == 0


class Sliced(nn.Module):
    """A head that is given a view of what the layer before returned, as those of language models are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.head = nn.Sequential(nn.Linear(16, 48), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0:])


def test_no_segment_reaches_over_a_view() -> None:
    torch.manual_seed(0)
    model, sample = Sliced(), torch.randn(64, 8, 16)
    profile = measure(model, sample, loss=mean_square, units=["layers.*", "head"])
    assert {unit.name: unit.runs_once for unit in profile.problem.units} == {
        "layers.0": False, "layers.1": False, "layers.2": True, "head": False, "loss": True
    }  # fmt: skip
    rng = random.Random(0)
    missed = [missed_bytes(model, sample, profile, segments(profile.problem, rng)) for _ in range(12)]
    assert max(missed) == 0, missed
