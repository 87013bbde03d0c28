"""How exact predicted peaks are: the plain step's and those of plans at five budgets, against real steps.

Run it with ``python benchmarks/predictions.py`` (``--device cuda`` on a GPU); it prints a table and writes it to
``benchmarks/results/predictions_HARDWARE_YYYYMM.md`` and ``.json``. ``--only "U-Net 3" transformers`` runs some models
or kinds, ``--quick`` every fifth model. ``--random 8`` adds random plans, which no planner would choose and which peak
in other phases of the step. ``--truth allocator`` takes peaks on a CPU from the allocator, through the profiler:
without a tracker that sees every operation, and with the workspace of kernels.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import random
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from fitting import hardware
from library import LIBRARY
from made_up import MADE_UP
from made_up.parts import Subject
from torch import Tensor, nn
from vision import VISION

import recoup
from recoup.engines import ModelPlan, Segment
from recoup.measuring import MemoryTracker, Profile, preserving
from recoup.model.caches import without_caches
from recoup.model.step import TrainingStep
from recoup.planning import Action, Backward, Forward, Keep, Problem, Schedule, simulate

ROOT = Path(__file__).resolve().parent
Create = Callable[[int], Subject]
KINDS: dict[str, dict[str, Create]] = {
    "made-up": MADE_UP,
    "transformers": LIBRARY,
    "torchvision-like": VISION,
}
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
SCALE = {"cpu": 1, "cuda": 32}
"""Batches are larger on a GPU, whose allocator rounds."""
MOST_TOO_LOW = {"made-up": 0.01}
MOST_TOO_HIGH = {"transformers": 0.02, "torchvision-like": 0.02}
EXPLANATION = (
    "An error is the prediction less the measured peak, as a share of the measured peak: below zero the prediction was"
    " too low. A step is a forward and a backward; SGD without momentum has no state that could hide an error. Over"
    " budget: plans whose real step peaked above the budget that they were made for, which `fit` would refuse and make"
    " again. Budgets run from the smallest to the plain peak; which plan is the fastest there depends on the machine."
)


@dataclass
class Planned:
    """A plan and the real step under it."""

    share: float | None
    budget_bytes: int
    predicted_bytes: int
    measured_bytes: int
    has_segments: bool

    @property
    def error(self) -> float:
        """Below zero where the prediction was too low."""
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def is_over(self) -> bool:
        """Whether the real step passes the budget."""
        return self.measured_bytes > self.budget_bytes


@dataclass
class Row:
    """A model: its plain step, and its plans."""

    name: str
    kind: str
    num_units: int = 0
    plain_predicted_bytes: int = 0
    plain_measured_bytes: int = 0
    seconds: float = 0.0
    plans: list[Planned] = field(default_factory=list)
    random_plans: list[Planned] = field(default_factory=list)
    failure: str = ""

    @property
    def plain_error(self) -> float:
        """Of the plain step."""
        return self.plain_predicted_bytes / self.plain_measured_bytes - 1

    @property
    def errors(self) -> list[float]:
        """Of the plain step and of the plans at five budgets."""
        return [self.plain_error, *(plan.error for plan in self.plans)]

    @property
    def misses(self) -> str:
        """Which target is missed, if any."""
        if self.failure:
            return "failed"
        is_low = -min(self.errors) > MOST_TOO_LOW.get(self.kind, float("inf"))
        is_high = max(self.errors) > MOST_TOO_HIGH.get(self.kind, float("inf"))
        return " and ".join(["too low"] * is_low + ["too high"] * is_high)


# Real steps


def tracked_peak(run: Callable[[], None]) -> int:
    """Bytes of tensors, as a tracker counts them."""
    with MemoryTracker() as memory:
        run()
    return int(memory.peak_bytes)


def allocator_peak(run: Callable[[], None]) -> int:
    """Bytes that the CPU's allocator gave out, as the profiler notes them."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        run()
    live_bytes, peak_bytes = 0, 0
    assert profiler.profiler is not None
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live_bytes += event.nbytes()
            peak_bytes = max(peak_bytes, live_bytes)
    return peak_bytes


def cuda_peak(run: Callable[[], None]) -> int:
    """Bytes that CUDA's allocator gave out."""
    torch.cuda.synchronize()
    before_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before_bytes)


TRUTHS = {"tracker": tracked_peak, "allocator": allocator_peak, "cuda": cuda_peak}


def set_gradients(model: nn.Module, accumulates: bool) -> None:
    """Gradients as they are before a step."""
    for parameter in model.parameters():
        is_there = accumulates and parameter.requires_grad
        parameter.grad = torch.zeros_like(parameter) if is_there else None


def measured_bytes(subject: Subject, profile: Profile, truth: str) -> int:
    """The peak of a real step, with what lives before it."""
    step = TrainingStep(subject.model, subject.sample, loss=subject.loss)
    residents = profile.residents

    def run() -> None:
        output, loss = step.forward()
        if not subject.holds_output:
            output = None
        loss.backward()
        del output

    torch.manual_seed(1)
    with preserving(subject.model):
        if truth == "cuda":
            run()  # the first step under a plan makes workspaces
        set_gradients(subject.model, subject.accumulates)
        gc.collect()
        peak_bytes = TRUTHS[truth](run)
    lived_bytes = residents.total_bytes + subject.accumulates * residents.gradient_bytes
    return max(lived_bytes + peak_bytes, residents.optimizer_peak_bytes)


# Plans


def option_of_each(problem: Problem, draw: random.Random) -> Schedule:
    """Every unit under any of its options."""
    chosen = [draw.randrange(len(unit.options)) for unit in problem.units]
    forwards = [Forward(unit, keep=Keep.OPTION, option=option) for unit, option in enumerate(chosen)]
    backwards = [Backward(unit, option=option) for unit, option in enumerate(chosen)]
    return Schedule([*forwards, *reversed(backwards)])


def in_segments(problem: Problem, draw: random.Random) -> Schedule:
    """Units that are kept, and segments whose units are kept when they are replayed."""
    forwards: list[Action] = []
    backwards: list[list[Action]] = []
    first = 0
    while first < problem.num_units:
        last = first
        replay: list[Action] = []
        if not problem.units[first].runs_once and draw.random() < 0.6:
            forwards.append(Forward(first, keep=Keep.INPUT))
            while not problem.units[last + 1].runs_once and draw.random() < 0.5:
                last += 1
                forwards.append(Forward(last))
            replay = [Forward(unit, keep=Keep.OPTION, option=0) for unit in range(first, last + 1)]
        else:
            forwards.append(Forward(first, keep=Keep.OPTION, option=0))
        backwards.append([*replay, *(Backward(unit, option=0) for unit in reversed(range(first, last + 1)))])
        first = last + 1
    return Schedule([*forwards, *(action for part in reversed(backwards) for action in part)])


def random_plans(profile: Profile, num_plans: int) -> Iterator[ModelPlan]:
    """Plans that no planner need find."""
    plain = recoup.plan(profile, profile.plain_bytes)
    draw = random.Random(0)
    for index in range(num_plans):
        schedule = (option_of_each, in_segments)[index % 2](profile.problem, draw)
        predicted = simulate(profile.problem, schedule)
        found = replace(plain.schedule, schedule=schedule, predicted=predicted)
        drawn = ModelPlan(profile, found, predicted.peak_bytes)
        yield replace(drawn, budget_bytes=drawn.predicted_bytes)


def planned(subject: Subject, plan: ModelPlan, share: float | None, truth: str) -> Planned:
    """A plan, applied, measured and removed."""
    recoup.apply(subject.model, plan)
    try:
        peak_bytes = measured_bytes(subject, plan.profile, truth)
    finally:
        recoup.remove(subject.model)
    has_segments = any(isinstance(item, Segment) for item in plan.items)
    return Planned(share, plan.budget_bytes, plan.predicted_bytes, peak_bytes, has_segments)


# Rows


def to_device(value: Any, device: str) -> Any:
    """A sample on a device."""
    if isinstance(value, tuple):
        return tuple(to_device(part, device) for part in value)
    if isinstance(value, dict):
        return {name: to_device(part, device) for name, part in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value


def make(create: Create, device: str) -> Subject:
    """A subject on a device."""
    random.seed(0)
    torch.manual_seed(0)
    subject = create(SCALE[device])
    return subject._replace(model=subject.model.to(device), sample=to_device(subject.sample, device))


def profile_of(subject: Subject) -> Profile:
    """The measured step."""
    trained = [parameter for parameter in subject.model.parameters() if parameter.requires_grad]
    return recoup.measure(
        subject.model,
        subject.sample,
        loss=subject.loss,
        optimizer=torch.optim.SGD(trained, lr=0.1),
        accumulates=subject.accumulates,
        holds_output=subject.holds_output,
    )


def fill(row: Row, subject: Subject, *, truth: str, num_random: int) -> None:
    """Measures a model, its plain step, and steps under its plans."""
    profile = profile_of(subject)
    row.num_units = sum(not unit.is_code for unit in profile.units)
    row.plain_predicted_bytes = profile.plain_bytes
    with without_caches(subject.model):
        row.plain_measured_bytes = measured_bytes(subject, profile, truth)
    low, high = recoup.minimum_budget(profile), profile.plain_bytes
    for share in SHARES:
        plan = recoup.plan(profile, int(low + share * (high - low)))
        row.plans.append(planned(subject, plan, share, truth))
    row.random_plans = [planned(subject, plan, None, truth) for plan in random_plans(profile, num_random)]


def look_at(row: Row, *, device: str, truth: str, num_random: int) -> Row:
    """Fills one row of the table."""
    warnings.filterwarnings("ignore")
    if device == "cpu":
        torch.set_num_threads(1)
    gc.collect()
    start_s = time.perf_counter()
    try:
        subject = make(KINDS[row.kind][row.name], device)
        fill(row, subject, truth=truth, num_random=num_random)
    except Exception as error:  # a model that fails is a line of the table
        row.failure = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        traceback.print_exc()
    row.seconds = time.perf_counter() - start_s
    return row


# The report

HEADER = (
    "| model | kind | units | plain peak | plain error | plans | over budget | segments | random plans | s | misses |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)


def span(errors: list[float]) -> str:
    """From the worst too low to the worst too high."""
    return f"{min(0.0, *errors):+.2%} … {max(0.0, *errors):+.2%}" if errors else ""


def line(row: Row) -> str:
    """A row as markdown."""
    if row.failure:
        return f"| {row.name} | {row.kind} | | | | | | | | | {row.failure} |"
    num_over = sum(plan.is_over for plan in row.plans)
    has_segments = any(plan.has_segments for plan in row.plans)
    cells = (
        row.name,
        row.kind,
        str(row.num_units),
        f"{row.plain_measured_bytes / 2**20:.2f} MiB",
        f"{row.plain_error:+.2%}",
        span([plan.error for plan in row.plans]),
        f"{num_over} of {len(row.plans)}" if num_over else "no",
        "yes" if has_segments else "no",
        span([plan.error for plan in row.random_plans]),
        f"{row.seconds:.1f}",
        row.misses,
    )
    return f"| {' | '.join(cells)} |"


def summary(rows: list[Row]) -> Iterator[str]:
    """How far each kind is from its target."""
    for kind in KINDS:
        mine = [row for row in rows if row.kind == kind and not row.failure]
        if not mine:
            continue
        plans = [plan for row in mine for plan in row.plans]
        missing = [row.name for row in mine if row.misses]
        targets = [f"none too low by more than {MOST_TOO_LOW[kind]:.0%}"] if kind in MOST_TOO_LOW else []
        targets += [f"none too high by more than {MOST_TOO_HIGH[kind]:.0%}"] if kind in MOST_TOO_HIGH else []
        yield (
            f"- {kind}, {len(mine)} models: errors {span([error for row in mine for error in row.errors])};"
            f" {sum(plan.is_over for plan in plans)} of {len(plans)} plans over their budget. Target:"
            f" {', '.join(targets)}; missed by {len(missing)}{': ' if missing else ''}{', '.join(missing)}."
        )


def worst_first(row: Row) -> tuple[int, bool, float]:
    """By kind, those that miss a target first, the worst of them first."""
    worst = max(map(abs, row.errors)) if not row.failure else float("inf")
    return list(KINDS).index(row.kind), not row.misses, -worst


def report(rows: list[Row], device: str, truth: str) -> str:
    """The whole report as markdown."""
    lines = [
        f"# Predicted peaks against real steps on {hardware(device)}",
        "",
        f"{datetime.date.today()}, torch {torch.__version__}, Python {platform.python_version()}, truth: {truth}."
        f" `python benchmarks/predictions.py`. {EXPLANATION}",
        "",
        *summary(rows),
        "",
        *HEADER,
        *map(line, sorted(rows, key=worst_first)),
    ]
    return "\n".join(lines) + "\n"


def chosen(only: list[str] | None, quick: bool) -> list[Row]:
    """The models to look at."""
    found = [Row(name, kind) for kind, models in KINDS.items() for name in models]
    if only is not None:
        unknown = set(only) - {*KINDS, *(row.name for row in found)}
        if unknown:
            raise SystemExit(f"no such model or kind: {', '.join(sorted(unknown))}")
        found = [row for row in found if row.name in only or row.kind in only]
    return found[::5] if quick else found


def filled(rows: list[Row], num_jobs: int, **options: Any) -> Iterator[Row]:
    """Rows as they are finished, in their order; each process has one thread."""
    look = partial(look_at, **options)
    if num_jobs == 1:
        yield from map(look, rows)
        return
    with ProcessPoolExecutor(num_jobs, get_context("spawn")) as pool:
        yield from pool.map(look, rows)


def main() -> None:
    """Looks at every model and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=list(SCALE))
    parser.add_argument("--truth", default="tracker", choices=("tracker", "allocator"), help="on a CPU")
    parser.add_argument("--only", nargs="*", help="models, or kinds of them")
    parser.add_argument("--quick", action="store_true", help="every fifth model")
    parser.add_argument("--jobs", type=int, default=1, help="processes; bytes do not depend on them")
    parser.add_argument("--random", type=int, default=0, metavar="NUM", help="random plans of each model")
    parser.add_argument("--output", type=Path, default=ROOT / "results")
    options = parser.parse_args()
    truth = "cuda" if options.device == "cuda" else options.truth
    print("\n".join(HEADER))
    rows = []
    todo = chosen(options.only, options.quick)
    for row in filled(todo, options.jobs, device=options.device, truth=truth, num_random=options.random):
        rows.append(row)
        print(line(row), flush=True)
    print("\n".join(summary(rows)))
    path = options.output / f"predictions_{hardware(options.device)}_{datetime.date.today():%Y%m}.md"
    path.write_text(report(rows, options.device, truth), encoding="utf-8")
    records = ",\n".join(json.dumps(asdict(row)) for row in rows)
    path.with_suffix(".json").write_text(f"[\n{records}\n]\n", encoding="utf-8")
    print(f"\nwritten to {path.name}")


if __name__ == "__main__":
    main()
