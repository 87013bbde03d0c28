"""The figures of `recoup.fit`: prediction against measurement, cost of a fit, the smallest budgets, and depth.

Run it with ``python benchmarks/fitting.py`` (``--device cuda`` on a GPU); it prints a report and writes it to
``benchmarks/results/fitting_HARDWARE_YYYYMM.md``. Every step is verified (under the budget, gradients bit-equal) before
its figures count. ``--only accuracy depth`` runs some sections.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import gc
import math
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import MODELS, Case, UNet
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import recoup
from recoup.errors import BudgetError
from recoup.fitting import Fitted
from recoup.measuring import MemoryTracker
from recoup.sizes import format_bytes

ROOT = Path(__file__).resolve().parent
Lines = list[str]


def make(name: str, device: str) -> Case:
    """A model and its sample, on a device."""
    torch.manual_seed(0)
    case = MODELS[name](device == "cuda")
    return Case(case.model.to(device), to_device(case.sample, device), case.loss)


def to_device(sample: Any, device: str) -> Any:
    """A sample on a device."""
    return tuple(t.to(device) for t in sample) if isinstance(sample, tuple) else sample.to(device)


def plain_step_s(case: Case, num_steps: int = 5) -> float:
    """Median seconds of a plain step."""
    times = []
    for _ in range(num_steps + 2):
        synchronize(case)
        start = time.perf_counter()
        step(case)
        synchronize(case)
        times.append(time.perf_counter() - start)
    case.model.zero_grad()
    return statistics.median(times[2:])


def step(case: Case) -> None:
    """One forward and backward."""
    sample = case.sample if isinstance(case.sample, tuple) else (case.sample,)
    output = case.model(*sample)
    loss: Tensor = output if case.loss is None else case.loss(output)
    loss.backward()


def synchronize(case: Case) -> None:
    """Waits for the device."""
    if next(case.model.parameters()).is_cuda:
        torch.cuda.synchronize()


def fit_at(case: Case, budget: int, **options: Any) -> tuple[Fitted, float]:
    """Fits, and says how long that took; at the smallest budget, with what a fit finds out about that."""
    for _ in range(4):
        start = time.perf_counter()
        try:
            fitted = recoup.fit(case.model, case.sample, budget=budget, loss=case.loss, **options)
        except BudgetError as error:
            budget = error.smallest_bytes
        else:
            synchronize(case)
            return fitted, time.perf_counter() - start
    raise AssertionError("the smallest budget keeps growing")


def accuracy(device: str) -> Lines:
    """Prediction against measurement, at four budgets for every model, and what the fit cost."""
    lines = [
        "| model | budget | recipe | peak predicted | peak measured | error | ms predicted | ms measured | error"
        " | fit s | 15 plain steps + 2 s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in MODELS:
        case = make(name, device)
        optimizer = torch.optim.AdamW(case.model.parameters())
        profile = recoup.measure(case.model, case.sample, loss=case.loss, optimizer=optimizer)
        low, high = recoup.minimum_budget(profile), profile.plain_bytes
        step_s = plain_step_s(case)
        budgets = {"plain": high + (high - low) // 50, "80 %": int(low + 0.8 * (high - low)),
                   "50 %": (low + high) // 2, "minimum": low}  # fmt: skip
        for label, budget in budgets.items():
            fitted, fit_s = fit_at(case, budget, optimizer=optimizer)
            lines.append(accuracy_row(name, label, fitted, fit_s, step_s))
            print(lines[-1], flush=True)
        recoup.remove(case.model)
        del case, optimizer, profile, fitted
    return lines


def accuracy_row(name: str, label: str, fitted: Fitted, fit_s: float, step_s: float) -> str:
    """One line of the table."""
    seen, plan = fitted.verification, fitted.plan
    assert seen is not None
    assert seen.peak_bytes <= plan.budget_bytes
    kinds = sorted({what for _, what in plan.describe_units() if what != "keep"})
    shown = f"{kinds[0]}{f' and {len(kinds) - 1} more' if len(kinds) > 1 else ''}" if kinds else "keep"
    return (
        f"| {name} | {label}, {format_bytes(plan.budget_bytes)} | {shown} | {plan.predicted_bytes:,} |"
        f" {seen.peak_bytes:,} | {seen.peak_bytes / plan.predicted_bytes - 1:+.2%} | {plan.predicted_s * 1e3:.2f} |"
        f" {seen.seconds * 1e3:.2f} | {seen.seconds / plan.predicted_s - 1:+.1%} | {fit_s:.2f} |"
        f" {15 * step_s + 2:.2f} |"
    )


# The smallest budget, against a checkpoint around every block


class Checkpointed(nn.Module):
    """A block under torch's own checkpoint."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any) -> Any:
        """The block, forgotten and replayed."""
        return checkpoint(self.block, *args, use_reentrant=False)


def wrap_all(modules: nn.ModuleList) -> None:
    """Puts torch's checkpoint around every module of a list."""
    for index, block in enumerate(modules):
        modules[index] = Checkpointed(block)


class Chain(nn.Module):
    """Equal blocks one after the other."""

    def __init__(self, num_blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.Tanh())
            for _ in range(num_blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of the last output."""
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def chain(num_blocks: int, device: str) -> Case:
    """A chain and its sample."""
    torch.manual_seed(0)
    width, batch = (1024, 16384) if device == "cuda" else (16, 4096)
    model = Chain(num_blocks, width).to(device)
    return Case(model, torch.randn(batch, width, device=device), None)


def every_block(case: Case) -> Case:
    """The same with torch's checkpoint around every block."""
    model = copy.deepcopy(case.model)
    if isinstance(model, UNet):
        model.first = Checkpointed(model.first)  # type: ignore[assignment]
        wrap_all(model.down)
        wrap_all(model.up)
    else:
        wrap_all(model.blocks)  # type: ignore[arg-type]
    return Case(model, case.sample, case.loss)


def activation_peak(case: Case, device: str) -> int:
    """Bytes that a step takes beyond what is there before, and its gradients."""
    gradients: int = sum(p.numel() * p.element_size() for p in case.model.parameters())
    if device == "cuda":
        step(case)
        case.model.zero_grad()
        gc.collect()  # what goes meanwhile would count as less
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(case)
        return int(torch.cuda.max_memory_allocated() - before - gradients)
    with MemoryTracker() as memory:
        step(case)
    case.model.zero_grad()
    return int(memory.peak_bytes - gradients)


def minimum(device: str) -> Lines:
    """The smallest budget that a real step keeps, against torch's checkpoint around every block."""
    lines = [
        "| model | plain | torch, every block | recoup, smallest | of torch's | ms plain | ms torch | ms recoup |",
        "|---|---|---|---|---|---|---|---|",
    ]
    cases: dict[str, Callable[[], Case]] = {
        "GPT": lambda: make("GPT", device),
        "U-Net": lambda: make("U-Net, skips", device),
        "chain of 200": lambda: chain(200, device),
    }
    for name, create in cases.items():
        case = create()
        plain = activation_peak(case, device)
        other = every_block(case)
        theirs, their_s = activation_peak(other, device), plain_step_s(other, 3)
        del other
        plain_s = plain_step_s(case, 3)
        profile = recoup.measure(case.model, case.sample, loss=case.loss)
        low = recoup.minimum_budget(profile)
        if isinstance(case.model, Chain):
            # At the very floor of a chain each unit is replayed dozens of times: half of torch's peak is practical.
            low = max(low, profile.residents.total_bytes + profile.residents.gradient_bytes + theirs // 2)
        fitted, _ = fit_at(case, low)
        assert fitted.verification is not None
        ours = activation_peak(case, device)
        lines.append(
            f"| {name} | {format_bytes(plain)} | {format_bytes(theirs)} | {format_bytes(ours)} |"
            f" {ours / theirs:.2f} | {plain_s * 1e3:.1f} | {their_s * 1e3:.1f} |"
            f" {fitted.verification.seconds * 1e3:.1f} |"
        )
        print(lines[-1], flush=True)
        del case, fitted, profile
    return lines


def depth(device: str) -> Lines:
    """How a chain's activations grow with its length: measured with one replay each, and the predicted floor."""
    lines = [
        "| equal units | plain | at most one replay each | that over √n | smallest, predicted | that over log₂ n |"
        " replays of each unit, smallest |",
        "|---|---|---|---|---|---|---|",
    ]
    for num_blocks in (125, 250, 500, 1000):
        case = chain(num_blocks, "cpu")
        profile = recoup.measure(case.model, case.sample)
        fixed = profile.residents.total_bytes + profile.residents.gradient_bytes
        low = recoup.minimum_budget(profile)
        smallest = low - fixed
        tight = recoup.plan(profile, low)
        recomputes = sum(tight.schedule.predicted.num_recomputes) / num_blocks
        high = profile.plain_bytes
        points = recoup.frontier(profile, budgets=[low + (high - low) * k**2 // 400 for k in range(21)])
        good = next(p for p in points if sum(p.schedule.predicted.num_recomputes) <= num_blocks)
        recoup.apply(case.model, good)
        ours = activation_peak(case, "cpu")
        lines.append(
            f"| {num_blocks} | {format_bytes(high - fixed)} | {format_bytes(ours)} |"
            f" {format_bytes(int(ours / math.sqrt(num_blocks)))} | {format_bytes(smallest)} |"
            f" {format_bytes(int(smallest / math.log2(num_blocks)))} | {recomputes:.1f} |"
        )
        print(lines[-1], flush=True)
    return lines


SECTIONS = {"accuracy": accuracy, "minimum": minimum, "depth": depth}


def hardware(device: str) -> str:
    """A short name of what this runs on."""
    if device == "cuda":
        return torch.cuda.get_device_name().lower().replace("nvidia ", "").replace(" ", "-")
    return f"cpu-{platform.machine().lower()}"


def main() -> None:
    """Runs the sections and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", nargs="*", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--output", type=Path, default=ROOT / "results")
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    today = datetime.date.today()
    lines = [
        f"# Fitting on {hardware(options.device)}",
        "",
        f"{today}, torch {torch.__version__}, Python {platform.python_version()}"
        f"{', one thread' if options.device == 'cpu' else ''}. Peaks are of the whole step with AdamW's state,"
        " except where activations are named. `python benchmarks/fitting.py`.",
    ]
    for name in options.only:
        section = SECTIONS[name]
        lines += ["", f"## {section.__doc__}", ""]
        lines += section(options.device)
    path = options.output / f"fitting_{hardware(options.device)}_{today:%Y%m}.md"
    path.write_text("\n".join(lines) + "\n")
    print(f"\nwritten to {path.name}")


if __name__ == "__main__":
    main()
