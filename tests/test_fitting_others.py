"""Models as others write them: peaks within 1 % of the prediction at four budgets, the smallest one included.

Two are predicted too high under some plans; none may be too low.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from slowly import slow_but
from torch import Tensor, nn

import recoup


class Bottleneck(nn.Module):
    """In place wherever that is possible."""

    def __init__(self, width: int, inner: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, 4 * inner, 1, bias=False), nn.BatchNorm2d(4 * inner)
        self.relu, self.down = nn.ReLU(inplace=True), None
        if stride > 1 or width != 4 * inner:
            layers = nn.Conv2d(width, 4 * inner, 1, stride, bias=False), nn.BatchNorm2d(4 * inner)
            self.down = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(y)))))
        y += x if self.down is None else self.down(x)
        return self.relu(y)


def resnet() -> tuple[nn.Module, Any, Any]:
    stem = (
        nn.Conv2d(3, 16, 7, 2, 3, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    )
    stages = [
        nn.Sequential(Bottleneck(width, inner, stride), Bottleneck(4 * inner, inner, 1))
        for width, inner, stride in ((16, 8, 1), (32, 16, 2), (64, 32, 2))
    ]
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)
    labels = torch.arange(8)
    return (
        nn.Sequential(*stem, *stages, *head),
        torch.randn(8, 3, 64, 64),
        lambda y: F.cross_entropy(y, labels),
    )


class Attention(nn.Module):
    """With scores, a mask that is a buffer, and dropout."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Dropout(0.1)
        self.register_buffer("mask", torch.tril(torch.ones(length, length)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        length = x.shape[1]
        scores = (q @ k.transpose(-2, -1)).masked_fill(self.mask[:length, :length] == 0, float("-inf"))
        return self.drop(self.out((self.drop(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2)))


class Experts(nn.Module):
    """The two best of four, and a loss that keeps them balanced."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        shares = self.gate(tokens).softmax(-1)
        best, chosen = shares.topk(2, -1)
        y = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == index)
            y.index_add_(0, rows, expert(tokens[rows]) * best[rows, places, None])
        return y.view_as(x), shares.mean(0).square().sum()


class Block(nn.Module):
    def __init__(self, width: int, length: int, *, routes: bool) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, length)
        self.norm2, self.routes = nn.LayerNorm(width), routes
        self.mlp = Experts(width) if routes else nn.Sequential(nn.Linear(width, 4 * width), nn.GELU())
        self.down = nn.Identity() if routes else nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Any:
        x = x + self.attention(self.norm1(x))
        if not self.routes:
            return x + self.down(self.mlp(self.norm2(x)))
        y, balance = self.mlp(self.norm2(x))
        return x + y, balance


class Decoder(nn.Module):
    """Tied weights; where blocks route, each gives the model a second output."""

    def __init__(self, *, routes: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(65, 48), nn.Embedding(64, 48)
        self.blocks = nn.ModuleList(Block(48, 64, routes=routes) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(48), nn.Linear(48, 65, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x, balance = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1])), torch.zeros(())
        for block in self.blocks:
            x = block(x)
            if isinstance(x, tuple):
                x, more = x
                balance = balance + more
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.01 * balance


def decoder(*, routes: bool) -> tuple[nn.Module, Any, Any]:
    tokens = torch.randint(0, 65, (8, 64))
    return Decoder(routes=routes), {"tokens": tokens, "targets": tokens}, lambda output: output[1]


class Gated(nn.Module):
    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.both = nn.Conv1d(16, 32, 2, dilation=dilation, padding=dilation)
        self.stay, self.leave = nn.Conv1d(16, 16, 1), nn.Conv1d(16, 16, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.both(x)[..., : x.shape[-1]].chunk(2, 1)
        h = a.tanh() * b.sigmoid()
        return x + self.stay(h), self.leave(h)


class WaveNet(nn.Module):
    """All blocks' second outputs are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(1, 16, 1), nn.Conv1d(16, 1, 1)
        self.blocks = nn.ModuleList(Gated(2**index) for index in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.first(x), torch.zeros(())
        for block in self.blocks:
            x, part = block(x)
            total = total + part
        return self.last(F.relu(total)).square().mean()


class Pair(nn.Module):
    """One encoder for two inputs, with a loss between them."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True))
        self.encoder = nn.Sequential(*layers, nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        one, other = F.normalize(self.encoder(first), dim=-1), F.normalize(self.encoder(second), dim=-1)
        return F.cross_entropy(one @ other.T, torch.arange(len(one)))


MODELS: dict[str, Callable[[], tuple[nn.Module, Any, Any]]] = {
    "ResNet of bottlenecks": resnet,
    "decoder with masks in buffers": lambda: decoder(routes=False),
    "decoder that routes to experts": lambda: decoder(routes=True),
    "WaveNet": lambda: (WaveNet(), torch.randn(4, 1, 512), None),
    "two inputs": lambda: (Pair(), (torch.randn(128, 64), torch.randn(128, 64)), None),
}


TOO_HIGH = {"two inputs": 0.05, "WaveNet": 0.06}
"""What is held for later units goes with their backwards, and is predicted to stay until their producer's."""


@pytest.mark.parametrize("name", slow_but(["two inputs"], MODELS))
def test_models_as_others_write_them(name: str) -> None:
    torch.manual_seed(0)
    model, sample, loss = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters())
    profile = recoup.measure(model, sample, loss=loss, optimizer=optimizer)
    low, high = recoup.minimum_budget(profile), profile.plain_bytes
    for share in (1.0, 0.8, 0.5, 0.01):
        budget = low + int(share * (high - low)) + 1
        fitted = recoup.fit(model, sample, budget=budget, loss=loss, optimizer=optimizer, race=share == 0.5)
        seen = fitted.verification
        assert seen is not None
        assert seen.gradients == "bit-equal"
        assert not seen.drifting
        ratio = seen.peak_bytes / fitted.plan.predicted_bytes
        assert 1 - TOO_HIGH.get(name, 0.01) <= ratio <= 1.01, share
