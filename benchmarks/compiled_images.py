"""Compiled units of a U-Net and of a ViT against torch's own memory budgets and checkpoints, in the same memory.

Run it on a GPU with ``python benchmarks/compiled_images.py``; it prints a report and writes it to
``benchmarks/results/compiled_images_HARDWARE_YYYYMM.md``. As ``benchmarks/compiled.py`` does for a decoder: at each
budget for activations, `recoup.fit` with ``engine="compiled"`` against the fastest that fits of blocks compiled with
torch's activation memory budget, compiled blocks of which the first k are checkpointed, and the whole model compiled.

The U-Net is that of ``benchmarks/models.py``, whose blocks have a shape of their own each; the ViT is ViT-L/16 of
transformers, whose layers are alike. ``--small`` tries the script on a CPU.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import platform
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from compiled import GIB, WHOLE, Bench, Call, Contender, budgeted
from models import UNet
from torch import Tensor, nn

import recoup
from recoup.errors import BudgetError

ROOT = Path(__file__).resolve().parent


class WithLoss(nn.Module):
    """A network whose output is its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """The mean square of all that the network gives."""
        found = self.network(images)
        return (found if isinstance(found, Tensor) else found.logits).float().square().mean()


def unet(small: bool) -> tuple[nn.Module, list[nn.Module], Tensor]:
    """A U-Net, its blocks, and a batch."""
    model = UNet(8, 2) if small else UNet(64, 3)
    blocks = [model.first, *model.down, *reversed(model.up)]
    return model, blocks, torch.randn((2, 3, 32, 32) if small else (16, 3, 384, 384))


def vit(small: bool) -> tuple[nn.Module, list[nn.Module], Tensor]:
    """ViT-L/16, its layers, and a batch."""
    import transformers
    from transformers.modeling_layers import GradientCheckpointingLayer

    width, layers, heads, size = (64, 3, 4, 32) if small else (1024, 24, 16, 224)
    config = transformers.ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        image_size=size,
    )
    hf: Any = transformers  # its classes have no types of their own
    model = hf.ViTForImageClassification(config)
    blocks: list[nn.Module] = [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]
    return model, blocks, torch.randn(2 if small else 64, 3, size, size)


CASES = {"U-Net": unet, "ViT": vit}


def _template(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def own_function(name: str) -> Call:
    """A function with code of its own: the compiler keeps what it compiled with the code."""
    return FunctionType(_template.__code__.replace(co_name=name), _template.__globals__, name)


class ImageBench(Bench):
    """A network for images, and ways to run it."""

    def __init__(self, name: str, small: bool) -> None:
        torch.manual_seed(0)
        self.device = "cpu" if small else "cuda"
        network, self.blocks, images = CASES[name](small)
        dtype = torch.float32 if small else torch.bfloat16
        self.model: Any = WithLoss(network).to(self.device, dtype)
        self.tokens = images.to(self.device, dtype)
        self.forward = self.model
        self.fixed_bytes = sum(2 * p.numel() * p.element_size() for p in self.model.parameters())

    def use(self, calls: Sequence[Call] | None = None, forward: Call | None = None) -> None:
        """Sets the model up, without a plan."""
        recoup.remove(self.model)
        for index, block in enumerate(self.blocks):
            block.__dict__.pop("forward", None)
            if calls:
                block.__dict__["forward"] = partial(calls[index], block)
        self.forward = forward or self.model


def peers_of(bench: ImageBench, shares: Sequence[float], wholes: Sequence[float]) -> list[Contender]:
    """What torch offers for compiled code."""
    found = []
    num_blocks = len(bench.blocks)
    for share in shares:
        call = torch.compile(own_function(f"block_{share}".replace(".", "_")), dynamic=False)
        contender = Contender(f"blocks compiled, budget {share:g}", partial(bench.use, [call] * num_blocks))
        with budgeted(share):
            found.append(bench.measured(contender))
        if share == 1.0:
            checkpointed: Call = lambda block, *args, call=call, **kwargs: WHOLE(call, block, *args, **kwargs)  # noqa: E731
            for k in range(1, num_blocks + 1, max(1, num_blocks // 8)):
                calls = [checkpointed] * k + [call] * (num_blocks - k)
                name = f"blocks compiled, checkpoint on {k} of {num_blocks}"
                found.append(bench.measured(Contender(name, partial(bench.use, calls))))
    for share in wholes:
        whole = partial(torch.compile(own_function(f"whole_{share}".replace(".", "_"))), bench.model)
        with budgeted(share):
            found.append(
                bench.measured(
                    Contender(f"whole model compiled, budget {share:g}", partial(bench.use, None, whole))
                )
            )
    return found


def compare(bench: ImageBench, peers: list[Contender], budget: int, num_rounds: int) -> str:
    """One budget: a line on the fastest peer that fits against ours."""
    fitting = [peer for peer in peers if peer.activation_bytes <= budget]
    best = min(fitting, key=lambda peer: peer.step_s)
    bench.use()
    gc.collect()
    start = time.perf_counter()
    try:
        fitted = recoup.fit(bench.model, bench.tokens, budget=bench.fixed_bytes + budget, engine="compiled")
    except BudgetError as error:
        return f"| {budget / GIB:.2f} | {best.name} | | does not fit: {error} | | | | |"
    fit_s = time.perf_counter() - start
    peak = bench.activation_bytes()
    ours, theirs = [], []
    for _ in range(num_rounds):
        bench.apply(fitted.plan)
        ours.append(bench.turn_s())
        best.use()
        theirs.append(bench.turn_s())
    our_ms, their_ms = (statistics.median(one) * 1e3 for one in (ours, theirs))
    over = " **over**" if peak > budget else ""
    what = "; ".join(f"{names}: {label}" for names, label in fitted.plan.describe_units() if label != "keep")
    return (
        f"| {budget / GIB:.2f} | {best.name} | {their_ms:.1f} ({best.activation_bytes / GIB:.2f}) | {our_ms:.1f}"
        f" ({peak / GIB:.2f}{over}) | {our_ms / their_ms:.3f} | {fitted.plan.predicted_s * 1e3:.1f} |"
        f" {fit_s:.0f} | {what} |"
    )


def section(name: str, options: argparse.Namespace) -> list[str]:
    """A table of budgets, and one of contenders."""
    bench = ImageBench(name, options.small)
    peers = peers_of(bench, options.shares, options.wholes)
    lines = [
        "",
        f"## {name}",
        "",
        "| budget GiB | best that fits | ms (GiB) | recoup ms (GiB) | ratio | predicted ms | fit s | plan |",
        "|---|---|---|---|---|---|---|---|",
    ]
    low, high = (find(peer.activation_bytes for peer in peers) for find in (min, max))
    for share in options.budgets:
        lines.append(compare(bench, peers, int(low + share * (high - low)), options.rounds))
        print(lines[-1], flush=True)
    bench.use()
    table = ["", "| contender | ms | activations GiB | build s |", "|---|---|---|---|"]
    return [*lines, *table, *(peer.row() for peer in peers)]


def main() -> None:
    """Compares and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--shares", nargs="*", type=float, default=[1.0, 0.75, 0.5, 0.25, 0.1, 0.0])
    parser.add_argument("--wholes", nargs="*", type=float, default=[1.0, 0.5])
    parser.add_argument(
        "--budgets", nargs="*", type=float, default=[0.1, 0.4, 0.7], help="from the least memory to the most"
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--output", type=Path, default=ROOT / "results")
    options = parser.parse_args()
    hardware = platform.machine() if options.small else torch.cuda.get_device_name()
    today = datetime.date.today()
    lines = [
        f"# Compiled units of networks for images on {hardware}",
        "",
        f"{today}, torch {torch.__version__}, bfloat16 on a GPU. Activations are the peak beyond parameters and"
        f" gradients. Medians of {options.rounds} rounds, of the fastest of three steps in turn; of 3 in the tables"
        " of contenders. `python benchmarks/compiled_images.py`.",
    ]
    name = f"compiled_images_{hardware.lower().replace('nvidia ', '').replace(' ', '-')}_{today:%Y%m}.md"
    for case in options.only:
        torch.compiler.reset()
        lines += section(case, options)
        (options.output / name).write_text("\n".join(lines) + "\n")
    print(f"\nwritten to {name}")


if __name__ == "__main__":
    main()
