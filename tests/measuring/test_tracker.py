from __future__ import annotations

import pytest
import torch
from torch import nn

from recoup.measuring import MemoryTracker


def test_views_and_aliases_count_once() -> None:
    before = torch.zeros(100)
    with MemoryTracker() as memory:
        x = before[:50].view(5, 10)
        assert memory.current_bytes == 0
        y = x + 1
        assert memory.current_bytes == 200
        z = y.t().reshape(-1)
        assert memory.current_bytes == 400
        w = y.view(-1)[3:]
        assert memory.current_bytes == 400
        del x, z, y
        assert memory.current_bytes == 200  # w still holds y's storage
        del w
        assert memory.current_bytes == 0
        assert memory.peak_bytes == 400


def test_in_place_operations_count_nothing() -> None:
    x = torch.zeros(10)
    with MemoryTracker() as memory:
        x.add_(1).mul_(2)
        assert memory.peak_bytes == 0


@pytest.mark.usefixtures("no_gc")
def test_a_training_step_counts_exactly() -> None:
    layer = nn.Sequential(nn.Linear(10, 20, bias=False), nn.Sigmoid(), nn.Linear(20, 5, bias=False))
    x = torch.randn(3, 10)
    with MemoryTracker() as memory:
        loss = layer(x).sum()
        # The sigmoid's result, which two operations save, and the loss.
        assert memory.current_bytes == 3 * 20 * 4 + 4
        loss.backward()
        del loss
        assert memory.current_bytes == (10 * 20 + 20 * 5) * 4


def test_reset_peak() -> None:
    with MemoryTracker() as memory:
        x = torch.zeros(100)
        y = torch.zeros(50)
        del x
        memory.reset_peak()
        assert memory.peak_bytes == 200
        y = y + 1
        assert memory.peak_bytes == 400
