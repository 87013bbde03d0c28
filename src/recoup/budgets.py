"""Budgets as users write them: bytes, sizes, shares of the device's memory, or all that is free."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from recoup.devices.meter import device_of, make_meter
from recoup.errors import SizeError
from recoup.sizes import parse_bytes
from recoup.tensors import on_device, storages_of

__all__ = ["read_budget", "read_share"]

# The share that "auto" leaves free, for fragmentation, other libraries' buffers and larger batches.
_MARGIN = 0.08


def read_budget(
    budget: int | str, model: nn.Module, sample: Any = None, *, memory_bytes: int | None = None
) -> int:
    """A budget in bytes for the whole step.

    Args:
        budget: bytes, ``"8GiB"``, ``"80%"`` of the device's memory, or ``"auto"``.
        model: on the device.
        sample: on the device, too.
        memory_bytes: of other hardware, to use instead of the device.

    Raises:
        SizeError: the budget cannot be read.

    >>> read_budget("2KiB", nn.Identity())
    2048
    """
    text = budget.strip().lower() if isinstance(budget, str) else ""
    if memory_bytes is not None:
        return read_share(f"{100 * (1 - _MARGIN)}%" if text == "auto" else budget, memory_bytes)
    meter = make_meter(device_of(model, sample))
    if text == "auto":
        parameters = on_device(model.parameters())
        resident_bytes = sum(storages_of([*parameters, *model.buffers(), sample]).values())
        free_bytes = meter.free_bytes()
        if not free_bytes:
            raise SizeError(
                "How much memory is free cannot be read here: give bytes for budget=, such as '8GiB'."
            )
        return int(resident_bytes + free_bytes * (1 - _MARGIN))
    return read_share(budget, meter.total_bytes())


def read_share(budget: int | str, total_bytes: int) -> int:
    """Bytes, a size, or a share of a memory.

    Args:
        budget: bytes, ``"8GiB"`` or ``"80%"``.
        total_bytes: of the memory; 0 if that is not known.

    Raises:
        SizeError: the budget cannot be read.

    >>> read_share("25%", 2000)
    500
    """
    share = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", budget.strip()) if isinstance(budget, str) else None
    if share is None:
        return parse_bytes(budget)
    percent = float(share[1])
    if not 0 < percent <= 100:
        raise SizeError(f"A budget in per cent lies above 0 % and at most at 100 %; got {budget!r}.")
    if not total_bytes:
        raise SizeError(
            f"{budget!r} of what? The device's memory is not known here: give bytes, such as '8GiB'."
        )
    return int(total_bytes * percent / 100)
