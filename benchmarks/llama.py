"""A Llama-style decoder of 1.1 B parameters at ten budgets: `recoup.fit` against hand-made recipes and `torch.compile`.

Run it on a GPU with ``python benchmarks/llama.py``; it prints a report and writes it to
``benchmarks/results/llama_HARDWARE_YYYYMM.md``. The recipes are torch's checkpoint on the first k blocks for every k,
torch's selective checkpoint (matrix products and attention kept) on every block, and ``save_on_cpu``. At each budget
the fastest recipe that fits runs interleaved with ours, step by step. Then the same model is compiled, block by block
and whole, with and without an activation memory budget: after everything eager, so that the compiler cannot disturb it.
One eager row is measured again at the end. ``--small`` tries the script on a CPU, ``--no-compile`` leaves the compiler
out.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import platform
import statistics
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from models import Llama, plainly
from torch import Tensor
from torch._functorch import config as functorch
from torch._inductor import config as inductor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import recoup
from recoup.errors import BudgetError
from recoup.measuring import MemoryTracker

ROOT = Path(__file__).resolve().parent
GIB = 2**30
aten = torch.ops.aten
KEPT = [
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
]


class Recipe(NamedTuple):
    """A way to run the model, with what it takes; 0 where that was not measured."""

    name: str
    calls: list[Callable[..., Tensor]]
    offloads: bool
    step_s: float = 0.0
    activation_bytes: int = 0
    build_s: float = 0.0

    def row(self) -> str:
        """A line of the table of all contenders."""
        gib = f"{self.activation_bytes / GIB:.3f}" if self.activation_bytes else ""
        build = f"{self.build_s:.1f}" if self.build_s else ""
        return f"| {self.name} | {self.step_s * 1e3:.1f} | {gib} | {build} |"


class Variant(NamedTuple):
    """A way to compile the model."""

    whole: bool
    budget: float | None = None
    call: Callable[..., Tensor] = plainly

    @property
    def name(self) -> str:
        """As the table shows it."""
        share = "" if self.budget is None else f", activation memory budget {self.budget:g}"
        checkpointed = "" if self.call is plainly else ", checkpoint on every block"
        return f"compiled {'whole' if self.whole else 'block by block'}{checkpointed}{share}"


WHOLE = partial(checkpoint, use_reentrant=False)
VARIANTS = [
    *(Variant(False, budget) for budget in (None, 0.75, 0.5, 0.25, 0.1, 0.0)),
    *(Variant(True, budget) for budget in (None, 0.5, 0.2, 0.0)),
    Variant(True, call=WHOLE),
]


def keep_products(context: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Keeps matrix products and attention, recomputes the rest."""
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def recipes(num_blocks: int) -> list[Recipe]:
    """Everything that people write by hand."""
    selective = partial(WHOLE, context_fn=partial(create_selective_checkpoint_contexts, keep_products))
    found = [
        Recipe(f"checkpoint on {k} of {num_blocks} blocks", [WHOLE] * k + [plainly] * (num_blocks - k), False)
        for k in range(num_blocks + 1)
    ]
    found.append(Recipe("selective checkpoint", [selective] * num_blocks, False))
    found.append(Recipe("save_on_cpu", [plainly] * num_blocks, True))
    return found


class Bench:
    """A model with its sample, and ways to run it."""

    def __init__(self, small: bool) -> None:
        torch.manual_seed(0)
        self.device = "cpu" if small else "cuda"
        if small:
            self.model, shape = Llama(64, 4, 4, 2, 172, 500), (2, 64)
        else:
            self.model, shape = Llama().to(torch.bfloat16), (4, 2048)
        self.model.to(self.device)
        self.tokens = torch.randint(500, shape, device=self.device)
        self.forward: Callable[[Tensor], Tensor] = self.model
        self.num_parameters: int = sum(p.numel() for p in self.model.parameters())
        self.fixed_bytes: int = sum(2 * p.numel() * p.element_size() for p in self.model.parameters())

    def step(self, offloads: bool = False) -> Tensor:
        """One forward and backward; its loss."""
        if offloads:
            with save_on_cpu(pin_memory=self.device == "cuda"):
                loss = self.forward(self.tokens)
        else:
            loss = self.forward(self.tokens)
        loss.backward()
        self.model.zero_grad()
        return loss.detach()

    def use(self, recipe: Recipe | None) -> None:
        """Sets the model up for a recipe; ``None`` leaves its blocks to recoup."""
        plain: list[Callable[..., Tensor]] = [plainly] * len(self.model.blocks)
        self.model.calls = plain if recipe is None else recipe.calls

    def time_s(self, offloads: bool = False) -> float:
        """Seconds of one step."""
        self.synchronize()
        start = time.perf_counter()
        self.step(offloads)
        self.synchronize()
        return time.perf_counter() - start

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def activation_bytes(self, offloads: bool = False) -> int:
        """Peak beyond parameters and gradients."""
        if self.device == "cpu":
            with MemoryTracker() as memory:
                self.step(offloads)
            return int(memory.peak_bytes - self.fixed_bytes // 2)
        torch.cuda.reset_peak_memory_stats()
        self.step(offloads)
        return int(torch.cuda.max_memory_allocated() - self.fixed_bytes)

    def survey(self) -> list[Recipe]:
        """All recipes with their peaks and seconds."""
        found = []
        for recipe in recipes(len(self.model.blocks)):
            self.use(recipe)
            self.step(recipe.offloads)
            peak = self.activation_bytes(recipe.offloads)
            times = [self.time_s(recipe.offloads) for _ in range(3)]
            found.append(recipe._replace(step_s=statistics.median(times), activation_bytes=peak))
            print(f"{recipe.name}: {found[-1].step_s * 1e3:.1f} ms, {peak / GIB:.3f} GiB", flush=True)
        self.use(None)
        return found

    def compile(self, variant: Variant, num_rounds: int) -> Recipe:
        """The model compiled, measured, and as before again.

        What is compiled are wrappers: the model itself stays as it is. Nothing is read from caches on disk, so that
        the build's seconds are those of a first run.
        """
        torch.compiler.reset()
        gc.collect()
        expected = self.model(self.tokens).detach()
        share = 1.0 if variant.budget is None else variant.budget
        try:
            with functorch.patch(activation_memory_budget=share), inductor.patch(force_disable_caches=True):
                if variant.whole:
                    self.model.calls = [variant.call] * len(self.model.blocks)
                    self.forward = torch.compile(self.model)
                else:
                    self.model.calls = [instead(torch.compile(block)) for block in self.model.blocks]
                build_s = self.time_s()
                torch.testing.assert_close(self.step(), expected, rtol=0.01, atol=0.01)
                # Counting on a CPU would make compiled code run eagerly.
                peak = self.activation_bytes() if self.device == "cuda" else 0
                step_s = statistics.median(self.time_s() for _ in range(num_rounds))
        finally:
            self.forward = self.model
            self.use(None)
            torch.compiler.reset()
        return Recipe(variant.name, [], False, step_s, peak, build_s)


def instead(compiled: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Calls a block's compiled form in place of the block."""

    def call(block: object, *args: Tensor) -> Tensor:
        return compiled(*args)

    return call


def compare(bench: Bench, found: list[Recipe], budget: int, num_rounds: int) -> tuple[str, Recipe | None]:
    """One budget: a line on the fastest recipe that fits against ours, and ours."""
    fitting = [recipe for recipe in found if recipe.activation_bytes <= budget]
    gc.collect()
    start = time.perf_counter()
    resident = bench.fixed_bytes
    try:
        fitted = recoup.fit(bench.model, bench.tokens, budget=resident + budget)
    except BudgetError as error:
        best = min(fitting, key=lambda recipe: recipe.step_s).name if fitting else "none"
        return f"| {budget / GIB:.2f} | {best} | | does not fit: {error} | | | |", None
    fit_s = time.perf_counter() - start
    assert fitted.verification is not None
    assert fitted.verification.peak_bytes <= resident + budget
    peak = bench.activation_bytes()
    ours, theirs = [], []
    best_recipe = min(fitting, key=lambda recipe: recipe.step_s) if fitting else None
    for _ in range(num_rounds):
        ours.append(bench.time_s())
        if best_recipe is not None:
            recoup.remove(bench.model)
            bench.use(best_recipe)
            theirs.append(bench.time_s(best_recipe.offloads))
            bench.use(None)
            recoup.apply(bench.model, fitted.plan)
    recoup.remove(bench.model)
    our_ms = statistics.median(ours) * 1e3
    seen = fitted.plan.predicted_s * 1e3
    what = "; ".join(f"{names}: {label}" for names, label in fitted.plan.describe_units() if label != "keep")
    mine = Recipe(f"recoup.fit at {budget / GIB:.2f} GiB", [], False, our_ms / 1e3, peak, fit_s)
    if best_recipe is None:
        ours_shown = f"{our_ms:.1f} ({peak / GIB:.2f})"
        return (
            f"| {budget / GIB:.2f} | none fits | | {ours_shown} | | {seen:.1f} | {fit_s:.1f} | {what} |",
            mine,
        )
    their_ms = statistics.median(theirs) * 1e3
    return (
        f"| {budget / GIB:.2f} | {best_recipe.name} | {their_ms:.1f} ({best_recipe.activation_bytes / GIB:.2f}) |"
        f" {our_ms:.1f} ({peak / GIB:.2f}) | {our_ms / their_ms:.3f} | {seen:.1f} | {fit_s:.1f} | {what} |"
    ), mine


def compiled(bench: Bench, eager: list[Recipe], num_rounds: int) -> list[str]:
    """A table of everything: eager recipes and ours, as measured before, then the compiled variants."""
    rows = [recipe._replace(name=f"eager, {recipe.name}") for recipe in eager]
    lines = [
        "",
        "| contender | ms | activations GiB | build s |",
        "|---|---|---|---|",
        *(r.row() for r in rows),
    ]
    for variant in VARIANTS:
        try:
            lines.append(bench.compile(variant, num_rounds).row())
        except Exception as error:  # the others are still worth their minutes
            lines.append(f"| {variant.name} | fails: {type(error).__name__} | | |")
            traceback.print_exc()
        print(lines[-1], flush=True)
    bench.step()
    again_s = statistics.median(bench.time_s() for _ in range(num_rounds))
    return [*lines, rows[0]._replace(name=f"{rows[0].name}, again at the end", step_s=again_s).row()]


def main() -> None:
    """Compares at ten budgets and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--output", type=Path, default=ROOT / "results")
    options = parser.parse_args()
    bench = Bench(options.small)
    found = bench.survey()
    plain, least = found[0].activation_bytes, found[-3].activation_bytes
    budgets = [int(least * 1.03 + (plain * 1.005 - least * 1.03) * k / 9) for k in range(10)]
    name = platform.machine() if options.small else torch.cuda.get_device_name()
    dtype = str(next(bench.model.parameters()).dtype).removeprefix("torch.")
    today = datetime.date.today()
    lines = [
        f"# Llama-style decoder, {bench.num_parameters / 1e9:.2f} B parameters, on {name}",
        "",
        f"{today}, torch {torch.__version__}, {dtype}, {tuple(bench.tokens.shape)} tokens. Activations are the peak"
        f" beyond parameters and gradients. Medians of {options.rounds} steps, interleaved where two run at a budget;"
        " of 3 in the first table. A build is `fit`, or the first compiled step without any cache."
        " `python benchmarks/llama.py`.",
        "",
        "| recipe | ms | activations GiB |",
        "|---|---|---|",
        *(f"| {r.name} | {r.step_s * 1e3:.1f} | {r.activation_bytes / GIB:.3f} |" for r in found),
        "",
        "| budget GiB | best recipe that fits | ms (GiB) | recoup ms (GiB) | ratio | predicted ms | fit s | plan |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ours = []
    for budget in budgets:
        line, mine = compare(bench, found, budget, options.rounds)
        lines.append(line)
        ours += [mine] if mine is not None else []
        print(line, flush=True)
    hardware = name.lower().replace("nvidia ", "").replace(" ", "-")
    path = options.output / f"llama_{hardware}_{today:%Y%m}.md"
    # Before the compiler runs: should that fail, the eager results are there.
    path.write_text("\n".join(lines) + "\n")
    if not options.no_compile:
        lines += compiled(bench, [found[0], *found[-3:], *ours], options.rounds)
        path.write_text("\n".join(lines) + "\n")
    print(f"\nwritten to {path.name}")


if __name__ == "__main__":
    main()
