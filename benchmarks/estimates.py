"""Estimated seconds of plain steps against measured ones: with published figures, and with measured classes of kernels.

Run it on the GPU with ``python benchmarks/estimates.py --output FOLDER``. It times the operations of many layers
(``recoup hardware`` does the same), then runs plain steps of six models in bfloat16 and float32, none of which the
layers were taken from, and compares. It writes

- ``hardware.json``: the hardware with its classes of kernels, which ``hardware=`` reads;
- ``estimates_HARDWARE_YYYYMM.md``: the table;
- ``estimates.json``: all figures, with every operation that was timed.

``--name H200`` measures classes of kernels against that entry of the table of known GPUs, so that the file can be
shipped with it; unless given, the device's own measured peaks are taken. ``--small`` tries the script on a CPU.

``--name H200 --again benchmarks/results/estimates_h200_202611.json`` needs no GPU: it estimates the same steps with the
file that is shipped, and compares with what an earlier run measured.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import math
import platform
import statistics
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from models import MODELS, Case, mean_square
from torch import Tensor, nn
from vision import Bottleneck, ResNet

import recoup
from recoup.devices.meter import make_meter
from recoup.measuring import Hardware, find_hardware, write_hardware
from recoup.measuring.estimate.benchmark import measure_peaks, with_kernels
from recoup.measuring.estimate.curves import KernelSample
from recoup.measuring.estimate.kernel_times import OperationTimer, host_seconds, sample_kernels

NUM_STEPS, NUM_WARM_UP = 9, 3
WITHIN = 0.2
EXPLANATION = (
    "A step is a forward and a backward, from an idle device to an idle device; the median of steps. Before: the"
    " roofline of the step's operations with these peaks, of which operations reach a fixed share. After: `measure`"
    " with measured classes of kernels and seconds of the host. One by one: the sum of the step's operations, each"
    " timed by itself. An error below zero is an estimate that is too low."
)


class ViT(nn.Module):
    """Patches, a row of encoder layers, an average."""

    def __init__(self, width: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        layer = nn.TransformerEncoderLayer
        self.layers = nn.ModuleList(
            layer(width, num_heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(num_layers)
        )
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of classes."""
        x = self.patch(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(x.mean(1))
        return scores


def vit(large: bool) -> Case:
    size, batch = (224, 64) if large else (64, 2)
    model = ViT(768, 12, 12) if large else ViT(64, 2, 2)
    return Case(model, torch.randn(batch, 3, size, size), mean_square)


def resnet50(large: bool) -> Case:
    size, batch = (224, 64) if large else (64, 2)
    widths = [64, 64, 128, 256, 512] if large else [16, 8, 12, 16, 20]
    return Case(ResNet(Bottleneck, [3, 4, 6, 3], widths), torch.randn(batch, 3, size, size), mean_square)


CASES: dict[str, Callable[[bool], Case]] = {
    "GPT": MODELS["GPT"],
    "Llama-like": MODELS["Llama"],
    "ResNet-50": resnet50,
    "ViT": vit,
    "U-Net": MODELS["U-Net, skips"],
    "T5-like": MODELS["encoder-decoder"],
}


def converted(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if isinstance(value, tuple):
        return tuple(converted(part, device, dtype) for part in value)
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)


def step_of(case: Case) -> Callable[[], None]:
    """A forward and a backward."""

    def run() -> None:
        case.model.zero_grad()
        output = case.model(*case.sample) if isinstance(case.sample, tuple) else case.model(case.sample)
        (output if case.loss is None else case.loss(output)).backward()

    return run


def short_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name().lower().replace("nvidia ", "").replace(" ", "-")
    return f"cpu-{platform.machine().lower()}"


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measured_steps(run: Callable[[], None], device: torch.device, num: int) -> list[float]:
    times = []
    for index in range(NUM_WARM_UP + num):
        wait(device)
        start = time.perf_counter()
        run()
        wait(device)
        if index >= NUM_WARM_UP:
            times.append(time.perf_counter() - start)
    return times


def by_class(timer: OperationTimer, before: Hardware, after: Hardware) -> dict[str, dict[str, float]]:
    """Seconds of a step's operations by class: timed one by one, by the roofline, by the curves of their classes."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for sample, count in zip(timer.samples, timer.counts, strict=True):
        curve = after.curve(sample.kind)
        before_s = max(sample.ideal_s / before.efficiency, before.latency_s)
        after_s = before_s if curve is None else curve.seconds(sample.ideal_s)
        figures = {"measured_s": sample.measured_s, "before_s": before_s, "after_s": after_s}
        for name, seconds in figures.items():
            found[sample.kind][name] += count * seconds
    return {kind: dict(figures) for kind, figures in found.items()}


def compare(
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    before: Hardware,
    after: Hardware,
    *,
    small: bool,
    num: int,
) -> dict[str, Any]:
    torch.manual_seed(0)
    case = CASES[name](not small)
    host = torch.device("cpu")
    case = case._replace(model=case.model.to(dtype), sample=converted(case.sample, host, dtype))
    started = time.perf_counter()
    profile = recoup.measure(case.model, case.sample, loss=case.loss, hardware=after)
    estimating_took_s = time.perf_counter() - started
    case = case._replace(model=case.model.to(device), sample=converted(case.sample, device, dtype))
    run = step_of(case)
    times = measured_steps(run, device, num)
    with OperationTimer(make_meter(device), before) as timer:
        run()
    classes = by_class(timer, before, after)
    row = {
        "model": name,
        "dtype": str(dtype).removeprefix("torch."),
        "measured_s": statistics.median(times),
        "fastest_s": min(times),
        "slowest_s": max(times),
        "one_by_one_s": sum(figures["measured_s"] for figures in classes.values()),
        "num_operations": sum(timer.counts),
        "host_s": sum(timer.counts) * after.host_s,
        "before_s": sum(figures["before_s"] for figures in classes.values()),
        "after_s": profile.plain.seconds,
        "estimating_took_s": estimating_took_s,
        "by_class": classes,
        "operations": [
            {"count": count, **asdict(sample)}
            for sample, count in zip(timer.samples, timer.counts, strict=True)
        ],
    }
    del case, run, timer
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def estimated_again(path: Path, hardware: Hardware) -> list[dict[str, Any]]:
    """The measured steps of an earlier run, with estimates for hardware that need not be here."""
    rows = []
    for row in json.loads(path.read_text())["rows"]:
        torch.manual_seed(0)
        case, dtype = CASES[row["model"]](True), getattr(torch, row["dtype"])
        sample = converted(case.sample, torch.device("cpu"), dtype)
        profile = recoup.measure(case.model.to(dtype), sample, loss=case.loss, hardware=hardware)
        host_s = row["num_operations"] * hardware.host_s
        rows.append({**row, "host_s": host_s, "after_s": profile.plain.seconds})
        print(line(rows[-1]), flush=True)
    return rows


def error(row: dict[str, Any], which: str) -> float:
    return float(row[which] / row["measured_s"] - 1)


def line(row: dict[str, Any]) -> str:
    milliseconds = [
        f"{row[name] * 1e3:.2f}" for name in ("measured_s", "one_by_one_s", "host_s", "before_s", "after_s")
    ]
    shown = [row["model"], row["dtype"], *milliseconds]
    shown += [f"{error(row, which):+.0%}" for which in ("before_s", "after_s")]
    return f"| {' | '.join(shown)} |"


def summary(rows: list[dict[str, Any]], which: str) -> str:
    errors = [error(row, which) for row in rows]
    num_within = sum(abs(found) <= WITHIN for found in errors)
    return (
        f"{which.removesuffix('_s')}: {min(errors):+.0%} to {max(errors):+.0%}; {num_within} of {len(rows)} within"
        f" {WITHIN:.0%}"
    )


def worst_classes(rows: list[dict[str, Any]], num: int = 8) -> list[str]:
    """Where the seconds of classes are off the most, over all steps."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in rows:
        for kind, figures in row["by_class"].items():
            totals[kind][0] += figures["measured_s"]
            totals[kind][1] += figures["after_s"]
    worst = sorted(totals, key=lambda kind: -abs(totals[kind][1] - totals[kind][0]))
    return [f"| {kind} | {totals[kind][0] * 1e3:.2f} | {totals[kind][1] * 1e3:.2f} |" for kind in worst[:num]]


def classes_table(found: Hardware) -> list[str]:
    """For each class, the seconds of the smallest kernel and the share of the peak that the largest reaches."""
    lines = ["| class | smallest us | share of the peak, smallest to largest |", "|---|---|---|"]
    for curve in found.kernels:
        shares = ", ".join(f"{ideal_s / real_s:.2f}" for ideal_s, real_s in curve.points)
        lines.append(f"| {curve.name} | {curve.points[0][1] * 1e6:.1f} | {shares} |")
    return lines


def main() -> None:
    """Measures the classes of kernels, compares, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, help="a folder")
    parser.add_argument("--again", type=Path, help="figures of an earlier run; needs --name, and no GPU")
    parser.add_argument("--name", help="a known GPU whose published peaks to take")
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--small", action="store_true", help="small models, for a CPU")
    options = parser.parse_args()
    if options.again is not None and options.name:
        rows = estimated_again(options.again, find_hardware(options.name))
        print("\n".join(summary(rows, which) for which in ("before_s", "after_s")))
        return
    if options.output is None:
        parser.error("give --output FOLDER, or --name and --again")
    begin = time.perf_counter()
    options.output.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peaks = find_hardware(options.name) if options.name else measure_peaks(device)
    before = replace(peaks, kernels=(), host_s=0.0)
    samples: list[KernelSample] = sample_kernels(device, before)
    after = with_kernels(before, samples, host_seconds(device))
    write_hardware(after, options.output / "hardware.json")
    sampled_s = time.perf_counter() - begin
    head = [
        f"# Estimated seconds on {short_name(device)}",
        "",
        f"{datetime.date.today()}, torch {torch.__version__}, Python {platform.python_version()}, peaks of"
        f" {peaks.name}. {len(samples)} operations in {sampled_s:.0f} s; the host takes"
        f" {after.host_s * 1e6:.1f} us for one. `python benchmarks/estimates.py`. {EXPLANATION}",
        "",
        "| model | dtype | measured ms | one by one ms | host ms | before ms | after ms | error before | error after |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(head), flush=True)
    rows = []
    dtypes = (torch.bfloat16, torch.float32) if device.type == "cuda" else (torch.float32,)
    for name in options.only:
        for dtype in dtypes:
            num = 3 if options.small else NUM_STEPS
            try:
                rows.append(compare(name, dtype, device, before, after, small=options.small, num=num))
            except Exception:  # the others are still worth the device's time
                traceback.print_exc()
                continue
            print(line(rows[-1]), flush=True)
    tail = ["", *(f"{summary(rows, which)}." for which in ("before_s", "after_s")), ""]
    tail += ["| class | one by one ms | by its curve ms |", "|---|---|---|", *worst_classes(rows), ""]
    tail += classes_table(after)
    print("\n".join(tail))
    figures = {"rows": rows, "samples": [asdict(sample) for sample in samples], "host_s": after.host_s}
    assert all(math.isfinite(row["after_s"]) for row in rows)
    (options.output / "estimates.json").write_text(json.dumps(figures))
    path = options.output / f"estimates_{short_name(device)}_{datetime.date.today():%Y%m}.md"
    path.write_text("\n".join([*head, *map(line, rows), *tail]) + "\n")
    print(f"\nwritten to {options.output} in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
