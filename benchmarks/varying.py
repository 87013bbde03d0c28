"""Batches of varying lengths: plans by size against one plan for the longest, and against checkpointing every layer.

Run it with ``python benchmarks/varying.py`` on a GPU; it prints a report and writes it to
``benchmarks/results/varying_HARDWARE_YYYYMM.md``. Lengths are drawn as in instruction tuning: most are short, few are
long, and the median is a quarter of the longest. The budget is what recomputing every layer needs at the longest. All
three train on the same batches, in turn; each takes a whole step, the optimizer's included.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from library import switch_checkpointing
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import recoup
from recoup.fitting import Fitted

ROOT = Path(__file__).resolve().parent
SPREAD = 0.7
"""Of the logarithm of lengths."""


def make_model(small: bool, device: str) -> Any:
    torch.manual_seed(0)
    sizes = (64, 176, 4, 4, 2, 256) if small else (2048, 5632, 22, 32, 4, 32000)
    width, inner, layers, heads, groups, words = sizes
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=words,
    )
    model: Any = LlamaForCausalLM(config)
    return model.to(device, torch.float32 if small else torch.bfloat16).train()


def draw_lengths(number: int, longest: int) -> list[int]:
    """Log-normal, clipped, in multiples of 8; the longest is among them."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(number - 1, generator=generator) * SPREAD
    lengths = (longest / 4 * drawn.exp()).clamp(longest / 32, longest)
    return [longest, *(8 * max(1, round(float(length) / 8)) for length in lengths)]


class Trainer:
    """Steps of one model under several ways to save memory."""

    def __init__(self, model: Any, words: int, rows: int, device: str) -> None:
        self.model, self.words, self.rows, self.device = model, words, rows, device
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)

    def batch(self, length: int) -> dict[str, Tensor]:
        """Random text."""
        ids = torch.randint(0, self.words, (self.rows, length), device=self.device)
        return {"input_ids": ids, "labels": ids}

    def step(self, batch: dict[str, Tensor]) -> None:
        """A whole step."""
        self.model(**batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed(self, batch: dict[str, Tensor]) -> tuple[float, int]:
        """Seconds and peak bytes of a step."""
        if self.device == "cpu":
            start = time.perf_counter()
            with recoup.measuring.MemoryTracker() as tracker:
                self.step(batch)
            return time.perf_counter() - start, tracker.peak_bytes
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        self.step(batch)
        torch.cuda.synchronize()
        return time.perf_counter() - start, torch.cuda.max_memory_allocated()


def by_hand_peak(trainer: Trainer, batch: dict[str, Tensor]) -> int:
    switch_checkpointing(trainer.model, True)
    trainer.step(batch)
    peak = trainer.timed(batch)[1]
    switch_checkpointing(trainer.model, False)
    return peak


def pick_microseconds(fitted: Fitted, batches: list[dict[str, Tensor]]) -> float:
    """Of reading a call's size and picking its plan, once its size was seen."""
    assert fitted.by_size is not None
    from recoup.engines.by_size import Picker

    picker = Picker(fitted.by_size)

    def pick() -> None:
        for batch in batches:
            picker.items_for(type(fitted.model).forward, (), batch)

    pick()
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        pick()
        rounds.append((time.perf_counter() - start) / len(batches))
    return 1e6 * statistics.median(rounds)


def run(arguments: argparse.Namespace) -> list[str]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    small = arguments.small
    longest, rows, number = (128, 2, 8) if small else (arguments.longest, arguments.rows, arguments.number)
    model = make_model(small, device)
    trainer = Trainer(model, model.config.vocab_size, rows, device)
    longest_batch = trainer.batch(longest)
    trainer.step(longest_batch)
    budget = by_hand_peak(trainer, longest_batch)
    if device == "cpu":
        profile = recoup.measure(model, longest_batch, optimizer=trainer.optimizer, holds_output=False)
        budget = int(1.2 * recoup.minimum_budget(profile))
    start = time.perf_counter()
    one = recoup.fit(model, longest_batch, budget=budget, optimizer=trainer.optimizer, holds_output=False)
    one_s = time.perf_counter() - start
    start = time.perf_counter()
    samples = [trainer.batch(length) for length in (longest // 8, longest // 2)] + [longest_batch]
    several = recoup.fit(
        model, samples=samples, budget=budget, optimizer=trainer.optimizer, holds_output=False
    )
    several_s = time.perf_counter() - start
    by_size = several.by_size
    assert by_size is not None

    def checkpoint_layers() -> None:
        recoup.remove(model)
        switch_checkpointing(model, True)

    ways: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "plans by size": (lambda: recoup.apply(model, by_size), lambda: recoup.remove(model)),
        "one plan for the longest": (lambda: recoup.apply(model, one.plan), lambda: recoup.remove(model)),
        "gradient_checkpointing_enable": (
            checkpoint_layers,
            lambda: switch_checkpointing(model, False),
        ),
    }
    lengths = draw_lengths(number, longest)
    batches = [trainer.batch(length) for length in lengths]
    recoup.remove(model)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    peaks = dict.fromkeys(ways, 0)
    for turn, batch in enumerate(batches):
        names = list(ways)
        for name in names[turn % 3 :] + names[: turn % 3]:
            begin, end = ways[name]
            begin()
            trainer.step(batch)  # warm-up at this length: the allocator, and comparisons of replays
            taken = [trainer.timed(batch) for _ in range(2)]
            seconds[name].append(min(second for second, _ in taken))
            peaks[name] = max(peaks[name], *(peak for _, peak in taken))
            end()
    tokens = sum(rows * length for length in lengths)
    speed = {name: tokens / sum(found) for name, found in seconds.items()}
    ours = speed["plans by size"]
    rows_out = [
        f"{torch.cuda.get_device_name() if device == 'cuda' else platform.machine()}, torch {torch.__version__},"
        f" {sum(p.numel() for p in model.parameters()) / 1e9:.2f} B parameters, {len(lengths)} batches of {rows}"
        f" sequences, lengths {min(lengths)} to {longest}, median {statistics.median(lengths):.0f}; budget"
        f" {budget / 2**30:.2f} GiB.",
        "",
        "| | tokens per second | plans by size against it | largest peak of the budget |",
        "|---|---|---|---|",
        *(
            f"| {name} | {speed[name]:,.0f} | {100 * (ours / speed[name] - 1):+.1f} % |"
            f" {100 * peaks[name] / budget:.2f} % |"
            for name in ways
        ),
        "",
        f"Fits: {one_s:.1f} s for the longest, {several_s:.1f} s for three sizes. Picking a plan:"
        f" {pick_microseconds(several, batches):.1f} µs a step.",
        "",
        "| up to | predicted peak | seconds per 1,000 tokens | |",
        "|---|---|---|---|",
        *(
            f"| {one.up_to[0]} | {one.plan.predicted_bytes / 2**30:.2f} GiB |"
            f" {1000 * one.seconds_per_element / rows:.4f} |"
            f" {'; '.join(f'{names}: {label}' for names, label in one.plan.describe_units())} |"
            for one in by_size.ranges
        ),
    ]
    return rows_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a small model, to try it")
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument("--name", default="h200" if torch.cuda.is_available() else "cpu-x86_64")
    parser.add_argument("--output", type=Path, default=ROOT / "results")
    arguments = parser.parse_args()
    report = "\n".join(["# Batches of varying lengths", "", *run(arguments), ""])
    print(report)
    if not arguments.small:
        today = datetime.date.today()
        (arguments.output / f"varying_{arguments.name}_{today:%Y%m}.md").write_text(report)


if __name__ == "__main__":
    main()
