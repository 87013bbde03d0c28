"""Estimates against the GPU itself: peaks within a few per cent, seconds reported as they are."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

import recoup
from recoup.errors import BudgetError
from recoup.measuring import Hardware, find_hardware, measure, measure_hardware

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def here() -> Hardware:
    return measure_hardware()


def real_peak(model: nn.Module, sample: Any, loss: Callable[[Any], Tensor] | None) -> tuple[int, float]:
    """Peak bytes and median seconds of real steps."""
    seconds = []
    for _ in range(9):  # the first ones compare their replays, and later ones ever more rarely
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        output = model(*sample) if isinstance(sample, tuple) else model(sample)
        value = output if loss is None else loss(output)
        value.backward()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
        del output, value
    peak_bytes = torch.cuda.max_memory_allocated()
    model.zero_grad()
    return peak_bytes, sorted(seconds[1:])[1]


def to_cuda(sample: Any) -> Any:
    return tuple(part.cuda() for part in sample) if isinstance(sample, tuple) else sample.cuda()


NAMES = ["GPT", "GPT, dropout, tied", "Llama", "encoder-decoder", "ResNet, BatchNorm", "U-Net, skips"]


@pytest.mark.parametrize("name", NAMES)
def test_peaks_are_those_of_a_real_step(
    name: str, here: Hardware, capsys: pytest.CaptureFixture[str]
) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    case = zoo.MODELS[name](True)
    estimated = measure(case.model, case.sample, loss=case.loss, hardware=here)
    published = measure(case.model, case.sample, loss=case.loss, hardware=find_hardware("H200"))
    model, sample = case.model.cuda(), to_cuda(case.sample)
    peak_bytes, seconds = real_peak(model, sample, case.loss)
    measured = measure(model, sample, loss=case.loss)
    with capsys.disabled():
        print(
            f"\n{name}: peak {peak_bytes / 2**20:.0f} MiB, measured unit by unit"
            f" {measured.plain.peak_bytes / peak_bytes - 1:+.1%}, estimated"
            f" {estimated.plain.peak_bytes / peak_bytes - 1:+.1%}; step {seconds * 1e3:.1f} ms, measured unit by"
            f" unit {measured.plain.seconds / seconds - 1:+.0%}, estimated"
            f" {estimated.plain.seconds / seconds - 1:+.0%} (published figures"
            f" {published.plain.seconds / seconds - 1:+.0%})"
        )
    assert estimated.plain.peak_bytes == pytest.approx(peak_bytes, rel=0.03)


def test_recomputed_peaks_are_those_of_a_real_step(here: Hardware) -> None:
    case = zoo.MODELS["Llama"](True)
    estimated = measure(case.model, case.sample, hardware=here)
    low, high = recoup.minimum_budget(estimated), estimated.plain_bytes
    plan = recoup.plan(estimated, (low + high) // 2)
    model, sample = case.model.cuda(), to_cuda(case.sample)
    recoup.apply(model, plan)
    peak_bytes, _ = real_peak(model, sample, None)
    assert plan.schedule.predicted.peak_bytes == pytest.approx(peak_bytes, rel=0.03)


def test_the_largest_batch_is_as_good_as_a_hand_search(capsys: pytest.CaptureFixture[str]) -> None:
    model = zoo.Llama(1024, 8, 16, 4, 4096, 8000).to(torch.bfloat16).cuda()

    def make(batch_size: int) -> tuple[nn.Module, Tensor]:
        return model, torch.randint(8000, (batch_size, 1024), device="cuda")

    chosen = recoup.largest_batch(make, budget="5GiB", most=64)
    by_hand = {}
    for size in range(4, 65, 4):
        try:
            fitted = recoup.fit(model, make(size)[1], budget="5GiB")
        except BudgetError:
            break
        _, seconds = real_peak(model, make(size)[1], None)
        by_hand[size] = size / seconds
        recoup.remove(fitted.model)
    sample = make(chosen.batch_size)[1]
    recoup.apply(model, chosen.plan)
    peak_bytes, seconds = real_peak(model, sample, None)
    speed = chosen.batch_size / seconds
    best = max(by_hand, key=lambda size: by_hand[size])
    with capsys.disabled():
        print(f"\n{chosen}\nreal: {speed:.1f}/s; by hand {best}: {by_hand[best]:.1f}/s; {by_hand}")
    assert peak_bytes <= 5 * 2**30 * 1.03
    assert speed >= 0.95 * by_hand[best]
