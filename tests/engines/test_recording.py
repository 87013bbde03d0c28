"""Memory over a real step: every change on the CPU, looked at now and then elsewhere."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from torch import nn

from recoup.devices.meter import CpuMeter, Meter, make_meter
from recoup.engines.recording import MOST_POINTS, record, thinned


class Looked(Meter):
    """A meter of the CPU that cannot be watched all the time, as CUDA's cannot."""

    def __init__(self) -> None:
        self.cpu = CpuMeter()

    def watching(self) -> Any:
        return self.cpu.watching()

    def live_bytes(self) -> int:
        return self.cpu.live_bytes()

    def peak_bytes(self) -> int:
        return self.cpu.peak_bytes()

    def begin(self) -> int:
        return self.cpu.begin()

    def stamp(self) -> float:
        return self.cpu.stamp()

    def elapsed_s(self, first: float, second: float) -> float:
        return self.cpu.elapsed_s(first, second)

    def fill_queue(self, seconds: float = 0.0) -> None:
        pass

    def device_name(self) -> str:
        return self.cpu.device_name()

    def free_bytes(self) -> int:
        return self.cpu.free_bytes()

    def total_bytes(self) -> int:
        return self.cpu.total_bytes()


def model_and_step() -> tuple[nn.Sequential, Any]:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)])
    x = torch.ones(64, 32)
    return model, lambda: model(x).sum().backward()


def test_every_change_on_the_cpu() -> None:
    _, step = model_and_step()
    meter = CpuMeter()
    with meter.watching():
        peak_bytes, points = record(meter, step)
        assert meter.tracker.observer is None
    assert max(num_bytes for _, num_bytes in points) == peak_bytes
    assert [time_s for time_s, _ in points] == sorted(time_s for time_s, _ in points)
    # Three linears' gradients are left, nothing else.
    assert points[-1][1] == 3 * (32 * 32 + 32) * 4


def test_both_ways_see_the_same_peak() -> None:
    found = []
    for meter in (CpuMeter(), Looked()):
        torch.manual_seed(0)
        _, step = model_and_step()
        with meter.watching():
            found.append(record(meter, step))
    (exact, _), (sampled, points) = found
    assert sampled == exact
    assert max(num_bytes for _, num_bytes in points) == exact
    assert len(points) >= 2


def test_nobody_looks_on_when_the_step_fails() -> None:
    model, _ = model_and_step()
    meter, before = Looked(), threading.active_count()
    with meter.watching(), pytest.raises(RuntimeError, match="shapes"):
        record(meter, lambda: model(torch.ones(2, 5)))
    assert threading.active_count() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recording_does_not_change_the_peak_on_cuda() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(6)]).cuda()
    x = torch.ones(4096, 1024, device="cuda")

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    step()
    model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    plain = torch.cuda.max_memory_allocated() - before
    model.zero_grad()
    meter = make_meter(torch.device("cuda", 0))
    with meter.watching():
        peak_bytes, points = record(meter, step)
    assert peak_bytes == plain
    assert max(num_bytes for _, num_bytes in points) == plain


@pytest.mark.parametrize("num_points", [1, 2, 499, 500, 501, 5000])
def test_thinning_keeps_the_peak_and_the_end(num_points: int) -> None:
    numbers = random.Random(num_points)
    points = [(index * 1e-3, numbers.randrange(1000)) for index in range(num_points)]
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS
    assert max(num_bytes for _, num_bytes in kept) == max(num_bytes for _, num_bytes in points)
    assert kept[-1] == points[-1]
    assert kept == sorted(kept)


def test_thinning_when_no_time_passes() -> None:
    assert thinned([(0.0, index % 7) for index in range(100)], 4) == [(0.0, 6), (0.0, 1)]
