"""Time to the first step of a `Trainer` with `RecoupCallback`, against plain steps.

Run it with ``python benchmarks/first_step.py``; it prints a report and writes it to
``benchmarks/results/first_step_HARDWARE_YYYYMM.md``. A GPT-2 of transformers is trained with the trainer's defaults:
plainly, and with the callback and a budget of 70 % of the plain peak.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from recoup.integrations.transformers import RecoupCallback

ROOT = Path(__file__).resolve().parent
NUM_STEPS = 12


class Clock(TrainerCallback):
    """When training begins, and its steps end."""

    def __init__(self) -> None:
        self.begin_s = 0.0
        self.ends_s: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """A step has ended."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends_s.append(time.perf_counter())

    @property
    def first_s(self) -> float:
        """From the beginning of training to the end of its first step."""
        return self.ends_s[0] - self.begin_s

    @property
    def step_s(self) -> float:
        """The median of later steps."""
        pairs = zip(self.ends_s[2:], self.ends_s[3:], strict=False)
        return statistics.median(after - before for before, after in pairs)


def train(small: bool, budget: int | None) -> tuple[Clock, int]:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 512} if small else {}
    model = GPT2LMHeadModel(GPT2Config(**settings))
    length, rows = (64, 4) if small else (1024, 8)
    ids = torch.randint(0, model.config.vocab_size, (rows * NUM_STEPS, length))
    data = [{"input_ids": row, "labels": row} for row in ids]
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=rows, max_steps=NUM_STEPS, report_to=[], save_strategy="no"
        )
        callbacks: list[TrainerCallback] = [clock]
        if budget is not None:
            callbacks.append(RecoupCallback(budget=budget))
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        clock.begin_s = time.perf_counter()
        trainer.train()
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return clock, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a small model, to try it")
    parser.add_argument("--budget", type=int, help="in bytes; by default 70 % of the plain peak")
    parser.add_argument("--name", default="h200" if torch.cuda.is_available() else "cpu-x86_64")
    parser.add_argument("--output", type=Path, default=ROOT / "results")
    given = parser.parse_args()
    train(given.small, None)  # what the first training of a process loads
    plain, peak = train(given.small, None)
    budget = given.budget or int(0.7 * peak)
    fitted, fitted_peak = train(given.small, budget)
    more_s = fitted.first_s - plain.first_s
    limit_s = 30 * plain.step_s + 5
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    report = "\n".join(
        [
            "# Time to the first step with RecoupCallback",
            "",
            f"{device}, torch {torch.__version__}, {datetime.date.today()}, GPT-2 of transformers, trainer's defaults.",
            "",
            f"Plain: first step after {plain.first_s:.2f} s, later steps {1000 * plain.step_s:.0f} ms, peak"
            f" {peak / 2**30:.2f} GiB. With the callback and {budget / 2**30:.2f} GiB: first step after"
            f" {fitted.first_s:.2f} s, later steps {1000 * fitted.step_s:.0f} ms, peak {fitted_peak / 2**30:.2f} GiB"
            " (the fit's included).",
            "",
            f"The callback adds {more_s:.2f} s; 30 plain steps and 5 s are {limit_s:.2f} s.",
            "",
        ]
    )
    print(report)
    if not given.small:
        name = f"first_step_{given.name}_{datetime.date.today():%Y%m}.md"
        (given.output / name).write_text(report)


if __name__ == "__main__":
    main()
