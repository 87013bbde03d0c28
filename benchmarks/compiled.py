"""Captured and compiled units against torch's own memory budgets and against checkpoints, in the same memory.

Run it on a GPU with ``python benchmarks/compiled.py``; it prints a report and writes it to
``benchmarks/results/compiled_HARDWARE_YYYYMM.md``. The model is the Llama-style decoder of 1.1 B parameters of
``benchmarks/llama.py``, in bfloat16.

*Compiled*: at each budget for activations, `recoup` with ``engine="compiled"`` against the fastest that fits of: the
whole model compiled with torch's activation memory budget in steps of 0.1, its blocks compiled with that budget in
steps of 0.05, and compiled blocks of which the first k are checkpointed, for every k. Each contender has functions of
its own, so that all stay compiled and the two run interleaved, step by step.

*Captured*: the same decoder with its feed-forward written inline, ``engine="captured"`` against torch's checkpoint on
the first k blocks. Gradients have to be bit-equal to those of the plain model.

``--small`` tries the script on a CPU, ``--quick`` leaves out most of torch's budgets.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import torch
from models import Llama, LlamaBlock, plainly
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch._inductor import config as inductor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import recoup
from recoup.errors import BudgetError
from recoup.measuring import MemoryTracker
from recoup.plans.profile import Profile

ROOT = Path(__file__).resolve().parent
GIB = 2**30
COMPILED_GIB = (8.0, 7.0, 5.9, 4.75, 3.6, 2.4, 1.5, 0.9)
CAPTURED_GIB = (10.8, 7.3, 3.7)
WHOLE = partial(checkpoint, use_reentrant=False)
Call = Callable[..., Tensor]


class Inline(LlamaBlock):
    """A block that calls no module for its feed-forward."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention, then the feed-forward."""
        x = x + self.attention(self.norm1(x), cos, sin)
        y = self.norm2(x)
        mlp = self.mlp
        gate, up, down = mlp.gate.weight, mlp.up.weight, mlp.down.weight
        return x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)


class Contender(NamedTuple):
    """A way to run the model, with what it takes."""

    name: str
    use: Callable[[], Any]
    step_s: float = 0.0
    activation_bytes: int = 0
    build_s: float = 0.0

    def row(self) -> str:
        """A line of the table of contenders."""
        build = f"{self.build_s:.1f}" if self.build_s else ""
        return f"| {self.name} | {self.step_s * 1e3:.1f} | {self.activation_bytes / GIB:.3f} | {build} |"


def _template(module: nn.Module, *args: Tensor) -> Any:
    return module(*args)


def own_function(name: str) -> Call:
    """A function with code of its own: the compiler keeps what it compiled with the code."""
    code = _template.__code__.replace(co_name=name)
    return FunctionType(code, _template.__globals__, name)


class Bench:
    """A model with its sample, and ways to run it."""

    def __init__(self, small: bool, block: type[LlamaBlock]) -> None:
        torch.manual_seed(0)
        self.device = "cpu" if small else "cuda"
        self.model = Llama(64, 4, 4, 2, 172, 500) if small else Llama().to(torch.bfloat16)
        for one in self.model.blocks:
            one.__class__ = block
        self.model.to(self.device)
        self.tokens = torch.randint(500, (2, 64) if small else (4, 2048), device=self.device)
        self.plain = [plainly] * len(self.model.blocks)
        self.forward: Callable[[Tensor], Tensor] = self.model
        self.fixed_bytes = sum(2 * p.numel() * p.element_size() for p in self.model.parameters())

    def use(self, calls: list[Call] | None = None, forward: Call | None = None) -> None:
        """Sets the model up, without a plan."""
        recoup.remove(self.model)
        self.model.calls = calls or self.plain
        self.forward = forward or self.model

    def apply(self, plan: recoup.ModelPlan) -> None:
        """Sets the model up with a plan."""
        self.use()
        recoup.apply(self.model, plan)

    def step(self) -> Tensor:
        """One forward and backward; its loss."""
        loss = self.forward(self.tokens)
        loss.backward()
        self.model.zero_grad()
        return loss.detach()

    def time_s(self) -> float:
        """Seconds of one step."""
        self.synchronize()
        start = time.perf_counter()
        self.step()
        self.synchronize()
        return time.perf_counter() - start

    def turn_s(self) -> float:
        """Seconds of the fastest of a few steps, without the first: what the model ran before was another way."""
        self.step()
        gc.collect()
        return min(self.time_s() for _ in range(3))

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def activation_bytes(self) -> int:
        """Peak beyond parameters and gradients."""
        if self.device == "cpu":
            with MemoryTracker() as memory:
                self.step()
            return int(memory.peak_bytes - self.fixed_bytes // 2)
        torch.cuda.reset_peak_memory_stats()
        self.step()
        return int(torch.cuda.max_memory_allocated() - self.fixed_bytes)

    def gradients(self) -> list[Any]:
        """Of all parameters."""
        self.forward(self.tokens).backward()
        found = [p.grad for p in self.model.parameters()]
        self.model.zero_grad()
        return found

    def measured(self, contender: Contender, expected: Tensor | None = None) -> Contender:
        """The contender after its first steps."""
        contender.use()
        build_s = self.time_s()
        loss = self.step()
        if expected is not None:
            torch.testing.assert_close(loss, expected, rtol=0.01, atol=0.01)
        peak = self.activation_bytes()
        step_s = statistics.median(self.time_s() for _ in range(3))
        done = contender._replace(step_s=step_s, activation_bytes=peak, build_s=build_s)
        print(done.row(), flush=True)
        return done


@contextmanager
def budgeted(share: float) -> Iterator[None]:
    """Torch's own memory budget, without caches on disk: the build's seconds are those of a first run."""
    with functorch.patch(activation_memory_budget=share), inductor.patch(force_disable_caches=True):
        yield


def compiled_peers(bench: Bench, quick: bool, whole_step: int) -> list[Contender]:
    """Everything that torch offers for compiled code."""
    expected = bench.step()
    found = []
    num_blocks = len(bench.plain)
    blocks = (1.0, 0.75, 0.5, 0.25, 0.1, 0.0) if quick else [k / 20 for k in range(20, -1, -1)]
    wholes = (1.0,) if quick else [k / 10 for k in range(10, -1, -whole_step)]
    for share in blocks:
        call = torch.compile(own_function(f"block_{share}".replace(".", "_")))
        contender = Contender(f"blocks compiled, budget {share:g}", partial(bench.use, [call] * num_blocks))
        with budgeted(share):
            found.append(bench.measured(contender, expected))
        if share == 1.0:
            checkpointed: Call = lambda block, *args, call=call: WHOLE(call, block, *args)  # noqa: E731
            for k in range(1, num_blocks + 1, 4 if quick else 1):
                calls = [checkpointed] * k + [call] * (num_blocks - k)
                name = f"blocks compiled, checkpoint on {k} of {num_blocks}"
                found.append(bench.measured(Contender(name, partial(bench.use, calls)), expected))
    for share in wholes:
        whole = partial(torch.compile(own_function(f"whole_{share}".replace(".", "_"))), bench.model)
        contender = Contender(f"whole model compiled, budget {share:g}", partial(bench.use, None, whole))
        with budgeted(share):
            try:
                found.append(bench.measured(contender, expected))
            except Exception as error:  # the others are still worth their minutes
                print(f"| {contender.name} | fails: {type(error).__name__} |", flush=True)
    return found


def eager_peers(bench: Bench) -> list[Contender]:
    """Torch's checkpoint on the first k blocks."""
    num_blocks = len(bench.plain)
    return [
        bench.measured(
            Contender(
                f"checkpoint on {k} of {num_blocks}",
                partial(bench.use, [WHOLE] * k + [plainly] * (num_blocks - k)),
            )
        )
        for k in range(num_blocks + 1)
    ]


def compare(bench: Bench, profile: Profile, peers: list[Contender], budget: int, num_rounds: int) -> str:
    """One budget: a line on the fastest peer that fits against ours."""
    fitting = [peer for peer in peers if peer.activation_bytes <= budget]
    best = min(fitting, key=lambda peer: peer.step_s) if fitting else None
    gc.collect()
    try:
        plan = recoup.plan(profile, bench.fixed_bytes + budget)
    except BudgetError as error:
        return (
            f"| {budget / GIB:.2f} | {best.name if best else 'none fits'} | | does not fit: {error} | | | |"
        )
    bench.apply(plan)
    bench.step()
    peak = bench.activation_bytes()
    ours, theirs = [], []
    for _ in range(num_rounds):
        bench.apply(plan)
        ours.append(bench.turn_s())
        if best is not None:
            best.use()
            theirs.append(bench.turn_s())
    what = "; ".join(f"{names}: {label}" for names, label in plan.describe_units() if label != "keep")
    our_ms, over = statistics.median(ours) * 1e3, " **over**" if peak > budget else ""
    mine = f"{our_ms:.1f} ({peak / GIB:.2f}{over})"
    their_ms = statistics.median(theirs) * 1e3 if theirs else float("nan")
    there = f"{best.name} | {their_ms:.1f} ({best.activation_bytes / GIB:.2f})" if best else "none fits |"
    predicted = f"{plan.predicted_s * 1e3:.1f}"
    return f"| {budget / GIB:.2f} | {there} | {mine} | {our_ms / their_ms:.3f} | {predicted} | {what} |"


def bit_equal(bench: Bench, budget: int) -> str:
    """Compares a captured plan's gradients with the plain model's; of attentions, only torch's own is deterministic."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with sdpa_kernel(SDPBackend.MATH):
        bench.use()
        expected = bench.gradients()
        agrees = all(map(torch.equal, bench.gradients(), expected))
        # Measured anew: a graph has the attention that it was captured with.
        profile = recoup.measure(bench.model, bench.tokens, engine="captured")
        bench.apply(recoup.plan(profile, (bench.fixed_bytes + budget + profile.plain_bytes) // 2))
        same = all(map(torch.equal, bench.gradients(), expected))
    torch.use_deterministic_algorithms(False)
    verdict = "bit-equal" if same else "**not** bit-equal"
    others = "agree" if agrees else "do not agree either"
    return f" Gradients are {verdict} to the plain model's; two plain steps {others}."


def section(
    title: str, bench: Bench, engine: str, peers: list[Contender], budgets: list[int], num_rounds: int
) -> list[str]:
    """A table of peers, and a table of budgets."""
    bench.use()
    start = time.perf_counter()
    profile = recoup.measure(bench.model, bench.tokens, engine=engine)
    build_s = time.perf_counter() - start
    print(f"{engine}: measured in {build_s:.1f} s", flush=True)
    fit_s = []
    if engine == "captured":
        for budget in budgets:
            bench.use()
            start = time.perf_counter()
            recoup.fit(
                bench.model,
                bench.tokens,
                budget=bench.fixed_bytes + budget,
                engine=engine,
                verify=False,
                race=False,
            )
            fit_s.append(time.perf_counter() - start)
            recoup.remove(bench.model)
        print(
            f"{engine}: fits without real steps in {', '.join(f'{one:.1f}' for one in fit_s)} s", flush=True
        )
    equal = bit_equal(bench, min(budgets)) if engine == "captured" else ""
    fits = f" Fits without real steps: {', '.join(f'{one:.1f}' for one in fit_s)} s." if fit_s else ""
    lines = [
        "",
        f"## {title}",
        "",
        f"Measured, every option built, in {build_s:.1f} s.{fits}{equal}",
        "",
        "| budget GiB | best that fits | ms (GiB) | recoup ms (GiB) | ratio | predicted ms | plan |",
        "|---|---|---|---|---|---|---|",
    ]
    for budget in budgets:
        lines.append(compare(bench, profile, peers, budget, num_rounds))
        print(lines[-1], flush=True)
    bench.use()
    table = ["", "| contender | ms | activations GiB | build s |", "|---|---|---|---|"]
    return [*lines, *table, *(peer.row() for peer in peers)]


def main() -> None:
    """Compares and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--whole-step", type=int, default=1, help="tenths between budgets of the whole model")
    parser.add_argument("--only", choices=("compiled", "captured"))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--output", type=Path, default=ROOT / "results")
    options = parser.parse_args()
    name = platform.machine() if options.small else torch.cuda.get_device_name()
    today = datetime.date.today()
    lines = [
        f"# Captured and compiled units on {name}",
        "",
        f"{today}, torch {torch.__version__}. Activations are the peak beyond parameters and gradients. Medians of"
        f" {options.rounds} rounds, of the fastest of three steps in turn; of 3 steps in the tables of contenders."
        " `python benchmarks/compiled.py`"
        f"{' --quick' if options.quick else ''}.",
    ]
    path = (
        options.output / f"compiled_{name.lower().replace('nvidia ', '').replace(' ', '-')}_{today:%Y%m}.md"
    )
    peers: list[Contender] = []
    scale = GIB if not options.small else GIB / 4000
    if options.only != "compiled":
        bench = Bench(options.small, Inline)
        budgets = [int(gib * scale) for gib in CAPTURED_GIB]
        peers = eager_peers(bench)
        lines += section("Captured, inline feed-forward", bench, "captured", peers, budgets, options.rounds)
        path.write_text("\n".join(lines) + "\n")
    if options.only != "captured":
        peers.clear()  # they hold the other model
        bench = Bench(options.small, LlamaBlock)
        budgets = [int(gib * scale) for gib in COMPILED_GIB]
        peers = compiled_peers(bench, options.quick, options.whole_step)
        lines += section("Compiled", bench, "compiled", peers, budgets, options.rounds)
        path.write_text("\n".join(lines) + "\n")
    print(f"\nwritten to {path.name}")


if __name__ == "__main__":
    main()
