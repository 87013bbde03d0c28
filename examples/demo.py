"""The product's face: a small GPT trained with and without checkpointing, and what each costs.

Run it with ``make demo``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_own

import recoup
from recoup.measuring import MemoryTracker
from recoup.sizes import format_bytes

WIDTH, NUM_HEADS, NUM_BLOCKS, VOCABULARY = 128, 4, 8, 512
BATCH, LENGTH, NUM_STEPS = 8, 128, 6
Call = Callable[..., Any]


class Block(nn.Module):
    """A transformer block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then the feed-forward layer, each added to its input."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, NUM_HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind()
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1)


class GPT(nn.Module):
    """A decoder whose blocks are run by ``call``."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of predicting each next token."""
        x = self.embed(tokens[:, :-1]) + self.place.weight[: tokens.shape[1] - 1]
        for block in self.blocks:
            x = self.call(block, x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


class Training:
    """One way of training: a model, its optimizer, and what has been seen so far."""

    def __init__(self, call: Call) -> None:
        torch.manual_seed(0)
        self.model = GPT(call)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.peak_bytes = 0

    def step(self, tokens: Tensor, seed: int) -> None:
        """One timed step."""
        torch.manual_seed(seed)
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())

    def measure(self, tokens: Tensor) -> None:
        """The peak of one step. Gradients exist before the tracker starts, so it counts activations."""
        torch.manual_seed(NUM_STEPS)
        with MemoryTracker() as memory:
            loss = self.model(tokens)
            loss.backward()
            del loss
        self.peak_bytes = memory.peak_bytes

    def equals(self, other: Training) -> bool:
        """Whether two trainings gave the same losses and gradients, bit for bit."""
        pairs = zip(self.model.parameters(), other.model.parameters(), strict=True)
        return self.losses == other.losses and all(torch.equal(a.grad, b.grad) for a, b in pairs)  # type: ignore[arg-type]


def main() -> None:
    """Trains in three ways, a step of each in turn, and prints the table."""
    console = Console()
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    trainings = {
        "plain": Training(lambda block, x: block(x)),
        "torch": Training(lambda block, x: torch_own(block, x, use_reentrant=False)),
        "recoup": Training(recoup.checkpoint),
    }
    for seed in track(
        range(NUM_STEPS), "Training", console=console, transient=True, disable=not console.is_terminal
    ):
        for training in trainings.values():
            training.step(tokens, seed)
    for training in trainings.values():
        training.measure(tokens)
    plain, ours = trainings["plain"], trainings["recoup"]
    table = Table(
        title=f"A GPT of {NUM_BLOCKS} blocks, {NUM_STEPS} steps on the CPU; every block checkpointed"
    )
    for heading in ("checkpoint", "step", "peak activations", "last loss", "against plain"):
        table.add_column(heading, justify="right" if heading != "checkpoint" else "left")
    for name, training in trainings.items():
        same = "" if training is plain else "bit-equal" if training.equals(plain) else "[red]differs[/red]"
        step = f"{statistics.median(training.seconds[1:]) * 1e3:.0f} ms"
        table.add_row(name, step, format_bytes(training.peak_bytes), f"{training.losses[-1]:.6f}", same)
    console.print(table)
    if not ours.equals(plain):
        raise SystemExit("recoup changed the losses or gradients: please report this.")
    share = ours.peak_bytes / plain.peak_bytes
    console.print(f"The same losses and gradients in {share:.0%} of the activation memory.")


if __name__ == "__main__":
    main()
