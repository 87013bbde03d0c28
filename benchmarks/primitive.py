"""The price of one checkpointed call: torch's two implementations, torch_remat and ours, interleaved.

Run: ``python benchmarks/primitive.py`` (CPU, and CUDA where there is one). It checks every contender's gradient
before it trusts a time, and writes ``benchmarks/results/primitive_HARDWARE_YYYYMM.md``.

The overhead of a contender is what its forward and backward cost above the plain function's, replay included,
in the same round; the table gives medians over rounds, and the quartiles of the ratio to torch's own. The share of
sampled comparison is what the default costs above ``check="metadata"`` in the same round, after its first calls.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_own

import recoup

RESULTS = Path(__file__).parent / "results"
Function = Callable[[Tensor], Tensor]
Call = Callable[[Function, Tensor], Tensor]


def one(x: Tensor) -> Tensor:
    return x.sin()


def twenty(x: Tensor) -> Tensor:
    for _ in range(20):
        x = x.sin()
    return x


# Every sine saves its input.
FUNCTIONS: dict[int, Function] = {1: one, 20: twenty}


def contenders() -> dict[str, Call]:
    found: dict[str, Call] = {
        "plain": lambda fn, x: fn(x),
        "torch, non-reentrant": lambda fn, x: torch_own(fn, x, use_reentrant=False),
        "torch, reentrant": lambda fn, x: torch_own(fn, x, use_reentrant=True),
        "recoup": recoup.checkpoint,
        "recoup, check='metadata'": recoup.Checkpoint(check="metadata"),
    }
    try:
        import torch_remat
    except ImportError:
        print("torch_remat is not installed (pip install 'recoup[bench]'): left out", file=sys.stderr)
        return found
    # It leaves the RNG alone, so it has less to do than the others.
    remat = torch_remat.checkpoint(determinism_check="default")
    found["torch_remat (no RNG)"] = lambda fn, x: remat(fn)(x)
    return found


def step(call: Call, fn: Function, leaf: Tensor) -> None:
    # Not a leaf: what a checkpointed block inside a model gets, and what really needs a replay.
    call(fn, leaf * 1).sum().backward()


def check(call: Call, fn: Function, leaf: Tensor) -> None:
    (expected,) = torch.autograd.grad(fn(leaf * 1).sum(), leaf)
    fresh = leaf.detach().requires_grad_()
    step(call, fn, fresh)
    if fresh.grad is None or not torch.equal(fresh.grad, expected):
        raise SystemExit("wrong gradient: no time is worth reporting")


def time_round(call: Call, fn: Function, leaf: Tensor, num_calls: int) -> float:
    """Microseconds per forward and backward."""
    step(call, fn, leaf)
    if leaf.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(num_calls):
        step(call, fn, leaf)
    if leaf.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / num_calls * 1e6


def measure(device: str, num_saved: int, num_rounds: int) -> list[str]:
    """Rows of the table for one device and one function."""
    fn, leaf, calls = FUNCTIONS[num_saved], torch.randn(8, device=device, requires_grad=True), contenders()
    for call in calls.values():
        check(call, fn, leaf)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(num_rounds):
        for name, call in calls.items():
            times[name].append(time_round(call, fn, leaf, num_calls=10))
    rows = []
    overhead = {
        name: [own - plain for own, plain in zip(times[name], times["plain"], strict=True)] for name in calls
    }
    for name in calls:
        row = f"| {device} | {num_saved} | {name} | {statistics.median(times[name]):.0f} |"
        if name == "plain":
            rows.append(row + " | | |")
            continue
        reference = overhead["torch, non-reentrant"]
        ratios = [own / torchs for own, torchs in zip(overhead[name], reference, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append(
            row + f" {statistics.median(overhead[name]):.0f} | {middle:.2f} | {low:.2f} to {high:.2f} |"
        )
    return rows


def sampling_share(fn: Function, leaf: Tensor, num_rounds: int) -> str:
    """What sampled comparison costs in steady state, as a share of the primitive's overhead."""
    ways: dict[str, Call] = {
        "plain": lambda fn, x: fn(x),
        "sampled": recoup.checkpoint,
        "metadata": recoup.Checkpoint(check="metadata"),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(4 * num_rounds):
        for name, call in ways.items():
            times[name].append(time_round(call, fn, leaf, num_calls=10))
    plain, sampled, metadata = (statistics.median(found) for found in times.values())
    share = (sampled - metadata) / (metadata - plain)
    return f"sampled comparison {sampled - metadata:.1f} µs of {metadata - plain:.1f} µs, {share:.1%}"


def hardware() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name().replace("NVIDIA ", "").replace(" ", "-").lower()
    return f"cpu-{platform.machine().lower()}"


def report(rows: list[str], num_rounds: int) -> str:
    today = datetime.date.today().isoformat()
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, recoup {recoup.__version__}"
    return "\n".join(
        [
            f"# The checkpoint primitive, {hardware()}, {today}",
            "",
            f"`python benchmarks/primitive.py --rounds {num_rounds}`, one CPU thread, contenders interleaved.",
            f"{versions}.",
            "",
            "| device | saved tensors | how | µs | µs above plain | of torch non-reentrant | quartiles |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=300, help="rounds of 10 calls for each contender")
    parser.add_argument("--write", action="store_true", help="keep the result under benchmarks/results")
    options: Any = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows: list[str] = []
    shares: list[str] = []
    for device in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
        for num_saved in FUNCTIONS:
            rows += measure(device, num_saved, options.rounds)
            leaf = torch.randn(8, device=device, requires_grad=True)
            shares.append(
                f"{device}, {num_saved} saved: {sampling_share(FUNCTIONS[num_saved], leaf, options.rounds)}"
            )
    text = report([*rows, "", *(f"- {share}" for share in shares)], options.rounds)
    print(text)
    if options.write:
        RESULTS.mkdir(exist_ok=True)
        month = datetime.date.today().strftime("%Y%m")
        path = RESULTS / f"primitive_{hardware()}_{month}.md"
        path.write_text(text)
        print(f"Written to {path}")


if __name__ == "__main__":
    main()
