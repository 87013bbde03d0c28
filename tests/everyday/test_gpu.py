"""The same on a GPU, by the allocator's own peak."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from everyday.subjects import Classifier, gpt2
from torch.nn import functional as F

import recoup
from recoup.devices.allocator import block_bytes
from recoup.engines import is_applied

pytestmark = pytest.mark.gpu


def peak_of(run: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def test_a_mixed_precision_loop_with_scaler_scheduler_and_averages() -> None:
    torch.manual_seed(0)
    model = Classifier(num_blocks=8, width=256).cuda()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler("cuda")
    x, y = torch.randn(8192, 256, device="cuda"), torch.randint(10, (8192,), device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)

    before = copy.deepcopy(
        [model.state_dict(), average.state_dict(), scheduler.state_dict(), scaler.state_dict()]
    )
    profile = recoup.measure(model, step=step, optimizer=optimizer)
    smallest = recoup.minimum_budget(profile)
    budget = (smallest + profile.plain_bytes) // 2
    fitted = recoup.fit(model, step=step, optimizer=optimizer, budget=budget)
    assert is_applied(model)
    after = [model.state_dict(), average.state_dict(), scheduler.state_dict(), scaler.state_dict()]
    for one, other in zip(before, after, strict=True):
        for key, value in one.items():
            assert (
                torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
            ), key
    assert not optimizer.state
    step()
    assert peak_of(step) <= budget
    assert fitted.verification.peak_bytes == pytest.approx(fitted.plan.predicted_bytes, rel=0.05)


def test_logits_that_are_held_or_let_go() -> None:
    model = gpt2(num_layers=2, vocab_size=50_000, n_positions=256).cuda()
    ids = torch.randint(0, 50_000, (16, 256), device="cuda")
    batch = {"input_ids": ids, "labels": ids}
    held = recoup.measure(model, batch)
    let_go = recoup.measure(model, batch, holds_output=False)
    assert held.output_names == "logits"
    assert held.output_bytes == block_bytes(16 * 256 * 50_000 * 4)
    smallest, smaller = recoup.minimum_budget(held), recoup.minimum_budget(let_go)
    assert smallest - smaller > 0.9 * held.output_bytes
    budget = (smallest + smaller) // 2
    fitted = recoup.fit(model, batch, budget=budget)
    assert not fitted.profile.holds_output
    assert "being let go before the backward" in str(fitted)

    def step() -> None:
        model.zero_grad()
        model(**batch).loss.backward()

    step()
    assert peak_of(step) <= budget
