"""Six models of transformers at real size: `recoup.fit` against what its users do by hand.

Run it on a GPU with ``python benchmarks/transformers_models.py``; it prints a report and writes it to
``benchmarks/results/transformers_models_HARDWARE_YYYYMM.md``. Models have random weights, in bfloat16; their key-value
caches are off. Three comparisons, each in the same memory, with the two contenders interleaved, step by step:

1. ``gradient_checkpointing_enable()`` against a plan for its own peak;
2. half-way to the plain peak, the fastest "checkpoint every n-th layer" that fits against a plan for that budget;
3. compiled: ``gradient_checkpointing_enable()`` with every layer compiled, against ``engine="compiled"`` at its peak.

``--small`` tries the script on a CPU, ``--only GPT-2 T5`` runs some models, ``--parts eager`` leaves the third out.
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
from typing import Any, NamedTuple

import torch
import transformers
from library import switch_checkpointing
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

import recoup
from recoup.measuring import MemoryTracker

ROOT = Path(__file__).resolve().parent
GIB = 2**30
NUM_FIRST = 16
"""Steps before steps are timed."""
hf: Any = transformers  # its classes have no types of their own


class Case(NamedTuple):
    """A model and a batch."""

    model: Any
    batch: dict[str, Tensor]


def text(words: int, batch: int, length: int, *, labels: bool = True) -> dict[str, Tensor]:
    """Random tokens."""
    tokens = torch.randint(words, (batch, length))
    return {"input_ids": tokens, "labels": tokens.clone()} if labels else {"input_ids": tokens}


def gpt2(small: bool) -> Case:
    """GPT-2 medium."""
    width, layers, heads, batch, length = (64, 4, 4, 2, 64) if small else (1024, 24, 16, 8, 1024)
    config = hf.GPT2Config(n_embd=width, n_layer=layers, n_head=heads)
    return Case(hf.GPT2LMHeadModel(config), text(500, batch, length))


def llama(small: bool) -> Case:
    """A Llama of 1.2 B parameters."""
    sizes: dict[str, int] = (
        {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
        if small
        else {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
        }
    )
    config = hf.LlamaConfig(num_key_value_heads=4 if small else 8, vocab_size=32000, **sizes)
    return Case(hf.LlamaForCausalLM(config), text(500, 2 if small else 4, 64 if small else 2048))


def mixtral(small: bool) -> Case:
    """A mixture of eight experts."""
    sizes: dict[str, int] = (
        {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
        if small
        else {
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
        }
    )
    config = hf.MixtralConfig(
        num_key_value_heads=4, num_local_experts=4 if small else 8, vocab_size=32000, **sizes
    )
    return Case(hf.MixtralForCausalLM(config), text(500, 2 if small else 4, 32 if small else 1024))


def vit(small: bool) -> Case:
    """ViT-L/16."""
    width, layers, heads, batch, size = (64, 4, 4, 4, 32) if small else (1024, 24, 16, 64, 224)
    config = hf.ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        image_size=size,
    )
    batch_of = {
        "pixel_values": torch.randn(batch, 3, size, size),
        "labels": torch.zeros(batch, dtype=torch.long),
    }
    return Case(hf.ViTForImageClassification(config), batch_of)


def whisper(small: bool) -> Case:
    """Whisper medium."""
    width, layers, heads, batch, frames, words = (
        (64, 2, 4, 2, 100, 20) if small else (1024, 24, 16, 8, 3000, 448)
    )
    config = hf.WhisperConfig(
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        max_source_positions=frames // 2,
    )
    features = torch.randn(batch, 80, frames)
    labels = torch.randint(500, (batch, words))
    return Case(hf.WhisperForConditionalGeneration(config), {"input_features": features, "labels": labels})


def t5(small: bool) -> Case:
    """T5 large."""
    width, layers, heads, batch, length = (64, 2, 4, 2, 32) if small else (1024, 24, 16, 8, 512)
    config = hf.T5Config(
        d_model=width,
        num_layers=layers,
        num_heads=heads,
        d_ff=4 * width,
        d_kv=width // heads,
        decoder_start_token_id=0,
    )
    return Case(hf.T5ForConditionalGeneration(config), text(500, batch, length))


CASES: dict[str, Callable[[bool], Case]] = {
    "GPT-2": gpt2,
    "ViT": vit,
    "Whisper": whisper,
    "Llama": llama,
    "T5": t5,
    "Mixtral": mixtral,
}


class Turns(NamedTuple):
    """Seconds of two ways and of the plain step, and the ratio of the first two.

    A turn is the fastest of three steps, so that neither a busy moment nor a compared replay (the 1st, 2nd, 4th, 8th, …
    of a module) counts. Seconds are medians over rounds; the ratio is the median of the rounds' ratios, since the pace
    of the host changes from minute to minute.
    """

    their_s: float
    our_s: float
    plain_s: float
    ratio: float


class Bench:
    """A model, and ways to run it."""

    def __init__(self, name: str, *, small: bool) -> None:
        device = "cpu" if small else "cuda"
        with torch.device(device):
            case = CASES[name](small)
        self.model: Any = case.model.train()
        if device == "cuda":
            self.model.to(torch.bfloat16)
        self.model.config.use_cache = False
        dtype = next(self.model.parameters()).dtype
        self.batch = {
            name: tensor.to(dtype if tensor.is_floating_point() else None)
            for name, tensor in case.batch.items()
        }
        self.device, self.plain_s = device, 0.0
        self.layers = [one for one in self.model.modules() if isinstance(one, GradientCheckpointingLayer)]

    def checkpoint(self, every: int | None) -> None:
        """Checkpoints every n-th layer by the model's own means; ``None``: no layer."""
        recoup.remove(self.model)
        switch_checkpointing(self.model, every is not None)
        if every is not None:
            for index, layer in enumerate(self.layers):
                layer.gradient_checkpointing = index % every == 0

    def compile_layers(self, is_on: bool) -> None:
        """Compiles every layer, or takes that back."""
        for layer in self.layers:
            layer.compile() if is_on else layer.__dict__.update(_compiled_call_impl=None)

    def step(self) -> None:
        """Forward and backward."""
        self.model(**self.batch).loss.backward()
        self.model.zero_grad()

    def time_s(self) -> float:
        """Seconds of one step."""
        self.synchronize()
        start = time.perf_counter()
        self.step()
        self.synchronize()
        return time.perf_counter() - start

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def peak_bytes(self) -> int:
        """Peak of a step, parameters and batch included."""
        self.step()
        gc.collect()
        if self.device == "cpu":
            with MemoryTracker() as memory:
                self.step()
            beside = (*self.model.parameters(), *self.batch.values())
            return int(memory.peak_bytes + sum(tensor.nbytes for tensor in beside))
        torch.cuda.reset_peak_memory_stats()
        self.step()
        return int(torch.cuda.max_memory_allocated())

    def fit(self, budget: int, engine: str) -> tuple[Any, float]:
        """A plan, and the seconds it took to make."""
        self.checkpoint(None)
        start = time.perf_counter()
        fitted = recoup.fit(self.model, self.batch, budget=budget, holds_output=False, engine=engine)
        return fitted, time.perf_counter() - start


def interleaved(
    bench: Bench,
    use: Callable[[], Any],
    ours: Callable[[], Any],
    plain: Callable[[], Any],
    num_rounds: int,
) -> Turns:
    """Two ways to run the step, and the plain step, in turn.

    Each has taken some steps before: the first replays of a plan are watched and compared, and later ones hardly ever.
    """
    ways = (use, ours, plain)
    for way in ways:
        way()
        for _ in range(NUM_FIRST):
            bench.step()
    rounds = []
    for _ in range(num_rounds):
        seconds = []
        for way in ways:
            way()
            gc.collect()
            bench.time_s()  # after a change the first step may differ
            seconds.append(min(bench.time_s() for _ in range(3)))
        rounds.append(seconds)
    their_s, our_s, plain_s = map(statistics.median, zip(*rounds, strict=True))
    return Turns(their_s, our_s, plain_s, statistics.median(our_s / their_s for their_s, our_s, _ in rounds))


def row(
    name: str, what: str, bench: Bench, budget: int, use: Callable[[], Any], engine: str, num_rounds: int
) -> str:
    """One comparison; layers are compiled while ``use`` is in force only.

    Where no plan fits the budget, the smallest one that some plan fits is used, and the row says so.
    """
    try:
        fitted, fit_s = bench.fit(budget, engine)
    except recoup.errors.BudgetError as error:
        what += f"; **no plan fits {budget / GIB:.2f}**"
        budget = error.smallest_bytes
        fitted, fit_s = bench.fit(budget, engine)
    peak = bench.peak_bytes()

    def planned(plan: recoup.ModelPlan) -> None:
        bench.checkpoint(None)
        bench.compile_layers(False)
        recoup.apply(bench.model, plan)

    seen, everything = fitted.verification, recoup.plan(fitted.profile, "1TiB")
    assert seen is not None
    ways = partial(planned, fitted.plan), partial(planned, everything)
    turns = interleaved(bench, use, *ways, num_rounds)
    # Of the host: between the fit and these rounds it may change.
    pace = turns.plain_s / seen.plain_seconds if seen.plain_seconds else 1.0
    predicted_s = fitted.plan.predicted_s
    over = " **over**" if peak > budget else ""
    won = next((one.name for one in seen.race if one.is_kept), "only candidate")
    line = (
        f"| {name} | {what} | {budget / GIB:.2f} | {turns.their_s * 1e3:.1f} | {turns.our_s * 1e3:.1f}"
        f" ({peak / GIB:.2f}{over}) | {turns.ratio:.3f} | {predicted_s * 1e3:.1f} | {predicted_s * pace * 1e3:.1f} |"
        f" {fit_s:.1f} ({25 * bench.plain_s + 3:.1f}) | {won} |"
    )
    print(line, flush=True)
    print("   ", fitted.plan.describe_units(), seen.race, flush=True)
    return line


def compare(name: str, bench: Bench, num_rounds: int, parts: str) -> list[str]:
    """All comparisons of one model."""
    bench.checkpoint(None)
    plain = bench.peak_bytes()
    bench.plain_s = statistics.median(bench.time_s() for _ in range(3))
    if parts == "compiled":
        print(f"{name}: plain {plain / GIB:.2f} GiB, {bench.plain_s * 1e3:.1f} ms", flush=True)
        return [compiled(name, bench, num_rounds)]
    found: dict[int, tuple[int, float]] = {}
    for every in (1, 2, 3, 4, 6):
        bench.checkpoint(every)
        found[every] = (bench.peak_bytes(), statistics.median(bench.time_s() for _ in range(3)))
    least = found[1][0]
    half = (least + plain) // 2
    print(
        f"{name}: plain {plain / GIB:.2f} GiB, {bench.plain_s * 1e3:.1f} ms; every layer {least / GIB:.2f} GiB",
        flush=True,
    )
    lines = [row(name, "every layer", bench, least, lambda: bench.checkpoint(1), "auto", num_rounds)]
    fitting = {every: seconds for every, (peak, seconds) in found.items() if peak <= half}
    best = min(fitting, key=lambda every: fitting[every])
    what = f"every {best}." if best > 1 else "every layer"
    lines.append(row(name, what, bench, half, lambda: bench.checkpoint(best), "auto", num_rounds))
    if parts == "all":
        lines.append(compiled(name, bench, num_rounds))
    return lines


def compiled(name: str, bench: Bench, num_rounds: int) -> str:
    """Compiled layers under checkpoints, against compiled units under a plan."""

    def theirs() -> None:
        bench.checkpoint(1)
        bench.compile_layers(True)

    torch.compiler.reset()
    theirs()
    start = time.perf_counter()
    bench.step()
    build_s = time.perf_counter() - start
    peak = bench.peak_bytes()
    bench.compile_layers(False)

    def use() -> None:
        bench.checkpoint(1)
        for layer, call in calls.items():
            layer.__dict__["_compiled_call_impl"] = call

    # Compiled once: compiling again would start from nothing.
    theirs()
    calls = {layer: layer._compiled_call_impl for layer in bench.layers}
    bench.compile_layers(False)
    what = f"every layer, compiled (built in {build_s:.0f} s)"
    line = row(name, what, bench, peak, use, "compiled", num_rounds)
    bench.checkpoint(None)
    bench.compile_layers(False)
    return line


def main() -> None:
    """Compares and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--parts", choices=("all", "eager", "compiled"), default="all")
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--output", type=Path, default=ROOT / "results")
    options = parser.parse_args()
    name = platform.machine() if options.small else torch.cuda.get_device_name()
    today = datetime.date.today()
    lines = [
        f"# Models of transformers on {name}",
        "",
        f"{today}, torch {torch.__version__}, transformers {transformers.__version__}, bfloat16 on a GPU."
        f" The fastest of three steps in turn; medians of {options.rounds} rounds, and of the rounds' ratios."
        " `python benchmarks/transformers_models.py`. In brackets behind the seconds of a fit: 25 plain steps and 3 s."
        " At the pace of the rounds: predicted seconds, by how much longer the plain step takes there than in the fit.",
        "",
        "| model | by hand | budget GiB | ms | recoup ms (GiB) | ratio | predicted ms | at that pace | fit s (limit)"
        " | race won by |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    path = (
        options.output
        / f"transformers_models_{name.lower().replace('nvidia ', '').replace(' ', '-')}_{today:%Y%m}.md"
    )
    for one in options.only:
        torch.manual_seed(0)
        try:
            bench = Bench(one, small=options.small)
            lines += compare(one, bench, options.rounds, options.parts)
        except Exception:  # the others are still worth their minutes
            traceback.print_exc()
            lines.append(f"| {one} | failed | | | | | | | | |")
        bench = None  # type: ignore[assignment]
        gc.collect()
        torch.compiler.reset()
        if not options.small:
            torch.cuda.empty_cache()
        path.write_text("\n".join(lines) + "\n")
    print(f"\nwritten to {path.name}")


if __name__ == "__main__":
    main()
