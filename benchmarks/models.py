"""Models to fit, of every kind that people train, in a small size for a CPU and a large one for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MODELS", "Case", "Llama", "UNet"]


class Case(NamedTuple):
    """A model, a sample, and a loss of its output (``None``: the output is the loss)."""

    model: nn.Module
    sample: Any
    loss: Callable[[Any], Tensor] | None


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.p = num_heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.p if self.training else 0.0, is_causal=True
        )
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(
        self,
        width: int,
        num_layers: int,
        vocabulary: int,
        length: int,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, width // 32, dropout) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


class Residual(nn.Module):
    def __init__(self, num_in: int, num_out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(num_out)
        self.relu = nn.ReLU(inplace=True)
        self.short: nn.Module = nn.Identity()
        if stride > 1 or num_in != num_out:
            self.short = nn.Sequential(
                nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + self.short(x))


class ResNet(nn.Module):
    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        widths = [width, 2 * width, 4 * width]
        stages = []
        for index, channels in enumerate(widths):
            num_in = widths[max(index - 1, 0)]
            blocks = [Residual(num_in, channels, 1 if index == 0 else 2)]
            blocks += [Residual(channels, channels) for _ in range(num_blocks - 1)]
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


class DoubleConv(nn.Module):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(num_in, num_out, 3, padding=1), nn.BatchNorm2d(num_out)
        self.conv2, self.bn2 = nn.Conv2d(num_out, num_out, 3, padding=1), nn.BatchNorm2d(num_out)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class UNet(nn.Module):
    """Encoder and decoder with a skip at every level."""

    def __init__(self, width: int, depth: int = 3) -> None:
        super().__init__()
        self.first = DoubleConv(3, width)
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(DoubleConv(a, b) for a, b in pairwise(widths))
        self.up = nn.ModuleList(DoubleConv(a + b, a) for a, b in pairwise(widths))
        self.pool, self.last = nn.MaxPool2d(2), nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Two maps of the input's size."""
        x = self.first(x)
        skips = []
        for block in self.down:
            skips.append(x)
            x = block(self.pool(x))
        for block, skip in zip(reversed(self.up), reversed(skips), strict=True):
            x = block(torch.cat([skip, F.interpolate(x, scale_factor=2)], 1))
        return self.last(x)


class Experts(nn.Module):
    """Each token goes to its best expert; what is saved depends on the data."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weight, choice = self.router(tokens).softmax(-1).max(-1)
        y = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero().flatten()
            y = y.index_add(0, rows, expert(tokens[rows]) * weight[rows, None])
        return x + y.view_as(x)


class MoE(nn.Module):
    def __init__(self, width: int, num_layers: int, num_experts: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(width, num_experts) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class EncoderDecoder(nn.Module):
    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.transformer = nn.Transformer(
            width, width // 32, num_layers, num_layers, 4 * width, dropout=0.1, batch_first=True
        )

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.transformer(source, target)


class Recurrent(nn.Module):
    """One cell, called at every step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(width, width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        state = (torch.zeros_like(x[0]), torch.zeros_like(x[0]))
        for step in x:
            state = self.cell(step, state)
        return self.head(state[0])


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)
        return y.to(x.dtype) * self.weight


class GroupedAttention(nn.Module):
    def __init__(self, width: int, num_heads: int, num_shared: int) -> None:
        super().__init__()
        self.num_heads, self.num_shared, self.size = num_heads, num_shared, width // num_heads
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, num_shared * self.size, bias=False)
        self.v = nn.Linear(width, num_shared * self.size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        q = rotate(self.q(x).view(batch, length, self.num_heads, -1).transpose(1, 2), cos, sin)
        k = rotate(self.k(x).view(batch, length, self.num_shared, -1).transpose(1, 2), cos, sin)
        v = self.v(x).view(batch, length, self.num_shared, -1).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(batch, length, width))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    def __init__(self, width: int, num_heads: int, num_shared: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.attention = RMSNorm(width), GroupedAttention(width, num_heads, num_shared)
        self.norm2, self.mlp = RMSNorm(width), SwiGLU(width, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """A Llama-style decoder; with the defaults, the 1.1 B parameters that the comparison uses.

    ``calls`` says how each block is called: hand-made recipes put a checkpoint there.
    """

    def __init__(
        self,
        width: int = 2048,
        num_layers: int = 16,
        num_heads: int = 32,
        num_shared: int = 8,
        hidden: int = 8192,
        vocabulary: int = 32000,
    ) -> None:
        super().__init__()
        self.size = width // num_heads
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            LlamaBlock(width, num_heads, num_shared, hidden) for _ in range(num_layers)
        )
        self.norm, self.head = RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.calls: list[Callable[..., Tensor]] = [plainly] * num_layers

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of predicting the tokens."""
        x = self.embed(tokens)
        cos, sin = rotary(tokens.shape[1], self.size, x)
        for call, block in zip(self.calls, self.blocks, strict=True):
            x = call(block, x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def plainly(block: nn.Module, *args: Tensor) -> Tensor:
    return block(*args)


def rotary(length: int, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    steps = torch.arange(0, size, 2, device=like.device, dtype=torch.float32)
    angles = torch.arange(length, device=like.device)[:, None] / 10000 ** (steps / size)
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def _gpt(large: bool) -> Case:
    width, layers, words, length, batch = (768, 12, 16000, 1024, 8) if large else (128, 6, 500, 64, 4)
    return Case(GPT(width, layers, words, length), torch.randint(words, (batch, length)), None)


def _tied(large: bool) -> Case:
    width, layers, words, length, batch = (768, 12, 16000, 512, 16) if large else (128, 4, 500, 64, 4)
    model = GPT(width, layers, words, length, dropout=0.1, tied=True)
    return Case(model, torch.randint(words, (batch, length)), None)


def _resnet(large: bool) -> Case:
    size, batch = (64, 256) if large else (24, 8)
    return Case(ResNet(64 if large else 16, 4), torch.randn(batch, 3, size, size), mean_square)


def _unet(large: bool) -> Case:
    size, batch = (256, 16) if large else (48, 2)
    return Case(UNet(64 if large else 16), torch.randn(batch, 3, size, size), mean_square)


def _moe(large: bool) -> Case:
    width, batch, length = (1024, 32, 512) if large else (64, 8, 48)
    return Case(MoE(width, 8), torch.randn(batch, length, width), None)


def _encoder_decoder(large: bool) -> Case:
    width, batch, length = (512, 32, 512) if large else (64, 4, 48)
    sample = (torch.randn(batch, length, width), torch.randn(batch, length, width))
    return Case(EncoderDecoder(width, 6 if large else 3), sample, mean_square)


def _recurrent(large: bool) -> Case:
    width, batch, length = (1024, 1024, 128) if large else (64, 128, 40)
    return Case(Recurrent(width), torch.randn(length, batch, width), mean_square)


def _llama(large: bool) -> Case:
    if large:
        model = Llama(1024, 16, 16, 4, 4096, 32000).to(torch.bfloat16)
        return Case(model, torch.randint(32000, (4, 2048)), None)
    return Case(Llama(64, 4, 4, 2, 172, 500), torch.randint(500, (4, 64)), None)


MODELS: dict[str, Callable[[bool], Case]] = {
    "GPT": _gpt,
    "GPT, dropout, tied": _tied,
    "Llama": _llama,
    "ResNet, BatchNorm": _resnet,
    "U-Net, skips": _unet,
    "mixture of experts": _moe,
    "encoder-decoder": _encoder_decoder,
    "LSTM, shared weights": _recurrent,
}
