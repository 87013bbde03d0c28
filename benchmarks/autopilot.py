"""What the autopilot costs: in every step, and after a step that ran out of memory.

Run it with ``python benchmarks/autopilot.py``; it prints a report and writes it to
``benchmarks/results/autopilot_HARDWARE_YYYYMM.md``. Figures are medians.
"""

from __future__ import annotations

import datetime
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import recoup
from recoup.demo import Block
from recoup.devices.meter import gc_disabled
from recoup.plans.by_size.plans import PlansBySize
from recoup.plans.model_plan import Replanner

ROOT = Path(__file__).resolve().parent
NUM_BLOCKS, NUM_PLANS, NUM_STEPS, LENGTH = 100, 20, 16, 32


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def seconds_of(run: Any) -> float:
    """Of the process: on a busy machine the clock also counts others."""
    start = time.process_time()
    run()
    return time.process_time() - start


def replanning(profile: Any) -> list[str]:
    """Seconds of the first plan of a profile, and of plans for other budgets after it."""
    made: list[Replanner] = []
    first_s = seconds_of(lambda: made.append(Replanner(profile)))
    low, high = recoup.minimum_budget(profile), profile.plain_bytes
    budgets = [low + (high - low) * index // NUM_PLANS for index in range(NUM_PLANS)]
    with gc_disabled():  # as the autopilot does
        again_s = sorted(seconds_of(lambda budget=budget: made[0].plan(budget)) for budget in budgets)
    return [
        f"{len(profile.units)} units. Making the planner: {first_s:.2f} s. Plans for {NUM_PLANS} budgets after it:"
        f" median {1000 * statistics.median(again_s):.0f} ms, longest {1000 * again_s[-1]:.0f} ms.",
    ]


def replanning_by_size(plans: PlansBySize) -> list[str]:
    """Seconds of the plan for a batch under other budgets: of a length that is new, and of one that is not."""
    tightest_bytes = plans.within(0).plan.predicted_bytes
    span_bytes = plans.budget_bytes - tightest_bytes
    new_s, again_s = [], []
    with gc_disabled():
        for index in range(1, NUM_PLANS):
            budget, size = tightest_bytes + span_bytes * index // NUM_PLANS, (LENGTH - index,)
            new_s.append(seconds_of(lambda: plans.within(budget).plan_at(size)))  # noqa: B023
            again_s.append(seconds_of(lambda: plans.within(budget - 1).plan_at(size)))  # noqa: B023
    return [
        f"With plans by size ({len(plans.schedules)} schedules), the plan for a batch under another budget: median"
        f" {1000 * statistics.median(new_s):.0f} ms, longest {1000 * max(new_s):.0f} ms for a length that no plan was"
        f" made for before; median {1000 * statistics.median(again_s):.0f} ms, longest {1000 * max(again_s):.0f} ms for"
        " one that was.",
    ]


def steps(model: nn.Module, fitted: Any, batch: Tensor) -> list[str]:
    """Seconds of a step, of what the autopilot does in it, and of one that fails once."""
    pilot = recoup.autopilot(fitted)
    fails: list[int] = []

    def run() -> None:
        loss_of(model(batch)).backward()
        if fails:
            fails.clear()
            raise torch.OutOfMemoryError("for the benchmark")

    def piloted() -> None:
        pilot.step(run)
        model.zero_grad()

    step_s = statistics.median(seconds_of(piloted) for _ in range(NUM_STEPS))
    hold_s = statistics.median(seconds_of(pilot._state.hold) for _ in range(NUM_STEPS))
    settle_s = seconds_of(pilot._state.settle)
    fails.append(1)
    failed_s = seconds_of(piloted)
    num_modules = sum(1 for _ in model.modules())
    return [
        f"A step of {num_modules} modules takes {1000 * step_s:.0f} ms under the autopilot. Of that, keeping what a"
        f" failure would put back: {1000 * hold_s:.2f} ms, and letting it go: {1000 * settle_s:.2f} ms.",
        f"A step that ran out of memory at its end: {1000 * failed_s:.0f} ms in all, with both attempts.",
    ]


def main() -> int:
    torch.set_num_threads(1)
    model, batch = make_model(), torch.randn(4, LENGTH, 128)
    profile = recoup.measure(model, batch, loss=loss_of)
    budget = (recoup.minimum_budget(profile) + profile.plain_bytes) // 2
    fitted = recoup.fit(model, batch, budget=budget, loss=loss_of, race=False)
    samples = [batch[:, : LENGTH // 4], batch[:, : LENGTH // 2], batch]
    sized = recoup.fit(make_model(), samples=samples, budget=budget, loss=loss_of, race=False, verify=False)
    assert sized.by_size is not None
    lines = [
        "# The autopilot's cost",
        "",
        f"`python benchmarks/autopilot.py`, {datetime.date.today():%Y-%m-%d}, {platform.machine()},"
        f" torch {torch.__version__}, one thread, seconds of the process. {NUM_BLOCKS} transformer blocks of width 128,"
        f" 4 x {LENGTH} tokens.",
        "",
        *replanning(fitted.profile),
        "",
        *replanning_by_size(sized.by_size),
        "",
        *steps(model, fitted, batch),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    name = f"autopilot_cpu-{platform.machine()}_{datetime.date.today():%Y%m}.md"
    (ROOT / "results" / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
