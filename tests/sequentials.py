"""Models whose layers stand in flat Sequentials."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def mlp(act: Callable[[], nn.Module] = nn.ReLU, num_layers: int = 8, width: int = 32) -> nn.Sequential:
    layers = [layer for _ in range(num_layers) for layer in (nn.Linear(width, width), act())]
    return nn.Sequential(*layers)


def features(*widths: int | str) -> nn.Sequential:
    """Convolutions with BatchNorm and activations in place; ``"pool"`` is a pooling."""
    layers: list[nn.Module] = []
    channels = 3
    for width in widths:
        if isinstance(width, str):
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            channels = width
    return nn.Sequential(*layers)


class VGG(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = features(8, 8, 8, 8, "pool", 12, 12, "pool", 16, 16, "pool")
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 20), nn.ReLU(True), nn.Dropout(), nn.Linear(20, 5)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


class Saving(nn.Module):
    """An activation that saves more than its input."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.sigmoid() * x.tanh()).sin()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(self.norm(x)))


def nested() -> nn.Sequential:
    """Two Sequentials that are not alike in a third."""
    return nn.Sequential(mlp(nn.GELU, 4), mlp(nn.Tanh, 5))


def blocks_and_leaves() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            first=nn.Linear(32, 48),
            act=nn.ReLU(inplace=True),
            drop=nn.Dropout(0.2),
            name=nn.Linear(48, 32),
            one=Block(32),
            two=Block(32),
            last=nn.Linear(32, 40),
            training_norm=nn.BatchNorm1d(40),
            end=nn.ReLU(inplace=True),
        )
    )


def shared_activation() -> nn.Sequential:
    act = nn.ReLU()
    return mlp(lambda: act)


ROWS = 96
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (mlp, (ROWS, 32)),
    "MLP, GELU": (lambda: mlp(nn.GELU), (ROWS, 32)),
    "VGG": (VGG, (6, 3, 16, 16)),
    "VGG, the root": (lambda: features(8, 8, 8, 8, "pool", 12, 12, "pool", 16), (6, 3, 16, 16)),
    "nested": (nested, (ROWS, 32)),
    "blocks and leaves": (blocks_and_leaves, (ROWS, 32)),
    "shared activation": (shared_activation, (ROWS, 32)),
}


def make(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(4)
    model, shape = MODELS[name]
    return model(), torch.randn(shape)


def loss(output: Any) -> Tensor:
    return output.square().mean()


class WithLoss(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return loss(self.body(x))
