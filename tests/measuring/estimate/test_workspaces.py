"""What convolutions take for themselves on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recoup.measuring import find_hardware, measure
from recoup.measuring.estimate.workspaces import workspace_bytes

FORWARD, BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default


def run(x: Tensor, weight: Tensor, *, groups: int = 1) -> tuple[int, int]:
    """Workspaces of a convolution's forward and backward."""
    space = x.dim() - 2
    how: tuple[Any, ...] = ([2] * space, [1] * space, [1] * space, False, [0] * space, groups)
    args = (x, weight, None, *how)
    y = FORWARD(*args)
    backward = (torch.empty_like(y), x, weight, None, *how, [True, True, False])
    return workspace_bytes(FORWARD, args, y), workspace_bytes(BACKWARD, backward, BACKWARD(*backward))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(9,), (9, 7), (9, 7, 5)], ids=["1d", "2d", "3d"])
def test_channels_first_are_copied(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    with torch.device("meta"):
        x = torch.empty(2, 6, *sizes, dtype=dtype)
        weight = torch.empty(4, 6, *[3] * len(sizes), dtype=dtype)
    output_bytes = 2 * 4 * torch.Size([(size + 1) // 2 for size in sizes]).numel() * x.element_size()
    assert run(x, weight) == (x.nbytes + output_bytes,) * 2


def test_what_needs_no_copies() -> None:
    with torch.device("meta"):
        x, weight = torch.empty(2, 6, 9, 7), torch.empty(4, 6, 3, 3)
        volume = torch.empty(2, 6, 5, 9, 7).to(memory_format=torch.channels_last_3d)
    assert run(x.to(memory_format=torch.channels_last), weight) == (0, 0)
    assert run(volume, torch.empty(4, 6, 3, 3, 3, device="meta")) == (0, 0)
    assert run(x.double(), weight.double()) == (0, 0)
    assert run(x, torch.empty(6, 1, 3, 3, device="meta"), groups=6) == (0, 0)


def test_float32_without_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    x, weight = torch.empty(2, 6, 9, 7, device="meta"), torch.empty(4, 6, 3, 3, device="meta")
    assert run(x, weight) == (0, 0)


def test_an_estimate_has_them() -> None:
    """The last convolution's backward is the peak: with channels last it needs that much less."""
    model = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1))
    x, hardware = torch.randn(64, 8, 32, 32), find_hardware("H200")
    first = measure(model, x, loss=torch.sum, hardware=hardware)
    x = x.to(memory_format=torch.channels_last)
    last = measure(model.to(memory_format=torch.channels_last), x, loss=torch.sum, hardware=hardware)
    hidden_bytes, output_bytes = 64 * 16 * 32 * 32 * 4, 64 * 8 * 32 * 32 * 4
    assert first.plain.peak_bytes - last.plain.peak_bytes == hidden_bytes + output_bytes
