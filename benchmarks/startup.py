"""What one waits for before the first step: imports, ``--help``, the demo, a large report, a plan without the hardware.

Run it with ``python benchmarks/startup.py``; it prints a report and writes it to
``benchmarks/results/startup_HARDWARE_YYYYMM.md``. Every figure is the median of fresh processes, whose results are
checked before their seconds count. ``--only imports help`` runs some sections.

This process imports neither torch nor recoup: a child's peak memory counts what its parent held when it started it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent
Lines = list[str]


# In a process of its own


def report_of_a_thousand_units() -> dict[str, float]:
    """Fits a chain of 1,000 different units and writes its report."""
    import torch
    from torch import nn

    import recoup

    torch.set_num_threads(1)
    torch.manual_seed(0)
    widths = [16 + 2 * (index * 7 % 13) for index in range(1001)]
    layers = [nn.Sequential(nn.Linear(widths[i], widths[i + 1]), nn.Tanh()) for i in range(1000)]
    model, sample = nn.Sequential(*layers), torch.randn(64, widths[0])
    loss: Callable[[torch.Tensor], torch.Tensor] = lambda output: output.square().mean()  # noqa: E731
    profile = recoup.measure(model, sample, loss=loss)
    budget = profile.plain_bytes - profile.activation_bytes // 2
    fitted = recoup.fit(model, sample, budget=budget, loss=loss)
    assert fitted.verification is not None
    assert fitted.verification.peak_bytes <= budget
    assert sum(unit.module is not None for unit in fitted.plan.profile.units) >= 1000
    start = time.perf_counter()
    path = fitted.to_html("report.html")
    return {"bytes": path.stat().st_size, "seconds": time.perf_counter() - start}


def plan_of_70_billion_parameters() -> dict[str, float]:
    """Measures a decoder on fake tensors, as one of 64 ranks of H200s, and plans it for three budgets."""
    import resource

    import torch
    from models import Llama

    import recoup

    start = time.perf_counter()
    with torch.device("meta"):
        model = Llama(8192, 80, 64, 8, 28672, 128256).to(torch.bfloat16)
        tokens = torch.empty(1, 8192, dtype=torch.long)
    assert 70e9 < sum(parameter.numel() for parameter in model.parameters()) < 71e9
    optimizer = torch.optim.AdamW(model.parameters())
    profile = recoup.measure(model, tokens, optimizer=optimizer, hardware="H200", ranks=64)
    for budget in ("18GiB", "40GiB", "80%"):
        plan = recoup.plan(profile, budget)
        assert plan.predicted_bytes <= plan.budget_bytes
    seconds = time.perf_counter() - start
    unit = 1 if sys.platform == "darwin" else 1024
    return {"seconds": seconds, "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


CHILDREN = {"report": report_of_a_thousand_units, "plan": plan_of_70_billion_parameters}


# In this one


def run(*command: str) -> tuple[float, str]:
    """Seconds and output of Python with a command, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, *command], cwd=folder, check=True, text=True, stdout=subprocess.PIPE
        )
        return time.perf_counter() - start, done.stdout


def run_child(name: str) -> dict[str, float]:
    """What one of the functions above found, in a fresh process."""
    found: dict[str, float] = json.loads(run(str(ROOT / "startup.py"), "--child", name)[1].splitlines()[-1])
    return found


def row(what: str, values: list[float], show: Callable[[float], str], most: float | None = None) -> str:
    """One line of the table."""
    median = statistics.median(values)
    target = "" if most is None else f"at most {show(most)}"
    met = "" if most is None else "yes" if median <= most else "no"
    shown = f"{show(min(values))} to {show(max(values))}"
    return f"| {what} | {show(median)} | {shown} | {len(values)} | {target} | {met} |"


def milliseconds(value: float) -> str:
    return f"{value * 1e3:.1f} ms"


def seconds(value: float) -> str:
    return f"{value:.2f} s"


def gibibytes(value: float) -> str:
    return f"{value / 2**30:.2f} GiB"


def megabytes(value: float) -> str:
    return f"{value / 1e6:.2f} MB"


def imports(num_runs: int) -> Lines:
    """Inside processes that have imported torch: it takes seconds, whose noise would hide the difference."""
    code = "import time, torch; s = time.perf_counter(); {}; print(time.perf_counter() - s)"
    statements = ("import recoup", "from recoup import fit")
    times: dict[str, list[float]] = {statement: [] for statement in statements}
    for statement in statements * (num_runs + 1):
        times[statement].append(float(run("-c", code.format(statement))[1]))
    bare, used = (times[statement][1:] for statement in statements)  # the first ones warmed the files up
    return [
        row("`import recoup`, torch imported before", bare, milliseconds, 0.06),
        row("`from recoup import fit`, the same", used, milliseconds),
    ]


def process_times(num_runs: int, expected: str, *arguments: str) -> list[float]:
    """Seconds of whole processes of the command line that print what is expected."""
    times = []
    for _ in range(num_runs):
        taken_s, text = run("-m", "recoup", *arguments)
        assert expected in text
        times.append(taken_s)
    return times


def command_help(num_runs: int) -> Lines:
    """The command line's help."""
    times = process_times(num_runs, "usage: recoup", "--help")
    return [row("`recoup --help`, whole process", times, seconds, 0.3)]


def demo(num_runs: int) -> Lines:
    """The demo."""
    return [row("`recoup demo`, whole process", process_times(num_runs, "bit for bit", "demo"), seconds, 60)]


def report(num_runs: int) -> Lines:
    """The report of a large model."""
    found = [run_child("report") for _ in range(num_runs)]
    return [
        row("HTML report of 1,000 different units", [each["bytes"] for each in found], megabytes, 2e6),
        row("the same, written in", [each["seconds"] for each in found], seconds),
    ]


def plan(num_runs: int) -> Lines:
    """A model that is never allocated."""
    found = [run_child("plan") for _ in range(num_runs)]
    return [
        row(
            "70 B decoder measured and planned for three budgets", [f["seconds"] for f in found], seconds, 60
        ),
        row("the same, the process's peak memory", [f["bytes"] for f in found], gibibytes, 4 * 2**30),
    ]


SECTIONS: dict[str, tuple[Callable[[int], Lines], int]] = {
    "imports": (imports, 15),
    "help": (command_help, 15),
    "demo": (demo, 3),
    "report": (report, 3),
    "plan": (plan, 3),
}


def main() -> None:
    """Runs the sections and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--output", type=Path, default=ROOT / "results")
    parser.add_argument("--child", choices=list(CHILDREN), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(CHILDREN[options.child]()))
        return
    today, hardware = datetime.date.today(), f"cpu-{platform.machine().lower()}"
    lines = [
        f"# Starting up on {hardware}",
        "",
        f"{today}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start, torch {version('torch')}, Python"
        f" {platform.python_version()}. Medians of fresh processes, files warm. `python benchmarks/startup.py`.",
        "",
        "| what | median | least to most | runs | target | met |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    for name in options.only:
        section, num_runs = SECTIONS[name]
        found = section(num_runs)
        print("\n".join(found), flush=True)
        lines += found
    path = options.output / f"startup_{hardware}_{today:%Y%m}.md"
    path.write_text("\n".join(lines) + "\n")
    print(f"\nwritten to {path.name}")


if __name__ == "__main__":
    main()
