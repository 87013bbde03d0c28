"""The meter of a GPU: what it reads does not depend on when other threads run."""

from __future__ import annotations

import gc

import pytest
import torch
import zoo
from torch import nn

from recoup.checkpointing.sampling import sampling
from recoup.devices.meter import Meter, make_meter
from recoup.measuring.unit.one_unit import measure_bytes, time_call
from recoup.model.recipe import KEEP, RECOMPUTE, InnerForward, Recipe
from recoup.model.replace_forward import intercepted
from recoup.model.streaming import UnitCall

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def meter() -> Meter:
    return make_meter(torch.device("cuda", 0))


def call_of(unit: nn.Module, x: torch.Tensor) -> UnitCall:
    return UnitCall(0, "unit", unit, unit.forward, (x,), {})


def test_bytes_are_the_same_each_time(meter: Meter) -> None:
    """Experts are replayed by the thread that runs the backward, which lets go of them after that has returned."""
    model, sample, _ = zoo.MODELS["mixture of experts"](True)
    unit = model.get_submodule("layers.0").cuda()
    call = call_of(unit, sample.cuda().requires_grad_())
    inside = ("router", *(f"experts.{index}" for index in range(4)))
    modules = {unit.get_submodule(name): InnerForward(unit.get_submodule(name)) for name in inside}
    with intercepted(modules), sampling("never"):
        for recipe in (KEEP, RECOMPUTE, Recipe(inner=inside[:3]), Recipe(whole=True, inner=inside)):
            measure_bytes(call, recipe, meter)  # makes the libraries' workspaces
            measured = [measure_bytes(call, recipe, meter) for _ in range(40)]
            assert set(measured) == {measured[0]}
            assert measured[0].held_bytes >= 0


def test_reading_leaves_no_garbage(meter: Meter) -> None:
    gc.collect()
    meter.begin()
    meter.live_bytes()
    assert gc.collect() == 0


def test_the_device_is_timed_without_the_host(meter: Meter) -> None:
    """Operations on nothing: the host is busy with them, the device hardly."""
    unit = nn.Sequential(*(nn.LayerNorm(8) for _ in range(40))).cuda()
    call = call_of(unit, torch.randn(8, 8, device="cuda", requires_grad=True))
    timing = time_call(call, [KEEP], meter, repeats=3, warm_up=1)[KEEP]
    assert timing.forward.host_s > 0
    assert timing.forward.device_s < timing.forward.host_s
    assert timing.backward.device_s < timing.backward.host_s
