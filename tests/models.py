"""Small models of every kind that the library must cope with, and a way to compare two runs of one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A pre-norm transformer block with dropout."""

    def __init__(self, width: int, num_heads: int, dropout: float = 0.1, cross: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, num_heads, dropout=dropout, batch_first=True)
        self.cross = nn.MultiheadAttention(width, num_heads, batch_first=True) if cross else None
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor | None = None, *, mask: Tensor | None = None) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        if self.cross is not None and memory is not None:
            x = x + self.cross(x, memory, memory, need_weights=False)[0]
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, call: Callable[..., Any], width: int = 16, num_blocks: int = 3) -> None:
        super().__init__()
        self.call = call
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(num_blocks))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight  # tied

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            x = self.call(block, x, mask=mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())

    @staticmethod
    def sample() -> tuple[Tensor, ...]:
        return (torch.arange(24).reshape(3, 8) % 11,)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(channels, momentum=0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(x + self.bn2(self.conv2(y)))


class ResNet(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call
        self.stem = nn.Conv2d(3, 6, 3)
        self.blocks = nn.ModuleList(Residual(6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.call(block, x)
        return x.square().mean()

    @staticmethod
    def sample() -> tuple[Tensor, ...]:
        return (torch.randn(2, 3, 9, 9),)


class UNet(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call
        self.down = nn.ModuleList([nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)])
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ModuleList([nn.Conv2d(16, 4, 3, padding=1), nn.Conv2d(8, 2, 3, padding=1)])

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for conv in self.down:
            x = self.call(lambda x, conv=conv: F.silu(conv(x)), x)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.call(self.middle, x)
        for conv in self.up:
            x = self.call(self.merge, conv, x, skip=skips.pop())
        return x.square().mean()

    def merge(self, conv: nn.Module, x: Tensor, *, skip: Tensor) -> Tensor:
        return F.silu(conv(torch.cat([F.interpolate(x, size=skip.shape[-2:]), skip], dim=1)))

    @staticmethod
    def sample() -> tuple[Tensor, ...]:
        return (torch.randn(2, 2, 8, 8),)


class Experts(nn.Module):
    """A mixture of experts: the shapes of what is saved depend on the data."""

    def __init__(self, width: int, num_experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero().flatten()
            y = y.index_add(0, rows, torch.tanh(expert(x[rows])) * weight[rows, None])
        return x + y


class MoE(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call
        self.layers = nn.ModuleList(Experts(6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.call(layer, x)
        return x.square().mean()

    @staticmethod
    def sample() -> tuple[Tensor, ...]:
        return (torch.randn(20, 6),)


class EncoderDecoder(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call
        self.encoder = nn.ModuleList(Block(8, 2) for _ in range(2))
        self.decoder = nn.ModuleList(Block(8, 2, cross=True) for _ in range(2))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        for block in self.encoder:
            source = self.call(block, source)
        for block in self.decoder:
            target = self.call(block, target, source)
        return target.square().mean()

    @staticmethod
    def sample() -> tuple[Tensor, ...]:
        return torch.randn(2, 5, 8), torch.randn(2, 4, 8)


class Patches(nn.Module):
    """Tokens as an image are channels-last, and so is the gradient of the convolution's weight, which is not."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Linear(24, 24)
        self.conv = nn.Conv2d(24, width, 4, bias=False)
        self.head = nn.Linear(width, 7)

    def forward(self, x: Tensor) -> Tensor:
        # Without variables, which would hold their tensors while the code between units is looked at.
        return self.head(self.conv(self.embed(x).transpose(1, 2).reshape(-1, 24, 4, 4)).flatten(1))


class Recurrent(nn.Module):
    """Shared weights: one cell called at every step."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call
        self.cell = nn.LSTMCell(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        state = (x.new_zeros(x.shape[1], 7), x.new_zeros(x.shape[1], 7))
        for step in x:
            state = self.call(self.cell, step, state)
        return state[0].square().sum()

    @staticmethod
    def sample() -> tuple[Tensor, ...]:
        return (torch.randn(4, 3, 5),)


ALL = (GPT, ResNet, UNet, MoE, EncoderDecoder, Recurrent)


def plainly(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)


def train(model: nn.Module, sample: tuple[Tensor, ...], num_steps: int = 3) -> dict[str, Tensor]:
    """Trains a copy and returns everything that could differ: losses, gradients, parameters, buffers, RNG."""
    model = copy.deepcopy(model)
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: dict[str, Tensor] = {}
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = model(*sample)
        loss.backward()
        seen[f"loss {step}"] = loss.detach()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            seen[f"gradient {step} {name}"] = parameter.grad.clone()
        optimizer.step()
    seen.update({f"state {name}": value.clone() for name, value in model.state_dict().items()})
    seen["rng"] = torch.get_rng_state()
    return seen


def make_pair(kind: type[nn.Module], call: Callable[..., Any]) -> tuple[nn.Module, nn.Module]:
    """The same model twice: plain, and with ``call`` around its units."""
    torch.manual_seed(3)
    plain = kind(plainly)  # type: ignore[call-arg]
    other = copy.deepcopy(plain)
    other.call = call  # type: ignore[assignment]
    return plain, other


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name
