"""The whole decoder compiled with torch's activation memory budget, in steps of 0.1.

Run it on a GPU with ``python benchmarks/compiled_whole.py``; it prints a table and writes it to
``benchmarks/results/compiled_whole_HARDWARE_YYYYMM.md``. It completes ``benchmarks/compiled.py``, whose contenders are
compiled one after another: eleven whole models would take ten minutes there. Here each has a process of its own, a few
of which compile at once; steps run in one process at a time. Blocks compiled with the budgets that were the fastest in
``compiled.py`` follow, in the same run.

``--small`` tries the script on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from compiled import Bench, Contender, budgeted, own_function
from models import LlamaBlock
from torch._functorch import config as functorch

ROOT = Path(__file__).resolve().parent
SHARES = [tenths / 10 for tenths in range(10, -1, -1)]
BLOCK_SHARES = (0.8, 0.5, 0.25, 0.15, 0.1)


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Other processes wait before they run steps."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def measure(bench: Bench, contender: Contender, lock: Path) -> Contender:
    """A contender that is built beside others, and timed alone."""
    contender.use()
    build_s = bench.time_s()
    with alone(lock):
        bench.step()
        peak = bench.activation_bytes()
        step_s = statistics.median(bench.time_s() for _ in range(5))
    return contender._replace(step_s=step_s, activation_bytes=peak, build_s=build_s)


def whole(share: float, lock: Path, small: bool) -> Contender:
    """The whole model compiled with one budget."""
    bench = Bench(small, LlamaBlock)
    compiled = partial(torch.compile(own_function(f"whole_{share}".replace(".", "_"))), bench.model)
    with budgeted(share):
        return measure(
            bench,
            Contender(f"whole model compiled, budget {share:g}", partial(bench.use, None, compiled)),
            lock,
        )


def blocks(lock: Path, small: bool) -> list[Contender]:
    """Blocks compiled with some budgets."""
    bench, found = Bench(small, LlamaBlock), []
    for share in BLOCK_SHARES:
        call = torch.compile(own_function(f"block_{share}".replace(".", "_")))
        contender = Contender(
            f"blocks compiled, budget {share:g}", partial(bench.use, [call] * len(bench.plain))
        )
        with functorch.patch(activation_memory_budget=share):
            found.append(measure(bench, contender, lock))
    return found


def row_of_process(share: float, lock: Path, small: bool) -> str:
    """The row that a process of its own prints for a budget."""
    command = [sys.executable, __file__, "--share", str(share), "--lock", str(lock)]
    done = subprocess.run(
        [*command, *(["--small"] if small else [])], capture_output=True, text=True, check=False
    )
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    row = rows[-1] if rows else f"| whole model compiled, budget {share:g} | fails | | |"
    if not rows:
        print(done.stderr[-1500:], file=sys.stderr)
    print(row, flush=True)
    return row


def main() -> None:
    """Measures and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--at-once", type=int, default=6, help="processes that compile at the same time")
    parser.add_argument("--share", type=float, help="one budget only: prints its row")
    parser.add_argument("--lock", type=Path)
    parser.add_argument("--output", type=Path, default=ROOT / "results")
    options = parser.parse_args()
    if options.share is not None:
        print(whole(options.share, options.lock, options.small).row())
        return
    name = platform.machine() if options.small else torch.cuda.get_device_name()
    today = datetime.date.today()
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder) / "lock"
        with ThreadPoolExecutor(options.at_once) as pool:
            rows = list(pool.map(lambda share: row_of_process(share, lock, options.small), SHARES))
        for contender in blocks(lock, options.small):
            rows.append(contender.row())
            print(rows[-1], flush=True)
    lines = [
        f"# The whole decoder compiled, on {name}",
        "",
        f"{today}, torch {torch.__version__}. Activations are the peak beyond parameters and gradients; medians of 5"
        f" steps, which no other process ran beside. {options.at_once} processes compiled at once, so that the seconds"
        " of builds are too many. `python benchmarks/compiled_whole.py`.",
        "",
        "| contender | ms | activations GiB | build s |",
        "|---|---|---|---|",
        *rows,
    ]
    hardware = name.lower().replace("nvidia ", "").replace(" ", "-")
    path = options.output / f"compiled_whole_{hardware}_{today:%Y%m}.md"
    path.write_text("\n".join(lines) + "\n")
    print(f"\nwritten to {path.name}")


if __name__ == "__main__":
    main()
