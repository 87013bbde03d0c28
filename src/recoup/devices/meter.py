"""Live and peak bytes and seconds of a device: tracked storages on the CPU, the allocator's statistics on CUDA."""

from __future__ import annotations

import gc
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn
from torch.autograd import grad as run_grad

from recoup.devices.allocator import block_bytes
from recoup.devices.tracker import MemoryTracker
from recoup.errors import SampleError
from recoup.tensors import tensors_in, working_device
from recoup.torch_private import keep_device_busy

__all__ = ["Meter", "Parts", "Timing", "device_of", "gc_disabled", "gc_of_new_objects", "make_meter"]

_MOST_OF_INTERPRETER = 1000
"""Python 3.12 starts with 375 objects that are frozen. Whoever freezes others, freezes many thousands."""
_QUEUE_S = 0.002
"""How long the device's queue is filled before a run, so that the host gets ahead of the device."""
_MOST_QUEUE_S = 0.1
_CYCLES_PER_S = 2_000_000_000

Parts = Sequence[Callable[[], Any]]
"""A run in parts, which are timed one by one."""


class Timing(NamedTuple):
    """How long some code takes the device and the host.

    Attributes:
        device_s: from the first operation on the device to the last, with the host ahead of the device.
        host_s: until the host has launched everything, synchronizations included; 0 where the device is the host,
            and where this is not known.
    """

    device_s: float
    host_s: float


class Meter(ABC):
    """Reads a device's memory inside `watching`, and times code outside of it."""

    rounding_bytes = 1
    """The device's allocator rounds sizes up to a multiple of this."""
    workspace_bytes = 0
    """Bytes that the device's libraries will allocate, where `live_bytes` does not show them."""
    sees_residents = False
    """Whether `live_bytes` counts what was allocated before `watching` began."""
    waits = False
    """Whether threads of others may hold memory a moment longer: those of collectives on the CPU."""
    keeps_blocks = False
    """Whether freed memory stays in blocks until `empty_cache`, whose sizes later tensors are given."""
    is_estimate = False
    """Whether seconds are computed, not measured."""

    def rounded(self, num_bytes: int) -> int:
        """The bytes that the allocator takes for a size."""
        return -(-num_bytes // self.rounding_bytes) * self.rounding_bytes

    @property
    @abstractmethod
    def device_name(self) -> str:
        """The device's name in reports."""

    @abstractmethod
    def watching(self) -> Any:
        """A context in which `live_bytes` and `peak_bytes` can be read."""

    @abstractmethod
    def live_bytes(self) -> int:
        """Bytes that are allocated now."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """The most bytes that were allocated at once since `begin`."""

    @abstractmethod
    def begin(self) -> int:
        """Starts a new peak; returns the bytes that are allocated now."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Bytes that can still be allocated; 0 if that is not known."""

    @abstractmethod
    def total_bytes(self) -> int:
        """The device's memory; 0 if that is not known."""

    def follow(self, storages: Sequence[torch.UntypedStorage]) -> None:  # noqa: B027 (an allocator counts them anyway)
        """Inside `watching`, counts storages that are resized without an operation."""

    def count(self, storages: Iterable[torch.UntypedStorage]) -> None:  # noqa: B027 (an allocator counts them anyway)
        """Inside `watching`, counts storages that existed before, so that freeing them shows."""

    def ignore(self, storages: Sequence[torch.UntypedStorage]) -> None:  # noqa: B027 (none change while units run)
        """Inside `watching`, counts storages as what existed before, however large they become."""

    def stamp(self) -> Any:
        """A point in the device's time."""
        return time.perf_counter()

    def elapsed_s(self, first: Any, second: Any) -> float:
        """Seconds between two stamps."""
        return float(second - first)

    @abstractmethod
    def fill_queue(self, seconds: float = _QUEUE_S) -> None:
        """Keeps the device busy for some seconds, so that the host gets ahead of it, as in the middle of a step."""

    def time(self, make_run: Callable[[], Parts], *, repeats: int = 1, warm_up: int = 0) -> list[Timing]:
        """Times several runs in a row; returns the medians, part by part.

        Args:
            make_run: makes the parts of a run, right before it.
            repeats: number of runs that count.
            warm_up: number of runs before these, which do not count.
        """
        with gc_disabled():
            for _ in range(warm_up):
                self._stamped(make_run())
            return [Timing(seconds, 0.0) for seconds in self._medians(make_run, repeats)]

    def time_in_turn(
        self, runs: Sequence[Callable[[], Parts]], *, repeats: int = 1, warm_up: int = 0
    ) -> list[list[Timing]]:
        """Times several kinds of runs that will be compared; returns what `time` does, for each of them."""
        return [self.time(make_run, repeats=repeats, warm_up=warm_up) for make_run in runs]

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
        with gc_disabled():
            first = self.stamp()
            run()
            return Timing(self.elapsed_s(first, self.stamp()), 0.0)

    def make_room(self) -> None:
        """Collects garbage and empties caches, after something did not fit."""
        gc.collect()
        self.empty_cache()

    def empty_cache(self) -> None:  # noqa: B027 (a host keeps no blocks)
        """Gives the blocks of freed memory back."""

    def settle(self) -> None:
        """Before residents are counted: collects garbage, and lets libraries allocate what they keep."""
        gc.collect()


class CpuMeter(Meter):
    """Exact bytes of storages, by a tracker. What was allocated before counts zero."""

    def __init__(self) -> None:
        self._tracker: MemoryTracker | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Counts the storages that are made in the block."""
        with self.make_tracker() as tracker:
            self._tracker = tracker
            tracker.waits = self.waits
            try:
                yield
            finally:
                self._tracker = None

    def make_tracker(self) -> MemoryTracker:
        """Makes the tracker for a `watching` block."""
        return MemoryTracker()

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def tracker(self) -> MemoryTracker:
        """The tracker of the current `watching` block."""
        assert self._tracker is not None, "read a CPU's memory inside watching()"
        return self._tracker

    def follow(self, storages: Sequence[torch.UntypedStorage]) -> None:
        self.tracker.follow(storages)

    def count(self, storages: Iterable[torch.UntypedStorage]) -> None:
        self.tracker.count(storages)

    def ignore(self, storages: Sequence[torch.UntypedStorage]) -> None:
        self.tracker.ignore(storages)

    def live_bytes(self) -> int:
        if self.tracker.waits:
            self.tracker.wait()
        return self.tracker.current_bytes

    def peak_bytes(self) -> int:
        return self.tracker.peak_bytes

    def begin(self) -> int:
        live_bytes = self.live_bytes()
        self.tracker.reset_peak()
        return live_bytes

    def time_in_turn(
        self, runs: Sequence[Callable[[], Parts]], *, repeats: int = 1, warm_up: int = 0
    ) -> list[list[Timing]]:
        """Round by round, and the fastest of each counts: a busy moment of the host slows down one round of all."""
        rounds = [[self.time(make_run) for make_run in runs] for _ in range(warm_up + repeats)]
        return [[min(part) for part in zip(*own, strict=True)] for own in zip(*rounds, strict=True)]

    def fill_queue(self, seconds: float = _QUEUE_S) -> None:
        """A host has no queue."""

    def free_bytes(self) -> int:
        return _host_memory("available")

    def total_bytes(self) -> int:
        return _host_memory("total")


def _host_memory(field: str) -> int:
    try:
        return int(getattr(psutil.virtual_memory(), field))
    except (OSError, RuntimeError):  # a sandbox without /proc, a system that psutil does not know
        return 0


class CudaMeter(Meter):
    """The caching allocator's own statistics, with its rounding."""

    sees_residents = True
    keeps_blocks = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def rounded(self, num_bytes: int) -> int:
        return block_bytes(num_bytes)

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
        # Nested: torch takes longer to flatten the dictionaries, and leaves a reference cycle each time.
        found = torch.cuda.memory_stats_as_nested_dict(self.device)
        return int(found["allocated_bytes"]["all"][when])

    def begin(self) -> int:
        self._wait_for_autograd()
        torch.cuda.reset_peak_memory_stats(self.device)
        return self.live_bytes()

    def _wait_for_autograd(self) -> None:
        """Waits until autograd's thread has freed the last graph, which may be after that backward has returned.

        The thread starts this empty backward only then.
        """
        with torch.enable_grad():
            start = torch.empty(0, device=self.device, requires_grad=True)
            run_grad(start.view_as(start), start, torch.empty(0, device=self.device))

    def fill_queue(self, seconds: float = _QUEUE_S) -> None:
        keep_device_busy(round(min(seconds, _MOST_QUEUE_S) * _CYCLES_PER_S))

    def time(self, make_run: Callable[[], Parts], *, repeats: int = 1, warm_up: int = 0) -> list[Timing]:
        """Fills the queue for as long as the runs will take the host, judging by the warm-up, then times the device.

        `host_s` is that of the host's fastest run. It is 0 (unknown) if there was no warm-up and the runs took so long
        that the host may have waited for the device. More than two runs would add nothing for the device.
        """
        repeats = min(repeats, 2)
        host_s: list[list[float]] = []

        def timed(part: Callable[[], Any]) -> Callable[[], None]:
            return lambda: host_s[-1].append(_host_s(part))

        def make_timed() -> Parts:
            host_s.append([])
            return [timed(part) for part in make_run()]

        with gc_disabled():
            for _ in range(warm_up):
                for part in make_timed():
                    part()
            ahead_s = max(_QUEUE_S, repeats * max(map(sum, host_s), default=0.0))
            self.fill_queue(ahead_s)
            device_s = self._medians(make_timed, repeats)
        fastest_s = [min(column) for column in zip(*host_s, strict=True)]
        is_known = warm_up > 0 or sum(fastest_s) < ahead_s
        return list(map(Timing, device_s, fastest_s if is_known else [0.0] * len(device_s)))

    def time_step(self, run: Callable[[], Any]) -> Timing:
        torch.cuda.synchronize(self.device)
        with gc_disabled():
            first = self.stamp()
            host_s = _host_s(run)
            return Timing(self.elapsed_s(first, self.stamp()), host_s)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def settle(self) -> None:
        super().settle()
        # cuBLAS has a workspace for each thread that uses it: this one, and the one that runs backwards.
        with torch.enable_grad():
            ones = torch.ones(16, 16, device=self.device, requires_grad=True)
            (ones @ ones).sum().backward()

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
def gc_disabled() -> Iterator[None]:
    """Disables the garbage collector: a collection would distort timings and free unrelated memory."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()


@contextmanager
def gc_of_new_objects() -> Iterator[None]:
    """Collects garbage, then leaves all that lives alone: collections in the block look only at what it makes.

    Beside the million objects of torch and transformers each would take as long as a few steps of a small model.
    """
    gc.collect()
    if gc.get_freeze_count() > _MOST_OF_INTERPRETER:  # by someone else, who would find it undone
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


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
    devices = {working_device(tensor) for tensor in (*model.parameters(), *model.buffers())}
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
