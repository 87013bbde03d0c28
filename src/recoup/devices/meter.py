"""Live and peak bytes of a device: exact storages on the CPU, the allocator's own statistics on CUDA."""

from __future__ import annotations

import gc
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import grad as run_grad

from recoup.devices.host_memory import host_memory
from recoup.devices.tracker import MemoryTracker
from recoup.errors import SampleError
from recoup.tensors import tensors_in
from recoup.torch_private import keep_device_busy

__all__ = ["Meter", "Parts", "Timing", "device_of", "make_meter", "without_collections"]

_QUEUE_S = 0.002
"""The host gets ahead of the device meanwhile, and the first run of a unit keeps it there."""
_MOST_QUEUE_S = 0.1
_CYCLES_PER_S = 2_000_000_000


Parts = Sequence[Callable[[], Any]]
"""Code to be run piece by piece."""


class Timing(NamedTuple):
    """How long some code keeps the device busy, and the host.

    Attributes:
        device_s: from its first operation on the device to its last, if the host is ahead of it.
        host_s: until the host has told the device all of it, or waited for the device where the code does; 0 where
            the device is the host, or where it is not known.
    """

    device_s: float
    host_s: float


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
        """The most bytes that lived since `begin`."""

    @abstractmethod
    def begin(self) -> int:
        """Starts a new peak from what lives now; returns its bytes."""

    @abstractmethod
    def stamp(self) -> Any:
        """A point in time, in the order in which the device works."""

    @abstractmethod
    def elapsed_s(self, first: Any, second: Any) -> float:
        """Seconds between two points in time."""

    @abstractmethod
    def fill_queue(self, seconds: float = _QUEUE_S) -> None:
        """Keeps the device busy while the host gets ahead of it, as in the middle of a step."""

    def time(self, make_run: Callable[[], Parts], *, repeats: int = 1, warm_up: int = 0) -> list[Timing]:
        """Times several runs of the same parts, one behind the other; part by part, the medians.

        Args:
            make_run: makes the parts of a run, right before it.
            repeats: how many runs count.
            warm_up: how many do not, before these.
        """
        with without_collections():
            for _ in range(warm_up):
                self._stamped(make_run())
            return [Timing(seconds, 0.0) for seconds in self._medians(make_run, repeats)]

    def _medians(self, make_run: Callable[[], Parts], repeats: int) -> list[float]:
        runs = [self._stamped(make_run()) for _ in range(repeats)]
        times = [[self.elapsed_s(first, second) for first, second in pairwise(stamps)] for stamps in runs]
        return [statistics.median(column) for column in zip(*times, strict=True)]

    def _stamped(self, parts: Parts) -> list[Any]:
        stamps = [self.stamp()]
        for part in parts:
            part()
            stamps.append(self.stamp())
        return stamps

    def time_step(self, run: Callable[[], Any]) -> Timing:
        """Times a whole step, from an idle device to an idle device."""
        with without_collections():
            first = self.stamp()
            run()
            return Timing(self.elapsed_s(first, self.stamp()), 0.0)

    def make_room(self) -> None:
        """Gives back what lies in cycles and caches, after something did not fit."""
        gc.collect()

    @abstractmethod
    def free_bytes(self) -> int:
        """What the device could still give; 0 if that is not known."""

    @abstractmethod
    def total_bytes(self) -> int:
        """All that the device has; 0 if that is not known."""


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

    def begin(self) -> int:
        self.tracker.reset_peak()
        return self.live_bytes()

    def fill_queue(self, seconds: float = _QUEUE_S) -> None:
        """A host has no queue."""

    def stamp(self) -> float:
        return time.perf_counter()

    def elapsed_s(self, first: float, second: float) -> float:
        return second - first

    def free_bytes(self) -> int:
        return host_memory().free_bytes

    def total_bytes(self) -> int:
        return host_memory().total_bytes


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
        return self._allocated_bytes("current")

    def peak_bytes(self) -> int:
        return self._allocated_bytes("peak")

    def _allocated_bytes(self, when: str) -> int:
        # As nested dictionaries: to make them flat takes torch longer, and leaves a cycle behind each time.
        found = torch.cuda.memory_stats_as_nested_dict(self.device)
        return int(found["allocated_bytes"]["all"][when])

    def begin(self) -> int:
        self._wait_for_autograd()
        torch.cuda.reset_peak_memory_stats(self.device)
        return self.live_bytes()

    def _wait_for_autograd(self) -> None:
        """Waits until the thread that runs backwards has let go of the last one, which it may after that returned.

        It takes up this empty one only then.
        """
        with torch.enable_grad():
            start = torch.empty(0, device=self.device, requires_grad=True)
            run_grad(start.view_as(start), start, torch.empty(0, device=self.device))

    def fill_queue(self, seconds: float = _QUEUE_S) -> None:
        keep_device_busy(round(min(seconds, _MOST_QUEUE_S) * _CYCLES_PER_S))

    def time(self, make_run: Callable[[], Parts], *, repeats: int = 1, warm_up: int = 0) -> list[Timing]:
        """Times the device with the host ahead of it, by as much as the runs that warm up took the host.

        The host counts with its fastest run; but if there is none to warm up, and that took so long that the host may
        have waited for the device, with nothing. Two runs tell all there is to know about the device.
        """
        repeats = min(repeats, 2)
        host_s: list[list[float]] = []

        def noted(part: Callable[[], Any]) -> Callable[[], None]:
            return lambda: host_s[-1].append(_host_s(part))

        def make_noted() -> Parts:
            host_s.append([])
            return [noted(part) for part in make_run()]

        with without_collections():
            for _ in range(warm_up):
                for part in make_noted():
                    part()
            ahead_s = max(_QUEUE_S, repeats * max(map(sum, host_s), default=0.0))
            self.fill_queue(ahead_s)
            device_s = self._medians(make_noted, repeats)
        fastest_s = [min(column) for column in zip(*host_s, strict=True)]
        is_known = warm_up > 0 or sum(fastest_s) < ahead_s
        return list(map(Timing, device_s, fastest_s if is_known else [0.0] * len(device_s)))

    def time_step(self, run: Callable[[], Any]) -> Timing:
        torch.cuda.synchronize(self.device)
        with without_collections():
            first = self.stamp()
            host_s = _host_s(run)
            return Timing(self.elapsed_s(first, self.stamp()), host_s)

    def make_room(self) -> None:
        super().make_room()
        torch.cuda.empty_cache()

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


@contextmanager
def without_collections() -> Iterator[None]:
    """Keeps Python from looking for cycles now and then: it takes as long as a step, and what it frees is anyone's."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()


def _host_s(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def make_meter(device: torch.device) -> Meter:
    """The meter for a device."""
    if device.type == "cuda":
        return CudaMeter(device)
    if device.type == "cpu":
        return CpuMeter()
    if device.type == "meta":
        raise SampleError(
            "The model is on the meta device, where nothing can be run or measured. Estimate its step for some"
            " hardware, as in recoup.measure(model, sample, hardware='H200'); to fit it, give it memory first with"
            " model.to_empty(device=...) and load its weights."
        )
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
