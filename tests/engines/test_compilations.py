"""How many functions a fit has compiled: of each kind of unit the engine's own cut, and those that its plan uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engines.captured_models import MODELS, cuts_in
from torch import nn

import recoup
from recoup.capture import run
from recoup.capture.seconds import OperationSeconds
from recoup.measuring.choosing import Choice, worth_compiling
from recoup.measuring.costs_by_kind import CostsByKind
from recoup.measuring.measure import Measurement, begin_measurement, measure_step
from recoup.measuring.measured import Measured
from recoup.measuring.unit.captured import is_further_cut
from recoup.measuring.unit.foreseen import foresee_bytes, foresee_timing
from recoup.model.recipe import Recipe
from recoup.model.step import TrainingStep

pytestmark = [
    # The compiler looks at the gradients of what it is given.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf.*:UserWarning"),
    # Its code generator imports what torch itself calls deprecated.
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method.:DeprecationWarning"),
]

Model = tuple[nn.Module, Any]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The cuts that were compiled; ``None`` for the first of a graph, which is captured."""
    torch.compiler.reset()
    monkeypatch.setattr(run, "_functions", {})
    found: list[Any] = []
    compile_one = run._compiled

    def counting(cut: Any, partition: Any) -> Any:
        found.append(cut.saves)
        return compile_one(cut, partition)

    monkeypatch.setattr(run, "_compiled", counting)
    yield found
    torch.compiler.reset()


def measured_with(model: Model, choose: Callable[[Measured], Choice] | None) -> set[Recipe]:
    """The cuts among the options of a measured step, but for the engine's own."""
    measurement = begin_measurement(TrainingStep(*model), units=None, engine="captured")
    found = measure_step(measurement, accumulates=False, unsafe={}, choose=choose)
    options = {option for call in found.costs.options for option in call}
    return {option.recipe for option in options if is_further_cut(option.recipe)}


def test_a_measurement_without_a_budget_has_every_cut(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OperationSeconds, "_time", lambda self, node: 1.0)
    profile = recoup.measure(*MODELS["Llama"](), engine="captured")
    assert profile.is_captured
    assert compiled[0] is None
    assert len(compiled) == 4  # with equal seconds, cuts by seconds are those by the number of operations


def test_cuts_by_seconds_are_compiled_beside_the_others(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OperationSeconds, "_time", lambda self, node: float(1 + len(node.name)))
    recoup.measure(*MODELS["Llama"](), engine="captured")
    assert 4 < len(compiled) == len(set(compiled)) <= 7


def test_a_fit_whose_plan_keeps_everything_compiles_no_other_cut(compiled: list[Any]) -> None:
    fitted = recoup.fit(*MODELS["Llama"](), budget="1GB", engine="captured")
    assert fitted.profile.is_captured
    assert fitted.plan.keeps_everything
    assert compiled == [None]


def test_a_fit_compiles_what_its_plan_uses(compiled: list[Any]) -> None:
    model, sample = MODELS["Llama"]()
    profile = recoup.measure(model, sample, engine="captured")
    budget = (recoup.minimum_budget(profile) + 9 * profile.plain_bytes) // 10
    run._functions.clear()
    compiled.clear()
    fitted = recoup.fit(model, sample, budget=budget, engine="captured", race=False)
    assert compiled[0] is None
    assert 1 <= len(compiled) <= 3
    assert sum("cut" in cut for cut in cuts_in(fitted.plan)) <= len(compiled) - 1
    assert fitted.verification is not None
    assert fitted.verification.gradients == "bit-equal"
    assert fitted.verification.peak_bytes <= fitted.plan.predicted_bytes <= budget


def test_only_chosen_cuts_are_options(compiled: list[Any]) -> None:
    """A plan that takes half as long with one cut, whatever else there is."""
    wanted: list[Recipe] = []

    def choose(measured: Measured) -> Choice:
        cuts = sorted(
            {
                option.recipe
                for call in measured.costs.options
                for option in call
                if is_further_cut(option.recipe)
            },
            key=lambda recipe: recipe.name,
        )
        wanted[:] = wanted or cuts[:1]
        return Choice(1.0, {wanted[0]: 3}) if wanted[0] in cuts else Choice(2.0, {})

    assert measured_with(MODELS["Llama"](), choose) <= set(wanted)
    assert wanted[0].cut is not None
    assert compiled == [None, wanted[0].cut.saves]


def test_where_nothing_fits_every_cut_is_compiled(compiled: list[Any]) -> None:
    measured_with(MODELS["Llama"](), lambda measured: Choice(1.0, {}, fits=False))
    assert len(compiled) == 4


def test_where_nothing_fits_with_those_measured_every_cut_is_compiled(compiled: list[Any]) -> None:
    """What was foreseen was too little."""
    answers = [Choice(1.0, {}), Choice(1.0, {}, fits=False)]
    measured_with(MODELS["Llama"](), lambda measured: answers.pop(0))
    assert len(compiled) == 4
    assert answers == []


def test_cuts_that_hardly_matter_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three, one is needed, one saves half a percent, and another plan does without the third."""
    needed, little, other = (Recipe(inner=(name,)) for name in ("needed", "little", "other"))
    monkeypatch.setattr("recoup.measuring.choosing.with_foreseen", lambda found: found)
    found = CostsByKind(*[None] * 9, later={"kind": [needed, little], "another": [other]})  # type: ignore[arg-type]

    def plan(found: CostsByKind) -> Choice:
        cuts = {recipe for own in found.later.values() for recipe in own}
        if needed not in cuts:
            return Choice(1.0, {other: 1}, fits=False)
        seconds = 1.0 if little in cuts else 1.005
        return Choice(seconds, {needed: 5, little: 1, other: 2} if little in cuts else {needed: 6})

    assert worth_compiling(found, plan) == {needed}
    assert worth_compiling(found, lambda found: Choice(1.0, {other: 1}, fits=False)) == {other}


@pytest.mark.parametrize("name", ["ViT", "U-Net"])
def test_held_bytes_are_foreseen_exactly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the graph alone, from the engine's own cut, which has run, to cuts that have not."""
    seen: list[CostsByKind] = []
    put_together = Measurement._put_together

    def keep(self: Measurement, found: CostsByKind) -> Measured:
        seen.append(found)
        return put_together(self, found)

    monkeypatch.setattr(Measurement, "_put_together", keep)
    recoup.measure(*MODELS[name](), engine="captured")
    cuts = 0
    for kind, sizes in seen[-1].sizes.items():
        own = seen[-1].own_cut(kind)
        assert own is not None
        for recipe, measured in sizes.items():
            if is_further_cut(recipe):
                assert recipe.cut is not None
                assert foresee_bytes(recipe.cut, sizes[own]).held_bytes == measured.held_bytes
                timing = seen[-1].timings[kind][own]
                assert foresee_timing(recipe.cut, timing).backward.device_s >= timing.backward.device_s
                cuts += 1
    assert cuts >= 3
