"""The planner's figures: how long it plans, and how much slower a step each simpler method gives.

Run it with ``python benchmarks/planning.py``; it prints a report and writes it to
``benchmarks/results/planning_CPU_YYYYMM.md``. Every result is checked (legal, under the budget, above the
bound) before its time counts. ``--only chain growth`` runs some sections, ``--repeats 3`` sets how often. To
add a section, write a function that takes the number of repeats and returns lines of markdown, and add it to
SECTIONS.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from recoup.planning import Option, Plan, Problem, Unit, frontier, minimum_budget, plan, revolve, simulate
from recoup.planning.solvers import SOLVERS
from recoup.planning.solvers.baselines import BASELINES
from recoup.planning.solvers.chain import solve_chain
from recoup.planning.solvers.select import SelectSolver

ROOT = Path(__file__).resolve().parent
MIB = 2**20
Lines = list[str]


# Problems


def unequal(num_units: int, *, num_options: int = 4, seed: int = 0) -> Problem:
    """Random units, none like another, with options from keeping everything to keeping nothing."""
    rng = random.Random(seed)
    units = []
    for index in range(num_units):
        forward_s, held = rng.uniform(1e-3, 9e-3), rng.randint(20 * MIB, 200 * MIB)
        units.append(_unit(f"u{index}", forward_s, held, rng.randint(2 * MIB, 16 * MIB), num_options))
    return Problem(units, resident_bytes=2**30, input_bytes=4 * MIB)


def equal(num_units: int, *, num_options: int = 4) -> Problem:
    """An embedding, equal blocks, a loss."""
    blocks = [_unit(f"block{i}", 3.1e-3, 117 * MIB + 512, 8 * MIB, num_options) for i in range(num_units - 2)]
    head = _unit("embedding", 0.4e-3, 8 * MIB, 8 * MIB, num_options)
    return Problem([head, *blocks, _unit("loss", 2e-3, 300 * MIB, 512, num_options)], resident_bytes=2**30)


def two_kinds(num_units: int) -> Problem:
    """Equal blocks of one kind, then equal blocks of another."""
    first = [_unit(f"a{i}", 3.1e-3, 117 * MIB + 512, 8 * MIB, 4) for i in range(num_units // 2)]
    second = [_unit(f"b{i}", 4.7e-3, 61 * MIB + 512, 5 * MIB, 4) for i in range(num_units - num_units // 2)]
    return Problem([*first, *second], resident_bytes=2**30, input_bytes=4 * MIB)


def _unit(name: str, forward_s: float, held: int, output: int, num_options: int) -> Unit:
    options = []
    for k in range(num_options):
        share = 1 - k / max(1, num_options - 1)
        kept = int(held * share)
        options.append(
            Option(
                f"keep{share:.0%}",
                forward_s=forward_s,
                backward_s=2 * forward_s,
                extra_s=forward_s * (1 - share) ** 1.5,
                held_bytes=kept,
                forward_transient_bytes=held // 8,
                replay_transient_bytes=held - kept,
                backward_transient_bytes=held - kept + held // 8,
            )
        )
    return Unit(name, options, output_bytes=output, parameter_gradient_bytes=3 * MIB)


def budget_at(problem: Problem, share: float) -> int:
    """A budget between the smallest feasible one (0) and that of keeping everything (1)."""
    low = minimum_budget(problem)
    high = BASELINES[0].prepare(problem, time_limit_s=10).smallest_bytes
    assert high is not None
    return low + int((high - low) * share)


# Measuring


def timed(action: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median and spread (largest minus smallest) of some runs, in seconds."""
    spans = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        spans.append(time.perf_counter() - start)
    return statistics.median(spans), max(spans) - min(spans)


def checked(found: Plan) -> Plan:
    """A plan whose claims have been checked."""
    assert simulate(found.problem, found.schedule) == found.predicted
    assert found.predicted.peak_bytes <= found.budget_bytes
    assert found.bound.seconds <= found.predicted.seconds * (1 + 1e-9)
    return found


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The slope of log seconds against log size."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def verdict(median_s: float, limit_s: float) -> str:
    return f"{median_s:.2f} s | {limit_s:g} s | {'yes' if median_s <= limit_s else '**no**'}"


# Sections


def section_chain(repeats: int) -> Lines:
    lines = [
        "## Chain",
        "",
        "| what | median | at most | met | spread | gap proven |",
        "|---|---|---|---|---|---|",
    ]
    problem = unequal(100)
    for share in (0.5, 0.05):
        budget = budget_at(problem, share)
        candidate = solve_chain(problem, budget_bytes=budget, num_levels=500)
        assert candidate is not None
        assert candidate.bound is not None
        result = simulate(problem, candidate.schedule)
        assert result.peak_bytes <= budget
        gap = result.seconds / candidate.bound.seconds - 1
        median_s, spread_s = timed(
            partial(solve_chain, problem, budget_bytes=budget, num_levels=500), repeats
        )
        what = f"100 units x 4 options, 500 levels, budget at {share:.0%}"
        lines.append(f"| {what} | {verdict(median_s, 1)} | {spread_s:.2f} s | {gap:.3%} |")
    problems = {"1,000 equal units": equal(1000), "500 + 500 equal units": two_kinds(1000)}
    for name, problem in problems.items():
        for share in (0.5, 0.05):
            budget = budget_at(problem, share)
            found = checked(plan(problem, budget, solvers=SOLVERS[:1]))
            median_s, spread_s = timed(
                partial(plan, problem, budget, solvers=SOLVERS[:1]), max(1, repeats // 2)
            )
            what = f"{name}, budget at {share:.0%}"
            proof = f"{found.gap:.3%} ({found.bound.schedules})"
            lines.append(f"| {what} | {verdict(median_s, 10)} | {spread_s:.2f} s | {proof} |")
    return lines


def section_frontier(repeats: int) -> Lines:
    problem = unequal(100)
    budgets = [budget_at(problem, index / 19) for index in range(20)]
    points = frontier(problem, budgets=budgets)
    assert len(points) == 20
    for point in points:
        checked(point)
    whole_s, _ = timed(lambda: frontier(problem, budgets=budgets), repeats)
    one_s, _ = timed(lambda: plan(problem, budgets[10]), repeats)
    ratio = whole_s / one_s
    return [
        "## Frontier",
        "",
        "| what | median | one plan (middle) | ratio | at most | met |",
        "|---|---|---|---|---|---|",
        f"| 20 budgets, 100 unequal units x 4 options | {whole_s:.2f} s | {one_s:.2f} s | {ratio:.1f} | 5 |"
        f" {'yes' if ratio <= 5 else '**no**'} |",
    ]


def section_growth(repeats: int) -> Lines:
    lines = ["## Growth", "", "Time of `plan` at a budget of 30 %, all solvers.", ""]
    lines += [
        "| units | equal: seconds | winner | gap | unequal: seconds | winner | gap |",
        "|---|---|---|---|---|---|---|",
    ]
    sizes = [10, 30, 100, 300, 1000, 3000, 10_000]
    spans: dict[str, list[float]] = {"equal": [], "unequal": []}
    for size in sizes:
        cells = [f"{size:,}"]
        for name, make in (("equal", equal), ("unequal", unequal)):
            problem = make(size)
            budget = budget_at(problem, 0.3)
            start = time.perf_counter()
            found = plan(problem, budget)
            spans[name].append(time.perf_counter() - start)
            checked(found)
            cells += [f"{spans[name][-1]:.2f}", found.solver, f"{found.gap:.2%}"]
        lines.append(f"| {' | '.join(cells)} |")
    for name, seconds in spans.items():
        whole, tail = exponent(sizes, seconds), exponent(sizes[4:], seconds[4:])
        lines.append("")
        lines.append(f"Exponent, {name}: {whole:.2f} over all sizes, {tail:.2f} from 1,000 units on.")
    start = time.perf_counter()
    num_actions = len(revolve(10_000, num_slots=12))
    lines += [
        "",
        f"`revolve(10_000, num_slots=12)`: {time.perf_counter() - start:.2f} s for {num_actions:,} actions.",
    ]
    return lines


def section_baselines(repeats: int) -> Lines:
    contenders = (SelectSolver(), *BASELINES)
    names = [solver.name for solver in contenders]
    lines = [
        "## Beside the integer program and simpler methods",
        "",
        "How much longer a step takes than with `plan`, at equal budget. `select` is the integer program.",
        "",
    ]
    lines += [
        f"| problem | budget | plan | gap | {' | '.join(names)} |",
        "|---|---|---|---|" + "---|" * len(names),
    ]
    problems = {
        "100 unequal x 4": unequal(100),
        "50 equal x 2": equal(50, num_options=2),
        "100 equal x 4": equal(100),
    }
    for name, problem in problems.items():
        prepared = [solver.prepare(problem, time_limit_s=10) for solver in contenders]
        for share in (0.02, 0.1, 0.3, 0.6, 0.9):
            budget = budget_at(problem, share)
            found = checked(plan(problem, budget))
            cells = []
            for family in prepared:
                candidate = family.best(budget)
                if candidate is None:
                    cells.append("does not fit")
                    continue
                seconds = simulate(problem, candidate.schedule).seconds
                cells.append(f"+{seconds / found.predicted.seconds - 1:.2%}")
            seconds_text = f"{found.predicted.seconds:.4f} s ({found.solver})"
            lines.append(f"| {name} | {share:.0%} | {seconds_text} | {found.gap:.2%} | {' | '.join(cells)} |")
    return lines


def section_unrestricted(repeats: int) -> Lines:
    """How far all schedules lie below the persistent ones, by the tests' brute force."""
    sys.path.insert(0, str(ROOT.parent / "tests" / "planning"))
    brute_force = importlib.import_module("brute_force").brute_force
    problems = importlib.import_module("problems")
    num_cases, ratios, num_chains = 0, [], 150
    for seed in range(num_chains):
        problem = problems.random_problem(seed, num_units=3 + seed % 3, num_options=1 + seed % 2)
        low = minimum_budget(problem, solvers=SOLVERS[:1])
        high = BASELINES[0].prepare(problem, time_limit_s=1).smallest_bytes
        assert high is not None
        for budget in problems.budgets_between(low, max(low, high)):
            found = checked(plan(problem, budget, solvers=SOLVERS[:1]))
            best = brute_force(problem, budget, persistent=False)
            assert best is not None
            assert best[0] <= found.predicted.seconds * (1 + 1e-12)
            num_cases += 1
            if best[0] < found.predicted.seconds * (1 - 1e-12):
                ratios.append(found.predicted.seconds / best[0])
    worst, typical = max(ratios, default=1.0), statistics.median(ratios) if ratios else 1.0
    return [
        "## Persistent against all schedules",
        "",
        f"{num_chains} random chains of 3 to 5 units, {num_cases} budgets, exhaustive search: the best"
        f" persistent schedule is not the best of all in {len(ratios)} cases ({len(ratios) / num_cases:.1%});"
        f" there it takes {typical:.3f} times as long in the median and {worst:.3f} times at most.",
    ]


SECTIONS: dict[str, Callable[[int], Lines]] = {
    "chain": section_chain,
    "frontier": section_frontier,
    "growth": section_growth,
    "baselines": section_baselines,
    "unrestricted": section_unrestricted,
}


def heading() -> Lines:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else math.nan
    return [
        "# Planning",
        "",
        f"{datetime.date.today().isoformat()}, {platform.machine()}, {os.cpu_count()} cores, load {load:.1f}"
        f" at the start, Python {platform.python_version()}, numpy {np.__version__}. Medians.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    lines = heading()
    for name in arguments.only:
        found = SECTIONS[name](arguments.repeats)
        print("\n".join([*found, ""]), flush=True)
        lines += [*found, ""]
    default = ROOT / "results" / f"planning_CPU_{datetime.date.today():%Y%m}.md"
    path = arguments.out or default
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    print(f"Written to {path}")


if __name__ == "__main__":
    main()
