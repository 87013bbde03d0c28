from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import replace
from typing import Any

import models
import pytest
import torch
import zoo
from real_steps import real_peak_bytes
from tally import Tally
from torch import Tensor, nn

from recoup.measuring import MemoryTracker, Profile, measure
from recoup.model.recipe import KEEP, RECOMPUTE
from recoup.planning import minimum_budget
from recoup.planning.additive_numbers import additive


def mean(output: Tensor) -> Tensor:
    return output.mean()


def bytes_of(profile: Profile) -> list[Any]:
    """All of a problem but the seconds; of the options only the first, since clocks choose and order the others."""
    return [
        (
            unit.name,
            unit.output_bytes,
            unit.gradient_bytes,
            unit.parameter_gradient_bytes,
            unit.runs_once,
            replace(unit.options[0], forward_s=0, backward_s=0, again_s=0),
        )
        for unit in profile.problem.units
    ]


class TestWhereThePlainStepDoesNotFit:
    def make(self) -> tuple[nn.Module, Tensor]:
        blocks = [nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32)) for _ in range(12)]
        return nn.Sequential(*blocks), torch.randn(512, 32)

    def test_it_needs_no_more_than_the_smallest_budget(self) -> None:
        model, x = self.make()
        free = measure(model, x, loss=mean)
        least = minimum_budget(free.problem) - free.problem.resident_bytes
        assert 2 * least < real_peak_bytes(model, x, mean)
        with MemoryTracker(limit_bytes=least) as memory:
            profile = measure(model, x, loss=mean)
            assert memory.current_bytes == 0
            with pytest.raises(torch.OutOfMemoryError):
                mean(model(x)).backward()
        assert bytes_of(profile) == bytes_of(free)

    @pytest.mark.parametrize("name", ["GPT", "U-Net, skips", "LSTM, shared weights"])
    def test_models_that_people_train(self, name: str) -> None:
        model, sample, loss = zoo.MODELS[name](False)
        free = measure(model, sample, loss=loss)
        least = minimum_budget(free.problem) - free.problem.resident_bytes
        assert least < real_peak_bytes(model, sample, loss)
        with MemoryTracker(limit_bytes=least):
            profile = measure(model, sample, loss=loss)
        assert [unit.name for unit in profile.units] == [unit.name for unit in free.units]

    def test_a_unit_that_does_not_fit_by_itself_is_named(self) -> None:
        model, x = self.make()
        # Less than one block's forward.
        with MemoryTracker(limit_bytes=512 * 96 * 4), pytest.raises(torch.OutOfMemoryError):
            measure(model, x, loss=mean)
        # Enough for each forward, not for any backward.
        text = r"Unit '0' alone does not fit the memory"
        with MemoryTracker(limit_bytes=3 * 512 * 96 * 4), pytest.raises(torch.OutOfMemoryError, match=text):
            measure(model, x, loss=mean)


CALLS = Tally()
NUM_PASSES = 5
"""Watch the calls, look, time what is inside, measure bytes, measure seconds: each runs every unit once."""


class Counted(nn.Module):
    def __init__(self, index: int, hidden: int = 8) -> None:
        super().__init__()
        self.index = index
        self.up, self.down = nn.Linear(6, hidden), nn.Linear(hidden, 6)

    def forward(self, x: Tensor) -> Tensor:
        CALLS.add(self.index)
        return self.down(self.up(x).tanh())


class TestKinds:
    @pytest.fixture(autouse=True)
    def _no_calls_yet(self) -> None:
        CALLS.take()

    def test_equal_blocks_are_measured_once(self) -> None:
        model = nn.Sequential(*(Counted(index) for index in range(5)), nn.Linear(6, 1))
        profile = measure(model, torch.randn(4, 6), loss=mean)
        # The first one's argument, the sample, needs no gradient: it is a kind of its own.
        assert [unit.kind for unit in profile.units] == [0, 1, 1, 1, 1, 2, -1]
        calls = Counter(CALLS.take())
        assert [calls[index] for index in (2, 3, 4)] == [NUM_PASSES] * 3
        assert calls[1] > NUM_PASSES

    def test_blocks_that_differ_are_measured_each(self) -> None:
        blocks = [Counted(0), Counted(1), Counted(2, hidden=9), Counted(3)]
        blocks[3].up.requires_grad_(False)
        model = nn.Sequential(nn.Linear(6, 6), *blocks)
        profile = measure(model, torch.randn(4, 6), loss=mean, units=lambda name, module: name.isdigit())
        assert [unit.kind for unit in profile.units] == [0, 1, 1, 2, 3, -1]
        calls = Counter(CALLS.take())
        assert calls[1] == NUM_PASSES
        assert all(calls[index] > NUM_PASSES for index in (0, 2, 3))

    def test_a_mode_makes_a_kind(self) -> None:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(4)))
        model[2].eval()
        kinds = [unit.kind for unit in measure(model, torch.randn(4, 6), loss=mean).units]
        assert kinds == [0, 1, 2, 1, -1]

    def test_shapes_make_kinds_of_one_modules_calls(self) -> None:
        class Shrinking(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.block = Counted(0)

            def forward(self, x: Tensor) -> Tensor:
                for _ in range(3):
                    x = self.block(x)
                return self.block(x[:2])

        profile = measure(Shrinking(), torch.randn(4, 6), loss=mean, units="block")
        names = [(unit.name, unit.kind, unit.call) for unit in profile.units if not unit.is_code]
        # The last call gives no gradient that another one gave before it; the first one's argument needs none.
        assert names == [("block", 0, 0), ("block#2", 1, 1), ("block#3", 1, 2), ("block#4", 2, 3)]


def test_a_cell_called_at_every_step() -> None:
    model, sample = models.Recurrent(models.plainly), models.Recurrent.sample()
    profile = measure(model, sample)
    assert [unit.name for unit in profile.units] == [
        "before cell",
        "cell",
        "cell#2",
        "cell#3",
        "cell#4",
        "loss",
    ]
    assert [unit.call for unit in profile.units] == [0, 0, 1, 2, 3, 0]
    # The last call's backward runs first: there the shared weights' gradients appear.
    gradients = [unit.parameter_gradient_bytes for unit in profile.problem.units]
    assert gradients == [0, 0, 0, 0, 4 * 7 * (5 + 7 + 1 + 1) * 4, 0]


def test_unsafe_units_are_only_kept() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)) for _ in range(4)))
    profile = measure(model, torch.randn(4, 6), loss=mean, unsafe={"2": "it drifts"})
    # What holds for one holds for all of its kind.
    assert [unit.unsafe for unit in profile.units] == ["", "it drifts", "it drifts", "it drifts", ""]
    assert [unit.recipes for unit in profile.units[1:4]] == [(KEEP,)] * 3
    assert RECOMPUTE in profile.units[0].recipes


def test_a_unit_without_gradients_is_only_kept() -> None:
    model = nn.Sequential(nn.Linear(6, 9).requires_grad_(False), nn.Linear(9, 3))
    profile = measure(model, torch.randn(4, 6), loss=mean)
    assert profile.units[0].recipes == (KEEP,)
    # The second layer saves it, so that it is an output; a gradient it has none.
    first = additive(profile.problem).units[0]
    assert (first.output_bytes, first.gradient_bytes) == (4 * 9 * 4, 0)


def test_an_option_of_the_problem_for_every_recipe() -> None:
    model = zoo.MODELS["GPT"](False)
    profile = measure(model.model, model.sample)
    for unit, planned in zip(profile.units, profile.problem.units, strict=True):
        assert unit.name == planned.name
        assert [recipe.name for recipe in unit.recipes] == [option.name for option in planned.options]
    seconds = profile.problem.units[5].options
    assert all(option.forward_s > 0 and option.backward_s > 0 for option in seconds)
    assert str(profile).startswith("GPT on cpu: 10 unit calls of ")


def test_a_profile_in_words() -> None:
    profile = measure(nn.Linear(64, 32), torch.randn(16, 64), loss=mean)
    assert "Linear on cpu: 1 unit calls of 1 kinds; plain step " in str(profile)
    assert "(8.12 KiB parameters, 8.12 KiB gradients, 0 B optimizer)" in str(profile)
    # 64 x 32 + 32 parameters; the output, its gradient, the loss and its gradient. No optimizer, so no more.
    parameters, output = (64 * 32 + 32) * 4, 16 * 32 * 4
    assert profile.plain_bytes == 16 * 64 * 4 + 2 * parameters + 2 * output + 4 + 4
    assert profile.activation_bytes == 2 * output + 4 + 4


def test_an_optimizer_may_set_the_peak() -> None:
    model = nn.Linear(64, 32)
    optimizer = torch.optim.Adam(model.parameters())
    profile = measure(model, torch.randn(2, 64), loss=mean, optimizer=optimizer)
    assert profile.residents.optimizer_transient_bytes > 0
    assert profile.plain_bytes == profile.residents.optimizer_peak_bytes > profile.plain.peak_bytes


def test_what_does_not_fit_in_one_unit_may_fit_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that do the same are timed once, unless that one cannot run in the way of another."""
    module = importlib.import_module("recoup.measuring.measure")
    measure_bytes = module.measure_bytes

    def cramped(call: Any, recipe: Any, *args: Any, **options: Any) -> Any:
        if call.name == "layers.1" and recipe == KEEP:
            raise torch.OutOfMemoryError("no room")
        return measure_bytes(call, recipe, *args, **options)

    case = zoo.MODELS["mixture of experts"](False)
    kinds = [unit.kind for unit in measure(case.model, case.sample).units[:8]]
    assert len(set(kinds)) > 2  # which differ in their bytes alone
    monkeypatch.setattr(module, "measure_bytes", cramped)
    units = measure(case.model, case.sample).units[:8]
    assert [KEEP in unit.recipes for unit in units] == [True, False, *[True] * 6]
    assert all(RECOMPUTE in unit.recipes for unit in units)
