"""How much memory a step could use now: by CUDA's allocator, or by the limit of a tracker."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from recoup.devices.allocator import has_expandable_segments
from recoup.devices.meter import Meter, make_meter
from recoup.devices.tracker import MemoryTracker
from recoup.sizes import format_bytes

__all__ = ["Room", "find_room"]

_MARGIN = 0.03
"""Of what is free on a GPU, for blocks that the allocator does not split."""
_FRAGMENTED = 0.1
"""Reserved bytes that hold no tensor are a cause if they are more than this share of all reserved bytes."""


class Room(ABC):
    """What of a device's memory a step can use beside what lives already."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Bytes that a step could still allocate."""

    @abstractmethod
    def make_room(self) -> None:
        """Collects garbage and empties caches."""

    def num_retries(self) -> int:
        """How often the allocator had to empty its cache to find room."""
        return 0

    def describe_failure(self) -> str:
        """Read before anything is freed: what the allocator's numbers say about the cause; empty if nothing."""
        return ""


class HostRoom(Room):
    """The free memory of the host."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def free_bytes(self) -> int:
        return self._meter.free_bytes()

    def make_room(self) -> None:
        self._meter.make_room()


class TrackedRoom(HostRoom):
    """The limit of a `MemoryTracker`, which stands for a device's memory."""

    def __init__(self, meter: Meter, tracker: MemoryTracker) -> None:
        super().__init__(meter)
        self._tracker = tracker

    def free_bytes(self) -> int:
        limit_bytes = self._tracker.limit_bytes
        return super().free_bytes() if limit_bytes is None else limit_bytes - self._tracker.current_bytes


class CudaRoom(HostRoom):
    """What the driver has, this process may take, and the caching allocator can use again.

    Free parts of blocks that also hold tensors do not count: no larger tensor fits there.
    """

    def __init__(self, meter: Meter, device: torch.device) -> None:
        super().__init__(meter)
        self._device = device

    def free_bytes(self) -> int:
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        reserved_bytes = torch.cuda.memory_reserved(self._device)
        share = torch.cuda.get_per_process_memory_fraction(self._device)
        if share < 1:
            free_bytes = min(free_bytes, int(share * total_bytes) - reserved_bytes)
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        fragments_bytes = int(stats["inactive_split_bytes"]["all"]["current"])
        reusable_bytes = reserved_bytes - torch.cuda.memory_allocated(self._device) - fragments_bytes
        return int((1 - _MARGIN) * (free_bytes + reusable_bytes))

    def num_retries(self) -> int:
        return int(torch.cuda.memory_stats_as_nested_dict(self._device)["num_alloc_retries"])

    def describe_failure(self) -> str:
        reserved_bytes = torch.cuda.memory_reserved(self._device)
        unused_bytes = reserved_bytes - torch.cuda.memory_allocated(self._device)
        if unused_bytes <= _FRAGMENTED * reserved_bytes:
            return ""
        found = (
            f"memory is fragmented: {format_bytes(unused_bytes)} of {format_bytes(reserved_bytes)} reserved bytes"
            " held no tensor"
        )
        return found if has_expandable_segments() else f"{found}; {_EXPANDABLE}"


_EXPANDABLE = "start the process with PYTORCH_ALLOC_CONF=expandable_segments:True"


def find_room(device: torch.device, tracker: MemoryTracker | None = None) -> Room:
    """The room on a device; on the CPU, within a tracker's limit if there is one."""
    meter = make_meter(device)
    if tracker is not None:
        return TrackedRoom(meter, tracker)
    return CudaRoom(meter, device) if device.type == "cuda" else HostRoom(meter)
