"""Measures the present device: products, copies and small operations, then the operations of many layers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from recoup.devices.meter import make_meter
from recoup.errors import HardwareError
from recoup.measuring.estimate.curves import KernelSample, fit_curves
from recoup.measuring.estimate.kernel_times import host_seconds, same_random_numbers, sample_kernels
from recoup.measuring.estimate.machine import Hardware

__all__ = ["measure_hardware", "measure_peaks", "with_kernels"]

_NUM_RUNS = 5
_NUM_SMALL = 200


def measure_hardware(device: str | torch.device | None = None) -> Hardware:
    """Measures products in float32 and bfloat16, copies, the time of a small operation, and classes of kernels.

    It takes about a minute. On a host, bfloat16 is taken to be as fast as float32.

    Args:
        device: such as ``"cuda"`` or ``"cpu"``; unless given, the GPU if there is one.

    Raises:
        HardwareError: there is no such device here.
    """
    peaks = measure_peaks(device)
    chosen = _find_device(device)
    # Before and after: a busy host may be quiet again in a minute.
    host_s = host_seconds(chosen)
    samples = sample_kernels(chosen, peaks)
    return with_kernels(peaks, samples, min(host_s, host_seconds(chosen)))


def with_kernels(peaks: Hardware, samples: Sequence[KernelSample], host_s: float) -> Hardware:
    """The hardware with measured seconds of classes of kernels, whose samples were taken with its peaks."""
    return replace(peaks, kernels=fit_curves(samples), host_s=host_s)


def _find_device(device: str | torch.device | None) -> torch.device:
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type not in ("cuda", "cpu") or (chosen.type == "cuda" and not torch.cuda.is_available()):
        raise HardwareError(
            f"There is no device {str(chosen)!r} here to measure; recoup measures cuda and cpu."
        )
    return chosen


def measure_peaks(device: str | torch.device | None = None) -> Hardware:
    """The same without classes of kernels: the most that products and copies reach."""
    chosen = _find_device(device)
    is_gpu = chosen.type == "cuda"
    size, num_bytes = (8192, 2**30) if is_gpu else (1024, 2**27)
    held = torch.cuda.memory_allocated(chosen) if is_gpu else 0
    float32 = _flops_per_s(size, torch.float32, chosen)
    # Virtual hosts may report bfloat16 instructions that then crash the process.
    half = _flops_per_s(size, torch.bfloat16, chosen) if is_gpu else float32
    # Allocated by the libraries for themselves, and kept.
    workspace_bytes = max(0, torch.cuda.memory_allocated(chosen) - held) if is_gpu else 0
    return Hardware(
        name=torch.cuda.get_device_name(chosen) if is_gpu else "CPU",
        memory_bytes=make_meter(chosen).total_bytes(),
        float32_flops_per_s=float32,
        tf32_flops_per_s=_with_tf32(size, chosen) if is_gpu else 0.0,
        half_flops_per_s=half,
        bandwidth_bytes_per_s=_bandwidth(num_bytes, chosen),
        host_link_bytes_per_s=_host_link(num_bytes // 4, chosen),
        latency_s=_latency_s(chosen),
        workspace_bytes=workspace_bytes,
        device_type="cuda" if is_gpu else "cpu",
    )


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    """The median of several runs after one that does not count."""
    times = []
    for _ in range(_NUM_RUNS + 1):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _flops_per_s(size: int, dtype: torch.dtype, device: torch.device) -> float:
    # Not zeros: with these, GPUs draw less power and run faster than on real data.
    with same_random_numbers(device):
        left, right = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: left @ right, device)


def _with_tf32(size: int, device: torch.device) -> float:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return _flops_per_s(size, torch.float32, device)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _bandwidth(num_bytes: int, device: torch.device) -> float:
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _seconds(lambda: target.copy_(source), device)


def _host_link(num_bytes: int, device: torch.device) -> float:
    source = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return num_bytes / _seconds(lambda: target.copy_(source, non_blocking=True), device)


def _latency_s(device: torch.device) -> float:
    small = torch.zeros(8, device=device)

    def run() -> None:
        for _ in range(_NUM_SMALL):
            small.add_(1)

    return _seconds(run, device) / _NUM_SMALL
