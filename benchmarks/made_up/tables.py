"""Values that every unit reads: masks, tables, memories, embeddings, keys."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from models import rotary
from torch import Tensor, nn

from made_up.parts import WIDTH, Gated, Mlp, Subject, as_tuple, in_turn, mlps, rows, subject, tokens

__all__ = ["TABLES"]


class RotaryBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.mlp = Mlp(width, residual=True)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        cos, sin = tables
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k = q * cos + q.roll(1, -1) * sin, k * cos + k.roll(1, -1) * sin
        weights = (q @ k.transpose(-1, -2) + mask).softmax(-1)
        return self.mlp(x + self.out(weights @ v))


class Tables(nn.Module):
    """A mask as large as the attention and rotary tables, made once and read by every layer."""

    def __init__(self, *, learned: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RotaryBlock(WIDTH) for _ in range(5))
        self.bias = nn.Linear(WIDTH, 1) if learned else None

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        mask = torch.full((batch, length, length), -1e4, device=x.device).triu(1)
        if self.bias is not None:
            mask = mask + self.bias(x)
        tables = rotary(length, width, x)
        for block in self.blocks:
            x = block(x, tables, mask)
        return x


class CrossBlock(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.q, self.kv = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.mlp = Mlp(width, residual=True)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        k, v = self.kv(memory).chunk(2, -1)
        return self.mlp(x + F.scaled_dot_product_attention(self.q(self.norm(x)), k, v))


class CrossAttention(nn.Module):
    """An encoder's memory is read by every layer of the decoder; the target is shorter, as long or longer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlps(4, residual=True), nn.ModuleList(CrossBlock() for _ in range(4))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = in_turn(self.encoder, source)
        for block in self.decoder:
            target = block(target, memory)
        return target


class TimeEmbedded(nn.Module):
    """A small trained embedding that every unit reads, as in diffusion models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = Mlp(), nn.ModuleList(Gated() for _ in range(6))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        gate = self.embed(time)
        for block in self.blocks:
            x = block(x, gate=gate)
        return x


class FirstKeys(nn.Module):
    """The first layer's keys and values are read by all layers (cross-layer attention)."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = nn.Linear(WIDTH, 2 * WIDTH)
        self.blocks = nn.ModuleList(FromKeys() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.kv(x).chunk(2, -1)
        for block in self.blocks:
            x = block(x, k, v)
        return x


class FromKeys(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.mlp = nn.Linear(WIDTH, WIDTH), Mlp(residual=True)

    def forward(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.mlp(x + F.scaled_dot_product_attention(self.q(x), k, v))


class Hyper(nn.Module):
    """A unit makes the weights that later code applies."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.blocks = nn.Linear(WIDTH, WIDTH), mlps(5, residual=True)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.make(x).tanh()
        for block in self.blocks:
            x = block(x * gates)
        return x


class Broadcast(nn.Module):
    """A small output is expanded over all rows, whose gradients are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.blocks = Mlp(), mlps(5)

    def forward(self, x: Tensor) -> Tensor:
        style = self.small(x[:1])
        for block in self.blocks:
            x = block(x + style)
        return x


TABLES: dict[str, Callable[[int], Subject]] = {
    "mask and tables for all": subject(Tables, tokens),
    "trained mask for all": subject(lambda: Tables(learned=True), tokens),
    "cross-attention, short target": subject(
        CrossAttention, lambda scale: as_tuple(tokens(scale, length=64), tokens(scale, length=16))
    ),
    "cross-attention, long target": subject(
        CrossAttention, lambda scale: as_tuple(tokens(scale, length=16), tokens(scale, length=64))
    ),
    "time embedding": subject(TimeEmbedded, lambda scale: as_tuple(rows(scale), rows(scale))),
    "first layer's keys for all": subject(FirstKeys, tokens),
    "made weights": subject(Hyper),
    "small output, broadcast": subject(Broadcast),
}
