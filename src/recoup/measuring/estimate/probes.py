"""Layers of every kind that people train, in several sizes: what `recoup hardware` times operation by operation.

Each is a part of a network, not a single operation: its backward is timed too, on the layouts that occur in networks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Probe", "probes", "small_probes"]


class Probe(NamedTuple):
    """A layer and its input, not yet made; its output is summed up for a backward."""

    name: str
    make: Callable[[], nn.Module]
    sample: Callable[[], Tensor]
    dtype: torch.dtype
    channels_last: bool = False


class _Decoder(nn.Module):
    """A decoder's block with dropout, between an embedding and a loss."""

    def __init__(self, width: int, num_heads: int, num_words: int, *, gated: bool, is_causal: bool) -> None:
        super().__init__()
        self.num_heads, self.is_causal = num_heads, is_causal
        self.embed = nn.Embedding(num_words, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gate = nn.Linear(width, 4 * width, bias=False) if gated else None
        self.head = nn.Linear(width, num_words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts
        q, k = _rotated(q), _rotated(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(batch, length, width)), 0.1)
        y = self.norm2(x)
        x = x + self.down(F.gelu(self.up(y)) if self.gate is None else self.up(y) * F.silu(self.gate(y)))
        y = x.float()
        x = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class _Scores(nn.Module):
    """Attention of plain products, as torch runs it where no fused kernel takes the arguments."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        scores = (q @ k.transpose(-2, -1) * 0.1).masked_fill(~mask, float("-inf"))
        y = torch.softmax(scores, -1) @ v
        output: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return output.square().sum()


def _rotated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * 0.6 + torch.cat([-second, first], -1) * 0.8


class _Convolutions(nn.Module):
    """A bottleneck, a grouped convolution, group normalisation, and a level of a U-Net."""

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        wide = 4 * num_channels
        self.stem = nn.Conv2d(3, num_channels, 3, padding=1)
        self.reduce, self.expand = nn.Conv2d(wide, num_channels, 1), nn.Conv2d(num_channels, wide, 1)
        self.first = nn.Conv2d(num_channels, num_channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(num_channels, 2 * num_channels, 3, 2, 1)
        self.grouped = nn.Conv2d(num_channels, num_channels, 3, padding=1, groups=num_channels)
        self.norms = nn.ModuleList(map(nn.BatchNorm2d, (num_channels, wide, num_channels)))
        self.group_norm = nn.GroupNorm(8, num_channels)
        self.merge = nn.Conv2d(3 * num_channels, num_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norms[0](self.stem(x)), inplace=True)
        wide = self.norms[1](self.expand(x))
        x = F.relu_(self.norms[2](self.first(F.relu(self.reduce(wide + wide))))) + x
        x = x + F.silu(self.group_norm(self.grouped(x)))
        below = F.interpolate(self.second(x), scale_factor=2)
        x = self.merge(torch.cat([x, below], 1))
        return F.max_pool2d(x, 2).mean((2, 3)).square().sum()


class _Patches(nn.Module):
    """Images as tokens, attention without a mask, an average."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.layer = nn.TransformerEncoderLayer(
            width, num_heads, 4 * width, batch_first=True, activation="gelu"
        )

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(self.patch(x).flatten(2).transpose(1, 2))
        return output.mean(1).square().sum()


def _decoder(
    width: int, num_heads: int, batch: int, length: int, num_words: int, dtype: torch.dtype, *, gated: bool
) -> Probe:
    return Probe(
        f"decoder {width}",
        lambda: _Decoder(width, num_heads, num_words, gated=gated, is_causal=gated),
        lambda: torch.randint(num_words, (batch, length)),
        dtype,
    )


def _convolutions(channels: int, batch: int, size: int, dtype: torch.dtype, *, last: bool) -> Probe:
    return Probe(
        f"convolutions {channels}",
        lambda: _Convolutions(channels),
        lambda: torch.randn(batch, 3, size, size),
        dtype,
        channels_last=last,
    )


def probes(dtypes: tuple[torch.dtype, ...], *, large: bool) -> Iterator[Probe]:
    """All layers in all sizes.

    Args:
        dtypes: of parameters and activations.
        large: as on a GPU, not as on a host.
    """
    decoders = [(64, 2, 1, 16, 500), (128, 4, 2, 64, 1000), (256, 4, 2, 128, 2000)]
    images = [(8, 1, 16), (16, 2, 32), (32, 2, 48)]
    patches = [(64, 2, 1, 64), (192, 3, 2, 96)]
    scores = [(64, 2, 1, 16), (256, 4, 2, 128)]
    if large:
        decoders += [(768, 12, 4, 1024, 16000), (1024, 16, 8, 2048, 32000), (4096, 32, 2, 4096, 32000)]
        decoders += [(768, 24, 8, 1024, 16000), (512, 16, 32, 512, 8000)]
        scores += [(768, 12, 4, 1024), (1024, 16, 4, 2048)]
        images += [(64, 16, 64), (64, 16, 256), (128, 32, 64), (256, 64, 16), (512, 64, 8)]
        patches += [(768, 12, 64, 224), (1024, 16, 32, 224), (512, 16, 32, 352)]
    for dtype in dtypes:
        for index, sizes in enumerate(decoders):
            yield _decoder(*sizes, dtype, gated=index % 2 == 0)
            if large:
                yield _decoder(*sizes, dtype, gated=index % 2 == 1)
        for width, num_heads, batch, size in patches:
            yield Probe(
                f"patches {width}",
                lambda width=width, num_heads=num_heads: _Patches(width, num_heads),  # type: ignore[misc]
                lambda batch=batch, size=size: torch.randn(batch, 3, size, size),  # type: ignore[misc]
                dtype,
            )
        for width, num_heads, batch, length in scores:
            yield Probe(
                f"scores {width}",
                lambda width=width, num_heads=num_heads: _Scores(width, num_heads),  # type: ignore[misc]
                lambda batch=batch, length=length, width=width: torch.randn(batch, length, width),  # type: ignore[misc]
                dtype,
            )
        for sizes_of_images in images:
            for last in (False, True):
                yield _convolutions(*sizes_of_images, dtype, last=last)


def small_probes(dtype: torch.dtype) -> list[Probe]:
    """Layers so small that the host sets the pace."""
    return [_decoder(64, 2, 1, 16, 100, dtype, gated=True), _convolutions(8, 1, 16, dtype, last=False)]
