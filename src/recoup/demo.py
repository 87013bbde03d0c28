"""The demonstration: a small GPT on the CPU, fitted to half its activation memory and trained to the same losses."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recoup.errors import VerificationError
from recoup.fitting import Fitted, fit
from recoup.measuring import measure
from recoup.progress import note
from recoup.sizes import format_bytes

__all__ = ["GPT", "Shown", "make", "run"]

_WIDTH, _NUM_HEADS, _NUM_BLOCKS, _VOCABULARY = 128, 4, 8, 512
_BATCH, _LENGTH, _NUM_STEPS = 8, 128, 6
_REPORT = Path("recoup-demo.html")


class Block(nn.Module):
    """A transformer block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then the feed-forward layer, each added to its input."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, _NUM_HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind()
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)), 0.1, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1, self.training)


class GPT(nn.Module):
    """A small decoder that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(_VOCABULARY, _WIDTH), nn.Embedding(_LENGTH, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(_NUM_BLOCKS))
        self.head = nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of predicting each next token."""
        x = self.embed(tokens[:, :-1]) + self.place.weight[: tokens.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def make(batch: int = _BATCH) -> dict[str, Any]:
    """The model, a sample and an optimizer: a factory as the command line takes it."""
    torch.manual_seed(0)
    model = GPT()
    tokens = torch.randint(_VOCABULARY, (batch, _LENGTH + 1))
    return {"model": model, "sample": tokens, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}


@dataclass(frozen=True)
class Shown:
    """What the demonstration found; prints as it is shown.

    Attributes:
        fitted: the fitted model.
        plain_losses: of the plain model's steps.
        fitted_losses: of the fitted model's steps.
        report: the file with the report.
    """

    fitted: Fitted = field(repr=False)
    plain_losses: tuple[float, ...]
    fitted_losses: tuple[float, ...]
    report: Path

    def __str__(self) -> str:
        plan = self.fitted.plan
        lines = [
            f"A GPT of {_NUM_BLOCKS} blocks on the CPU, fitted to half its activation memory: a budget of"
            f" {format_bytes(plan.budget_bytes)} instead of {format_bytes(plan.profile.plain_bytes)}.",
            "",
            str(self.fitted),
            "",
            f"{'step':>6}{'plain loss':>14}{'fitted loss':>14}",
        ]
        losses = zip(self.plain_losses, self.fitted_losses, strict=True)
        lines += [f"{step:>6}{plain:>14.7f}{ours:>14.7f}" for step, (plain, ours) in enumerate(losses, 1)]
        lines += ["The same losses and the same parameters, bit for bit.", f"Report: {self.report}"]
        return "\n".join(lines)


@contextmanager
def _one_thread() -> Iterator[None]:
    """On a busy machine several threads wait for each other: the same work took ten times as long."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@_one_thread()
def run() -> Shown:
    """Fits, trains and compares.

    Raises:
        VerificationError: the fitted model's losses or parameters differ from the plain model's.
    """
    made = make()
    model, tokens, optimizer = made["model"], made["sample"], made["optimizer"]
    profile = measure(model, tokens, optimizer=optimizer)
    plain_model = copy.deepcopy(model)
    plain_optimizer = torch.optim.AdamW(plain_model.parameters(), lr=1e-3)
    budget_bytes = profile.plain_bytes - profile.activation_bytes // 2
    fitted = fit(model, tokens, budget=budget_bytes, optimizer=optimizer)
    plain_losses, fitted_losses = [], []
    for step in range(_NUM_STEPS):
        note("training", step, _NUM_STEPS)
        plain_losses.append(_train(plain_model, plain_optimizer, tokens, step))
        fitted_losses.append(_train(model, optimizer, tokens, step))
    pairs = zip(plain_model.parameters(), model.parameters(), strict=True)
    if plain_losses != fitted_losses or not all(torch.equal(plain, ours) for plain, ours in pairs):
        raise VerificationError(
            "The fitted GPT was trained to other losses or parameters: please report this."
        )
    return Shown(fitted, tuple(plain_losses), tuple(fitted_losses), fitted.to_html(_REPORT))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, seed: int) -> float:
    torch.manual_seed(seed)
    optimizer.zero_grad()
    loss: Tensor = model(tokens)
    loss.backward()
    optimizer.step()
    return loss.item()
