"""How many steps and measurements one fit runs: exact numbers, since each costs a user's time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup.checkpointing import frame, sampling
from recoup.devices.meter import CpuMeter, Timing
from recoup.engines.real_steps import RealSteps
from recoup.fitting import one_fit
from recoup.measuring.unit import one_unit
from recoup.model.step import TrainingStep
from recoup.plans.by_hand import plan_by_hand, recomputing
from recoup.plans.model_plan import ModelPlan
from recoup.plans.profile import Profile

NUM_BLOCKS = 6
RECOMPUTED = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(x)


@pytest.fixture
def seconds() -> list[float]:
    """Of the plan's step, of the rival's and of the plain one, in every round."""
    return [0.3, 0.3, 0.3]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, seconds: list[float]) -> Counter[str]:
    """Counts what a fit runs. Its plan recomputes the first four blocks, and one rival recomputes all."""
    seen: Counter[str] = Counter()

    def count(owner: Any, name: str, label: Callable[[], str]) -> None:
        original = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            seen[label()] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    count(RealSteps, "_run", lambda: f"real steps, compared {sampling._mode.samples}")
    count(TrainingStep, "forward", lambda: "forwards")
    count(import_module("recoup.measuring.measure"), "measure_bytes", lambda: "measured options")
    count(one_unit, "forward_and_backward", lambda: "timed runs")
    is_due = frame.is_due

    def counting(fn: Any) -> bool:
        due = is_due(fn)
        seen["compared calls"] += due
        return due

    monkeypatch.setattr(frame, "is_due", counting)

    def time_step(meter: CpuMeter, run: Callable[[], Any]) -> Timing:
        run()
        seconds.append(seconds.pop(0))
        return Timing(seconds[-1], 0.0)

    def plans(profile: Profile, budget_bytes: int) -> tuple[ModelPlan, list[tuple[str, ModelPlan]]]:
        blocks = [index for index, unit in enumerate(profile.units) if unit.module is not None]
        some, every = (
            plan_by_hand(profile, recomputing(profile, units), budget_bytes)
            for units in (blocks[:RECOMPUTED], blocks)
        )
        return some, [("every unit", every)]

    monkeypatch.setattr(CpuMeter, "time_step", time_step)
    monkeypatch.setattr(one_fit, "plan_with_rivals", plans)
    return seen


def fit_blocks() -> recoup.Fitted:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)), nn.Linear(16, 2))
    return recoup.fit(model, torch.randn(64, 16), budget="1GB", loss=lambda y: y.square().mean(), units="*")


def test_a_fit_runs_each_real_step_for_a_purpose(counted: Counter[str], seconds: list[float]) -> None:
    """Two recorded steps, the plan's and the plain one, whose gradients are compared as well; two rounds.

    The rival's first step is not timed. It is no faster in the first round, and does not run in the second.
    """
    fitted = fit_blocks()
    assert fitted.verification is not None
    assert fitted.verification.gradients == "bit-equal"
    assert [one.is_kept for one in fitted.verification.race] == [True, False]
    assert counted == {
        "real steps, compared always": 2,
        "real steps, compared never": 1 + 3 + 2,
        # Of the recomputed blocks the first, whose input needs no gradient, and one of the others, which are alike.
        "compared calls": 2,
        # Those of real steps; to look at the step and to audit it; to time code and modules, to measure, to time units.
        "forwards": 8 + 2 + 3,
        # Keep, recompute, and the module inside recomputed, of the first block, whose input needs no gradient, and of
        # another; keep and recompute of the last layer.
        "measured options": 3 + 3 + 2,
        # Large kinds of units three times and a warm-up, small ones once and a warm-up.
        "timed runs": (3 + 3) * 4 + 2 * 2,
    }


def test_a_rival_that_wins_is_recorded_once(counted: Counter[str], seconds: list[float]) -> None:
    # The rival's first step, which is not timed; then the plan, the rival, the plain step.
    seconds[:] = [0.1, 0.3, 0.2]
    fitted = fit_blocks()
    assert fitted.verification is not None
    assert [one.name for one in fitted.verification.race if one.is_kept] == ["every unit"]
    assert counted["real steps, compared always"] == 3
    assert counted["real steps, compared never"] == 1 + 2 * 3
    # Of a rival all are compared.
    assert counted["compared calls"] == 2 + NUM_BLOCKS
