"""Budgets as people write them: bytes, sizes, shares of the device, or what is free."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from recoup.errors import SizeError
from recoup.measuring.meter import device_of, make_meter
from recoup.measuring.trees import storages_of
from recoup.sizes import parse_bytes

__all__ = ["read_budget"]

# What "auto" leaves free: fragmentation, other libraries' buffers, larger batches.
_MARGIN = 0.08


def read_budget(budget: int | str, model: nn.Module, sample: Any = None) -> int:
    """A budget in bytes for the whole step.

    Args:
        budget: bytes, ``"8GiB"``, ``"80%"`` of the device's memory, or ``"auto"``.
        model: whose device is meant.
        sample: that lives there too.

    Raises:
        SizeError: the budget cannot be read.

    >>> read_budget("2KiB", nn.Identity())
    2048
    """
    text = budget.strip().lower() if isinstance(budget, str) else ""
    meter = make_meter(device_of(model, sample))
    if text == "auto":
        resident = sum(storages_of([*model.parameters(), *model.buffers(), sample]).values())
        return int(resident + meter.free_bytes() * (1 - _MARGIN))
    share = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text)
    if share is None:
        return parse_bytes(budget)
    percent = float(share[1])
    if not 0 < percent <= 100:
        raise SizeError(f"A budget in per cent lies above 0 % and at most at 100 %; got {budget!r}.")
    return int(meter.total_bytes() * percent / 100)
