"""Figures of ``select`` and ``spill``: seconds to plan, proven gaps, and the step beside other planners'.

    python benchmarks/planning_select.py --out benchmarks/results/planning_select_HARDWARE_YYYYMM.md
    python benchmarks/planning_select.py --only chain --out benchmarks/results/planning_select_chain_HARDWARE_YYYYMM.md

Every answer is simulated and checked (peak, gap) before anything is timed. Times are medians with the lowest
and highest; machines differ and others may use this one.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path

from recoup.planning import (
    Backward,
    Forward,
    Keep,
    Lifetime,
    Link,
    Option,
    Phase,
    Problem,
    Schedule,
    Unit,
    Use,
    simulate,
)
from recoup.planning.plan import Session
from recoup.planning.solvers.base import Solver
from recoup.planning.solvers.baselines import BASELINES
from recoup.planning.solvers.chain import ChainSolver
from recoup.planning.solvers.select import PreparedSelect, SelectSolver
from recoup.planning.solvers.select.levels import Levels
from recoup.planning.solvers.spill import PreparedSpill

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "planning"))
from selections import integer_program_s

MEBI = 2**20
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
TIME_LIMIT_S = 10.0
CHAIN_SHARES = (0.02, 0.1, 0.3, 0.6, 0.9)
CHAIN_NUM_UNITS = (12, 50, 100, 120, 140, 160, 200, 300)


def different_units(num_units: int, *, num_options: int, seed: int, links: tuple[Link, ...] = ()) -> Problem:
    """Units that differ in everything; a fifth of them read an earlier output by a skip."""
    rng = random.Random(seed)
    names = tuple(link.name for link in links)
    units = []
    for index in range(num_units):
        forward_s, full = rng.uniform(0.001, 0.011), rng.randint(100 * MEBI, 800 * MEBI)
        output = rng.randint(10 * MEBI, 60 * MEBI)
        shares = sorted([0.0, 1.0, *(rng.random() for _ in range(num_options - 2))], reverse=True)
        power = rng.uniform(0.5, 2)
        options = [
            Option(
                f"hold{k}",
                forward_s=forward_s,
                backward_s=2 * forward_s,
                extra_s=forward_s * (1 - share) ** power * rng.uniform(1, 1.1) if k else 0.0,
                held_bytes=int(share * full),
                forward_transient_bytes=output,
                replay_transient_bytes=int((1 - share) * full) + output,
                backward_transient_bytes=int((1 - share) * full) + 2 * output,
                held_links=names,
            )
            for k, share in enumerate(shares)
        ]
        skips = [rng.randrange(index - 1)] if index > 2 and rng.random() < 0.2 else []
        units.append(
            Unit(
                f"u{index}",
                options,
                output_bytes=output,
                parameter_gradient_bytes=rng.randint(0, 15 * MEBI),
                skips=skips,
            )
        )
    return Problem(units, resident_bytes=500 * MEBI, links=links)


def equal_blocks(num_units: int, *, num_options: int) -> Problem:
    block = different_units(1, num_options=num_options, seed=5).units[0]
    units = [
        Unit(f"b{i}", block.options, output_bytes=block.output_bytes, parameter_gradient_bytes=3 * MEBI)
        for i in range(num_units)
    ]
    return Problem(units, resident_bytes=500 * MEBI)


def as_measured(problem: Problem) -> Problem:
    """The same step as ``measure`` describes one: outputs, skips and gradients are values with lifetimes.

    A unit whose output is read by a later one than the next runs once, and a backward's scratch includes gradients.
    """
    readers = {index: [index + 1] for index in range(problem.num_units - 1)}
    for index, unit in enumerate(problem.units):
        for source in unit.skips:
            readers[source].append(index)
    values, passed = [], [0] * problem.num_units
    for index, reading in readers.items():
        unit = problem.units[index]
        read = [Use(phase, reader) for reader in reading for phase in (Phase.FORWARD, Phase.BACKWARD)]
        values.append(
            Lifetime(f"y{index}", unit.output_bytes, made=Use(Phase.FORWARD, index), read=tuple(read))
        )
        last, own = Use(Phase.BACKWARD, max(reading)), Use(Phase.BACKWARD, index)
        values.append(Lifetime(f"g{index}", unit.gradient_bytes, made=last, read=(own,), in_scratch=True))
        passed[index] += unit.gradient_bytes
        passed[max(reading)] += unit.gradient_bytes
    units = []
    for index, unit in enumerate(problem.units):
        options = [
            replace(option, scratch=option.scratch._replace(backward=option.scratch.backward + passed[index]))
            for option in unit.options
        ]
        runs_once = len(readers.get(index, [])) > 1
        units.append(
            replace(
                unit, options=tuple(options), output_bytes=0, gradient_bytes=0, skips=(), runs_once=runs_once
            )
        )
    return Problem(units, resident_bytes=problem.resident_bytes, values=values)


def budgets_of(prepared: PreparedSelect) -> list[int]:
    low, high = prepared.smallest_bytes, prepared.selector.fastest_bytes
    return [low + int(share * (high - low)) for share in SHARES]


def spread(times_s: list[float]) -> str:
    low, high = min(times_s), max(times_s)
    return f"{statistics.median(times_s):.3f} s ({low:.3f} to {high:.3f})"


def time_calls(calls: Sequence[Callable[[], object]], *, num_rounds: int) -> list[float]:
    """Seconds of every call, the calls interleaved."""
    times_s = []
    for _ in range(num_rounds):
        for call in calls:
            start_s = time.perf_counter()
            call()
            times_s.append(time.perf_counter() - start_s)
    return times_s


def solve(problem: Problem, budget_bytes: int) -> tuple[float, float]:
    """One whole solve, from the problem to a simulated schedule: seconds of the step, and the gap."""
    candidate = PreparedSelect(problem, time_limit_s=TIME_LIMIT_S).best(budget_bytes)
    assert candidate is not None
    assert candidate.bound is not None
    result = simulate(problem, candidate.schedule)
    assert result.peak_bytes <= budget_bytes
    return result.seconds, result.seconds / candidate.bound.seconds - 1


def frontier(problem: Problem) -> PreparedSelect:
    prepared = PreparedSelect(problem, time_limit_s=TIME_LIMIT_S)
    for budget_bytes in prepared.suggested_budgets():
        candidate = prepared.best(budget_bytes)
        assert candidate is not None
        assert simulate(problem, candidate.schedule).peak_bytes <= budget_bytes
    return prepared


def measure_solves(name: str, problem: Problem, *, num_rounds: int) -> tuple[list[str], float]:
    """A row for one problem, and the median of its solves."""
    budgets = budgets_of(PreparedSelect(problem, time_limit_s=TIME_LIMIT_S))
    gap = max(solve(problem, budget_bytes)[1] for budget_bytes in budgets)
    assert gap <= 1e-3, (name, gap)
    calls = [partial(solve, problem, budget_bytes) for budget_bytes in budgets]
    times_s = time_calls(calls, num_rounds=num_rounds)
    return [name, spread(times_s), f"{gap:.1e}"], statistics.median(times_s)


def select_tables(num_rounds: int) -> list[str]:
    lines = ["## select: one whole solve (problem to simulated schedule)", ""]
    lines += ["| problem | seconds over five budgets | largest proven gap |", "|---|---|---|"]
    ratios = []
    for seed in range(4):
        problem = different_units(200, num_options=6, seed=seed)
        row, median_s = measure_solves(
            f"200 different units x 6 options, skips, seed {seed}", problem, num_rounds=num_rounds
        )
        lines.append(f"| {' | '.join(row)} |")
        times_s = time_calls([partial(frontier, problem)], num_rounds=max(num_rounds // 2, 1))
        ratios.append((seed, spread(times_s), statistics.median(times_s) / median_s))
    for num_units in (4, 1000, 10_000):
        row, median_s = measure_solves(
            f"{num_units:,} equal blocks x 6 options",
            equal_blocks(num_units, num_options=6),
            num_rounds=max(num_rounds // 2, 1),
        )
        lines.append(f"| {' | '.join(row)} |")
    lines += ["", "## A frontier of 20 budgets", "", "| seed | seconds | in solves |", "|---|---|---|"]
    lines += [f"| {seed} | {text} | {ratio:.1f} |" for seed, text, ratio in ratios]
    return lines


def growth_table() -> list[str]:
    lines = ["", "## Growth (different units x 4 options, skips)", ""]
    lines += ["| units | seconds over five budgets | largest proven gap |", "|---|---|---|"]
    points = []
    for num_units in (100, 300, 1000, 3000, 10_000):
        problem = different_units(num_units, num_options=4, seed=num_units)
        row, median_s = measure_solves(f"{num_units:,}", problem, num_rounds=1)
        points.append((math.log(num_units), math.log(median_s)))
        lines.append(f"| {' | '.join(row)} |")
    mean_x, mean_y = (statistics.fmean(axis) for axis in zip(*points, strict=True))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return [*lines, "", f"Exponent: {slope:.2f}."]


def comparison_table() -> list[str]:
    """How much longer a step takes under simpler planners, and branch and bound, at equal budgets."""
    problem = different_units(60, num_options=4, seed=1)
    prepared = PreparedSelect(problem, time_limit_s=TIME_LIMIT_S)
    levels = Levels(problem)
    others = {solver.name: solver.prepare(problem, time_limit_s=TIME_LIMIT_S) for solver in BASELINES}
    lines = ["", "## Step at equal budget, beside select (60 different units x 4 options, skips)", ""]
    lines += [f"| budget | select | {' | '.join(others)} | integer program (seconds to solve) |"]
    lines.append("|---" * (len(others) + 3) + "|")
    for share, budget_bytes in zip(SHARES, budgets_of(prepared), strict=True):
        ours_s, _ = solve(problem, budget_bytes)
        cells = []
        for other in others.values():
            candidate = other.best(budget_bytes)
            if candidate is None:
                cells.append("does not fit")
                continue
            cells.append(f"{simulate(problem, candidate.schedule).seconds / ours_s - 1:+.2%}")
        start_s = time.perf_counter()
        exact_s = integer_program_s(levels, budget_bytes)
        spent_s = time.perf_counter() - start_s
        exact = f"{exact_s / ours_s - 1:+.4%} ({spent_s:.2f} s)"
        lines.append(f"| {share:.0%} | {ours_s:.4f} s | {' | '.join(cells)} | {exact} |")
    return lines


def spill_table() -> list[str]:
    lines = ["", "## spill: beside select without links (different units x 3 options, skips)", ""]
    lines += ["| units | link | budget | select's step | spill's step | stalls | proven gap | to plan |"]
    lines.append("|---" * 8 + "|")
    for num_units in (50, 200):
        for gigabytes in (5, 25, 100):
            link = Link("host", send_bytes_per_s=gigabytes * 1e9, fetch_bytes_per_s=gigabytes * 1e9)
            problem = different_units(num_units, num_options=3, seed=2, links=(link,))
            start_s = time.perf_counter()
            prepared = PreparedSpill(problem, time_limit_s=TIME_LIMIT_S)
            num_members = len(prepared.pool)
            spent_s = time.perf_counter() - start_s
            assert num_members > 0
            for share, budget_bytes in list(zip(SHARES, budgets_of(prepared.without), strict=True))[:4]:
                candidate, plain = prepared.best(budget_bytes), prepared.without.best(budget_bytes)
                assert candidate is not None
                assert candidate.bound is not None
                assert plain is not None
                result, without_s = (
                    simulate(problem, candidate.schedule),
                    simulate(problem, plain.schedule).seconds,
                )
                assert result.peak_bytes <= budget_bytes
                assert result.seconds <= without_s
                gap = result.seconds / candidate.bound.seconds - 1
                lines.append(
                    f"| {num_units} | {gigabytes} GB/s | {share:.0%} | {without_s:.4f} s |"
                    f" {result.seconds:.4f} s ({result.seconds / without_s - 1:+.1%}) |"
                    f" {result.wait_s / result.seconds:.1%} | {gap:.2%} | {spent_s:.1f} s |"
                )
    return lines


def timed_session(problem: Problem, solver: Solver) -> tuple[Session, float]:
    """A solver's session with its preparation done, and the seconds that took."""
    start_s = time.perf_counter()
    session = Session(problem, solvers=(solver,), time_limit_s=TIME_LIMIT_S)
    assert session.smallest_bytes > 0
    return session, time.perf_counter() - start_s


def chain_row(name: str, problem: Problem) -> str:
    """A row for one problem: by how much ``chain`` alone is slower than the faster of ``chain`` and ``select``."""
    (chain, chain_s), (select, select_s) = (
        timed_session(problem, solver) for solver in (ChainSolver(), SelectSolver())
    )
    held = [[option.held_bytes for option in unit.options] for unit in problem.units]
    high = simulate(problem, keep_schedule([sizes.index(max(sizes)) for sizes in held])).peak_bytes
    low = chain.smallest_bytes
    cells = []
    for share in CHAIN_SHARES:
        budget_bytes = low + int(share * (high - low))
        start_s = time.perf_counter()
        found = chain.plan(budget_bytes)
        chain_s += time.perf_counter() - start_s
        assert found.predicted.peak_bytes <= budget_bytes
        best_s = found.predicted.seconds
        if budget_bytes >= select.smallest_bytes:
            start_s = time.perf_counter()
            other = select.plan(budget_bytes)
            select_s += time.perf_counter() - start_s
            assert other.predicted.peak_bytes <= budget_bytes
            best_s = min(best_s, other.predicted.seconds)
        cells.append(f"{found.predicted.seconds / best_s - 1:.2%}")
    return f"| {problem.num_units} | {name} | {' | '.join(cells)} | {chain_s:.1f} s | {select_s:.1f} s |"


def keep_schedule(options: Sequence[int]) -> Schedule:
    """Every unit under one option, without segments."""
    kept = list(enumerate(options))
    return Schedule(
        [
            *(Forward(index, keep=Keep.OPTION, option=option) for index, option in kept),
            *(Backward(index, option=option) for index, option in reversed(kept)),
        ]
    )


def chain_table() -> list[str]:
    lines = ["", "## chain alone beside chain and select, problems as they are measured", ""]
    lines += [
        "By how much the predicted step takes longer if only `chain` plans it, at budgets from chain's smallest (0 %)"
    ]
    lines += [
        "to what keeping everything needs (100 %), and seconds to plan all five. Units have 3 options.",
        "",
    ]
    lines += [f"| units | kind | {' | '.join(f'{share:.0%}' for share in CHAIN_SHARES)} | chain | select |"]
    lines.append("|---" * (len(CHAIN_SHARES) + 4) + "|")
    for num_units in CHAIN_NUM_UNITS:
        plain = different_units(num_units, num_options=3, seed=num_units)
        without = replace(plain, units=tuple(replace(unit, skips=()) for unit in plain.units))
        lines.append(chain_row("equal blocks", as_measured(equal_blocks(num_units, num_options=3))))
        lines.append(chain_row("different", as_measured(without)))
        lines.append(chain_row("different, skips", as_measured(plain)))
    return lines


def header() -> list[str]:
    packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "scipy", "highspy"))
    return [
        f"# select and spill, {date.today():%Y-%m-%d}",
        "",
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores (shared with other work),"
        f" Python {platform.python_version()}, {packages}.",
        "A budget of 30 % lies 30 % of the way from the smallest feasible one to what the fastest selection"
        " needs, unless a table says otherwise.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="where to write the markdown; printed in any case")
    parser.add_argument("--rounds", type=int, default=5, help="how often each solve is timed")
    tables: dict[str, Callable[[], list[str]]] = {
        "select": lambda: select_tables(arguments.rounds),
        "comparison": comparison_table,
        "spill": spill_table,
        "growth": growth_table,
        "chain": chain_table,
    }
    parser.add_argument("--only", choices=tables, help="one of the tables; all unless given")
    arguments = parser.parse_args()
    lines = header()
    for name in [arguments.only] if arguments.only else tables:
        lines += tables[name]()
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
