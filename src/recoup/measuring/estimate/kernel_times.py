"""Times the operations of a step one by one, on the present device."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from recoup.devices.meter import Meter, gc_disabled, make_meter
from recoup.measuring.estimate.classes import kernel_class
from recoup.measuring.estimate.curves import KernelSample, bin_of
from recoup.measuring.estimate.machine import Hardware
from recoup.measuring.estimate.probes import Probe, probes, small_probes
from recoup.measuring.estimate.roofline import argument_tensors, ideal_s, is_free
from recoup.progress import note
from recoup.torch_private import TorchDispatchMode

__all__ = ["OperationTimer", "host_seconds", "same_random_numbers", "sample_kernels"]

_NUM_LAUNCHES = 4
_LONG_S = 5e-4
"""An operation that ideally takes longer is timed once."""
_NUM_STEPS = 15
_MOST_ALIKE = 3


class OperationTimer(TorchDispatchMode):
    """Times every operation that runs inside, each combination of operation and shapes once.

    Args:
        meter: of the device.
        peaks: that ideal seconds are computed from.
        most_alike: how often an operation of about one size is timed at most, in each of its classes.

    Attributes:
        samples: of all operations that were timed.
        counts: how often each of them ran, in the same order.
    """

    def __init__(self, meter: Meter, peaks: Hardware, *, most_alike: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter, self._peaks, self._most_alike = meter, peaks, most_alike
        self._alike: Counter[tuple[str, str, int]] = Counter()
        self._seen: dict[str, int] = {}
        self.samples: list[KernelSample] = []
        self.counts: list[int] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if is_free(func) or next(argument_tensors((args, result)), None) is None:
            return result
        kind = kernel_class(func, args)
        what = f"{func} {_described((args, kwargs))}"
        # The class says how products round, which arguments do not.
        key = f"{kind} {what}"
        if key not in self._seen:
            size_s = ideal_s(func, args, kwargs, result, self._peaks)
            alike = (kind, str(func), bin_of(size_s))
            self._alike[alike] += 1
            if self._most_alike is not None and self._alike[alike] > self._most_alike:
                return result
            self._seen[key] = len(self.samples)
            seconds = self._seconds(func, args, kwargs, is_long=size_s > _LONG_S)
            self.samples.append(KernelSample(kind, size_s, seconds, what))
            self.counts.append(0)
        self.counts[self._seen[key]] += 1
        return result

    def _seconds(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, *, is_long: bool
    ) -> float:
        # Copies of what the operation writes: its result is used afterwards.
        args = tuple(
            value.clone() if written and isinstance(value, Tensor) else value
            for value, written in zip(args, _written(func, len(args)), strict=True)
        )

        # Stamps around a short operation take part of its time.
        num = 1 if is_long else _NUM_LAUNCHES

        def run() -> None:
            for _ in range(num):
                func(*args, **kwargs)

        return self._meter.time(lambda: [run], repeats=1 if is_long else 3, warm_up=1)[0].device_s / num


def _written(func: Any, num_args: int) -> list[bool]:
    infos = [argument.alias_info for argument in func._schema.arguments[:num_args]]
    return [info is not None and info.is_write for info in infos]


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{list(value.stride())}"
    if isinstance(value, dict):
        return _described(tuple(value.values()))
    if isinstance(value, (tuple, list)):
        return f"({' '.join(map(_described, value))})"
    return str(value)


def sample_kernels(device: torch.device, peaks: Hardware) -> list[KernelSample]:
    """Times the operations of all probes.

    Args:
        device: to run on.
        peaks: that ideal seconds are computed from.
    """
    is_gpu = device.type == "cuda"
    # Virtual hosts may report bfloat16 instructions that then crash the process.
    dtypes = (torch.bfloat16, torch.float32) if is_gpu else (torch.float32,)
    timer = OperationTimer(make_meter(device), peaks, most_alike=_MOST_ALIKE)
    wanted = [(probe, False) for probe in probes(dtypes, large=is_gpu)]
    if is_gpu:
        wanted += [(probe, True) for probe in probes((torch.float32,), large=True) if "decoder" in probe.name]
    for index, (probe, allow_tf32) in enumerate(wanted):
        note("timing kernels", index, len(wanted))
        with _products_in_tf32(allow_tf32), same_random_numbers(device):
            run = _step_of(probe, device)
            with timer:
                run()
            del run
    note("timing kernels", len(wanted), len(wanted))
    return timer.samples


def host_seconds(device: torch.device) -> float:
    """Seconds of the host for one operation, in steps so small that the device waits for it; 0 on a host itself.

    Of the kinds of layers it is the smallest: those whose operations take the host longer rarely wait for it. Of steps
    it is the fastest: on a busy host, most wait for others.
    """
    if device.type != "cuda":
        return 0.0
    found: list[float] = []
    with same_random_numbers(device), gc_disabled():
        for probe in small_probes(torch.float32):
            run = _step_of(probe, device)
            with _Counter() as counter:
                run()
            found.append(min(_wall_s(run, device) for _ in range(_NUM_STEPS)) / counter.num_operations)
    return min(found)


def _wall_s(run: Callable[[], None], device: torch.device) -> float:
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


class _Counter(TorchDispatchMode):
    """Counts operations that an estimate counts."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_operations = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.num_operations += not is_free(func)
        return func(*args, **(kwargs or {}))


def _step_of(probe: Probe, device: torch.device) -> Callable[[], None]:
    """A forward and a backward of a probe."""
    model, sample = probe.make().to(device, probe.dtype), probe.sample().to(device)
    if sample.is_floating_point():
        sample = sample.to(probe.dtype)
    if probe.channels_last:
        sample = sample.contiguous(memory_format=torch.channels_last)
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    parameters: list[nn.Parameter] = list(model.parameters())

    def run() -> None:
        torch.autograd.grad(model(sample), parameters)

    return run


@contextmanager
def _products_in_tf32(allow: bool) -> Iterator[None]:
    if not allow:
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def same_random_numbers(device: torch.device) -> Any:
    """A context after which generators are as they were."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])
