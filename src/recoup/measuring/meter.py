"""Live and peak bytes of a device: exact storages on the CPU, the allocator's own statistics on CUDA."""

from __future__ import annotations

import os
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from recoup.errors import SampleError
from recoup.measuring.tracker import MemoryTracker
from recoup.measuring.trees import tensors_in

__all__ = ["Meter", "device_of", "make_meter"]

# About two milliseconds: the host gets ahead meanwhile, and the first run of a unit keeps it there.
_QUEUE_CYCLES = 4_000_000
# By itself, a unit's call takes the host about twice as long as in the middle of a step (1.3 ms against 0.7 ms for a
# block of a decoder): autograd starts anew for each.
_HOST_SHARE = 0.5


class Meter(ABC):
    """Reads a device's memory while code runs inside `watching`, and times code outside it."""

    rounding_bytes = 1
    """What sizes are rounded up to by the device's allocator."""
    workspace_bytes = 0
    """What the device's libraries will hold, where `live_bytes` does not show it."""
    sees_residents = False
    """Whether `live_bytes` counts what lived before."""
    is_estimate = False
    """Whether seconds are worked out and not measured."""

    @property
    @abstractmethod
    def device_name(self) -> str:
        """How reports call the device."""

    @abstractmethod
    def watching(self) -> Any:
        """A context inside which `live_bytes` and `peak_bytes` can be read."""

    @abstractmethod
    def live_bytes(self) -> int:
        """Bytes that live now."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """The most bytes that lived since `reset_peak`."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Starts a new peak from what lives now."""

    @abstractmethod
    def stamp(self) -> Any:
        """A point in time, in the order in which the device works."""

    @abstractmethod
    def elapsed_s(self, first: Any, second: Any) -> float:
        """Seconds between two points in time."""

    @abstractmethod
    def fill_queue(self) -> None:
        """Keeps the device busy while the host gets ahead of it, as in the middle of a step."""

    def seconds(self, *parts: Callable[[], Any]) -> list[float]:
        """Runs the parts one after the other and returns how long each took."""
        return self.medians([parts], warm_up=0)

    def medians(self, runs: Iterable[Sequence[Callable[[], Any]]], *, warm_up: int) -> list[float]:
        """Times several runs of the same parts, one behind the other; part by part, the medians.

        Args:
            runs: each a sequence of parts.
            warm_up: how many of the first runs do not count.
        """
        self.fill_queue()
        spans = []
        for parts in runs:
            stamps, host_s = [self.stamp()], []
            for part in parts:
                start = time.perf_counter()
                part()
                host_s.append(time.perf_counter() - start)
                stamps.append(self.stamp())
            spans.append((stamps, host_s))
        times = [self._span_s(stamps, host_s) for stamps, host_s in spans[warm_up:]]
        return [statistics.median(column) for column in zip(*times, strict=True)]

    def _span_s(self, stamps: Sequence[Any], host_s: Sequence[float]) -> list[float]:
        device_s = [self.elapsed_s(first, second) for first, second in pairwise(stamps)]
        return [max(device, _HOST_SHARE * host) for device, host in zip(device_s, host_s, strict=True)]

    def wall_s(self, run: Callable[[], Any]) -> float:
        """Seconds of a whole step, from an idle device to an idle device."""
        first = self.stamp()
        run()
        return self.elapsed_s(first, self.stamp())

    @abstractmethod
    def free_bytes(self) -> int:
        """What the device could still give."""

    @abstractmethod
    def total_bytes(self) -> int:
        """All that the device has."""


class CpuMeter(Meter):
    """Exact bytes of storages, by a tracker. What lived before counts zero."""

    def __init__(self) -> None:
        self._tracker: MemoryTracker | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Counts storages made inside."""
        with self.make_tracker() as tracker:
            self._tracker = tracker
            try:
                yield
            finally:
                self._tracker = None

    def make_tracker(self) -> MemoryTracker:
        """What counts inside `watching`."""
        return MemoryTracker()

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def tracker(self) -> MemoryTracker:
        """The tracker of the present `watching`."""
        assert self._tracker is not None, "read a CPU's memory inside watching()"
        return self._tracker

    def live_bytes(self) -> int:
        return self.tracker.current_bytes

    def peak_bytes(self) -> int:
        return self.tracker.peak_bytes

    def reset_peak(self) -> None:
        self.tracker.reset_peak()

    def fill_queue(self) -> None:
        """A host has no queue."""

    def stamp(self) -> float:
        return time.perf_counter()

    def elapsed_s(self, first: float, second: float) -> float:
        return second - first

    def free_bytes(self) -> int:
        return _host_memory("MemAvailable")

    def total_bytes(self) -> int:
        return _host_memory("MemTotal")


class CudaMeter(Meter):
    """The caching allocator's statistics: what every tensor really takes, with its rounding."""

    rounding_bytes = 512
    sees_residents = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def device_name(self) -> str:
        return f"{self.device} ({torch.cuda.get_device_name(self.device)})"

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Nothing to switch on: the allocator always counts."""
        yield

    def live_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def fill_queue(self) -> None:
        torch.cuda._sleep(_QUEUE_CYCLES)

    def wall_s(self, run: Callable[[], Any]) -> float:
        torch.cuda.synchronize(self.device)
        return super().wall_s(run)

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def elapsed_s(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        second.synchronize()
        return float(first.elapsed_time(second)) / 1e3

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        reusable = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + reusable

    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[1]


def _host_memory(field: str) -> int:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith(f"{field}:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    pages = "SC_AVPHYS_PAGES" if field == "MemAvailable" else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def make_meter(device: torch.device) -> Meter:
    """The meter for a device."""
    if device.type == "cuda":
        return CudaMeter(device)
    if device.type == "cpu":
        return CpuMeter()
    raise SampleError(f"recoup measures models on cpu and cuda; this one is on {device}.")


def device_of(model: nn.Module, sample: Any = None) -> torch.device:
    """The one device that a model's step runs on."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    accelerators = sorted({d for d in devices if d.type not in ("cpu", "meta")}, key=str)
    if len(accelerators) > 1:
        raise SampleError(
            f"The model is on {', '.join(map(str, accelerators))}. recoup plans one device at a time: fit each"
            " part on its own device."
        )
    if accelerators:
        return accelerators[0]
    if devices == {torch.device("meta")}:
        return torch.device("meta")
    found = {tensor.device for tensor in tensors_in(sample)} - {torch.device("cpu")}
    return next(iter(found)) if found and not devices else torch.device("cpu")
