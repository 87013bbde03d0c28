"""The smallest budget of captured units: by bytes alone, whatever was timed, and no larger than eager code's."""

from __future__ import annotations

import random
import re
from importlib import import_module
from typing import Any

import pytest
import torch
from engines.captured_models import MODELS
from slowly import slow_but

import recoup
from recoup.capture import run
from recoup.capture.seconds import OperationSeconds
from recoup.errors import BudgetError

# The compiler looks at the gradients of what it is given.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf.*:UserWarning"
)

measuring = import_module("recoup.measuring.measure")
NAMES = ["U-Net", "GPT-2", "Llama", "ViT"]
IS_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
MORE = {"U-Net": 32, "ViT": 3936} if IS_OLD else {}
"""Bytes that captured units need beyond eager ones at the smallest budget, as found with torch 2.11."""


def perturb(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Other seconds for every operation and every unit; and nothing is compiled yet, as in another process."""
    time_call = measuring.time_call

    def time_operation(self: OperationSeconds, node: Any) -> float:
        return random.Random(f"{seed} {node.name}").lognormvariate(0, 2) * 1e-6

    def other_seconds(*args: Any, **kwargs: Any) -> Any:
        numbers = random.Random(seed)
        return {
            recipe: type(timing)(
                *(part._replace(device_s=part.device_s * numbers.uniform(0.5, 2.0)) for part in timing)
            )
            for recipe, timing in time_call(*args, **kwargs).items()
        }

    monkeypatch.setattr(OperationSeconds, "_time", time_operation)
    monkeypatch.setattr(measuring, "time_call", other_seconds)
    monkeypatch.setattr(run, "_functions", {})
    monkeypatch.setattr(run, "_graphs", {})


def cuts(profile: Any) -> set[Any]:
    return {recipe for unit in profile.units for recipe in unit.recipes if recipe.by_seconds}


@pytest.mark.parametrize("name", slow_but(["GPT-2", "U-Net", "ViT"], NAMES))
def test_it_does_not_depend_on_seconds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sample = MODELS[name]()
    eager = recoup.measure(model, sample)
    found, by_seconds = [], []
    for seed in range(2):
        with monkeypatch.context() as patch:
            perturb(patch, seed)
            profile = recoup.measure(model, sample, engine="captured")
        found.append(recoup.minimum_budget(profile))
        by_seconds.append(cuts(profile))
        # What the backward has read is freed, as in eager code.
        assert profile.plain_bytes <= eager.plain_bytes
    assert len(set(found)) == 1
    assert found[0] <= recoup.minimum_budget(eager) + MORE.get(name, 0)
    if name in ("GPT-2", "Llama"):
        assert by_seconds[0] != by_seconds[1]  # the seconds were others


@pytest.mark.parametrize(
    ("name", "units"),
    [("GPT-2", "transformer.h.*"), pytest.param("Llama", "model.layers.*", marks=pytest.mark.slow)],
)
def test_a_refusal_names_it_and_another_fit_accepts_it(
    name: str, units: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sample = MODELS[name]()
    # No finer units, and one kind of loop: fewer measurements.
    given: dict[str, Any] = {"units": units, "holds_output": True, "engine": "captured"}
    budget, found = recoup.measure(model, sample, **given).residents.optimizer_peak_bytes, []
    for seed in range(2):
        with monkeypatch.context() as patch:
            perturb(patch, seed)
            with pytest.raises(BudgetError, match=re.escape("verified on a real step")) as refused:
                recoup.fit(model, sample, budget=budget, **given)
        found.append(refused.value.smallest_bytes)
    assert found[0] == found[1]
    for seed in (2, 3):
        with monkeypatch.context() as patch:
            perturb(patch, seed)
            fitted = recoup.fit(model, sample, budget=found[0], race=False, **given)
        assert fitted.verification is not None
        assert fitted.verification.peak_bytes <= found[0]
        assert fitted.verification.gradients == "bit-equal"
        recoup.remove(model)
