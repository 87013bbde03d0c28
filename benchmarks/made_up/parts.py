"""Parts of the made-up models, and their samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "WIDTH",
    "Subject",
    "as_tuple",
    "images",
    "in_turn",
    "mean_square",
    "mlps",
    "rows",
    "subject",
    "tokens",
]

WIDTH = 32


class Subject(NamedTuple):
    """A training step: a model, a sample, a loss of the output (``None``: the output's own), and how it is trained."""

    model: nn.Module
    sample: Any
    loss: Callable[..., Tensor] | None = None
    accumulates: bool = False
    holds_output: bool = True


def mean_square(output: Any) -> Tensor:
    """A loss of a tensor, or of all tensors in a list, tuple or dict."""
    if isinstance(output, Tensor):
        return output.float().square().mean()
    parts = output.values() if isinstance(output, dict) else output
    return torch.stack([mean_square(part) for part in parts]).sum()


class Mlp(nn.Module):
    """Two layers, and perhaps the input added."""

    def __init__(self, width: int = WIDTH, hidden: int | None = None, *, residual: bool = False) -> None:
        super().__init__()
        hidden = hidden or 2 * width
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, hidden),
            nn.Linear(hidden, width),
        )
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + y if self.residual else y


def mlps(num: int, width: int = WIDTH, *, residual: bool = False) -> nn.ModuleList:
    return nn.ModuleList(Mlp(width, residual=residual) for _ in range(num))


def in_turn(blocks: nn.ModuleList, x: Any) -> Any:
    for block in blocks:
        x = block(x)
    return x


class Gated(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.body = Mlp(width)

    def forward(self, x: Tensor, *, gate: Tensor) -> Tensor:
        return x + self.body(x) * gate


def rows(scale: int, width: int = WIDTH, num: int = 1024) -> Tensor:
    return torch.randn(num * scale, width)


def tokens(scale: int, width: int = WIDTH, length: int = 48, batch: int = 12) -> Tensor:
    return torch.randn(batch * scale, length, width)


def images(scale: int, size: int = 32, batch: int = 4) -> Tensor:
    return torch.randn(batch * scale, 3, size, size)


def as_tuple(*parts: Tensor) -> tuple[Tensor, ...]:
    return parts


def subject(
    make: Callable[[], nn.Module], sample: Callable[[int], Any] = rows, **options: Any
) -> Callable[[int], Subject]:
    """A subject of a given scale, with the mean square as its loss unless told otherwise."""
    options.setdefault("loss", mean_square)
    return lambda scale: Subject(make(), sample(scale), **options)
