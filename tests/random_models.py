"""Models drawn at random: residual, convolutional, attention, gated, with skips, shared blocks and several inputs."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mlp(nn.Module):
    """Normalised, with an activation that may be in place, and perhaps a residual."""

    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        hidden = width * draw.choice([1, 2, 3])
        activation = draw.choice([nn.GELU(), nn.ReLU(inplace=True), nn.Tanh(), nn.SiLU()])
        self.body = nn.Sequential(
            draw.choice([nn.LayerNorm(width), nn.Identity()]),
            nn.Linear(width, hidden),
            activation,
            nn.Dropout(draw.choice([0.0, 0.2])),
            nn.Linear(hidden, width),
        )
        self.is_residual = draw.random() < 0.6

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        y = self.body(x)
        return x + y if self.is_residual else y


class Attention(nn.Module):
    """Attends to its input and, where it is given one, to a context."""

    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.cross = nn.Linear(width, width)
        self.is_fused = draw.random() < 0.5

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        if context is not None:
            k = k + self.cross(context)
        if self.is_fused:
            return x + self.out(F.scaled_dot_product_attention(q, k, v))
        return x + self.out((q @ k.transpose(-1, -2)).softmax(-1) @ v)


class Conv(nn.Module):
    """Convolutions over the tokens, with batch normalisation and activations in place."""

    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv1d(width, width, 3, padding=1), nn.BatchNorm1d(width)
        self.conv2, self.norm2 = nn.Conv1d(width, width, 3, padding=1, bias=False), nn.BatchNorm1d(width)
        self.is_residual = draw.random() < 0.6

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x.transpose(1, 2))), inplace=True)
        y = self.norm2(self.conv2(y)).transpose(1, 2)
        return F.relu(y + x if self.is_residual else y)


class Scale(nn.Module):
    """Counts its calls in a buffer, and adds one that it keeps up to date."""

    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean((0, 1)), 0.1)
            self.num_calls += 1
        return (x - self.mean) * self.gain


class Net(nn.Module):
    """A row of blocks; some run twice, some get the context, some outputs are added or concatenated again later."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        width = self.width = draw.choice([8, 12, 24])
        kinds = draw.sample([Mlp, Attention, Conv, Scale], draw.choice([1, 2, 3]))
        self.blocks = nn.ModuleList(draw.choice(kinds)(draw, width) for _ in range(draw.randint(3, 8)))
        self.order = [i for i in range(len(self.blocks)) for _ in range(2 if draw.random() < 0.15 else 1)]
        self.contexts = {i for i in range(len(self.order)) if draw.random() < 0.3}
        # From which position an output is added, or concatenated, before which.
        self.skips = {
            after: (draw.randrange(after), draw.random() < 0.5)
            for after in range(2, len(self.order))
            if draw.random() < 0.35
        }
        self.merge = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, draw.choice([1, 10, 200]))
        self.form = draw.choice(["loss", "tensor", "dict"])

    def forward(self, x: Tensor, context: Tensor | None = None) -> Any:
        outputs = []
        for position, index in enumerate(self.order):
            if position in self.skips:
                earlier, is_added = self.skips[position]
                x = x + outputs[earlier] if is_added else self.merge(torch.cat([x, outputs[earlier]], -1))
            given = context if position in self.contexts else None
            x = self.blocks[index](x) if given is None else self.blocks[index](x, context=given)
            outputs.append(x)
        logits = self.head(x)
        if self.form == "tensor":
            return logits
        loss = logits.square().mean()
        return loss if self.form == "loss" else {"loss": loss, "logits": logits}


def random_step(seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """A model, and how `fit` is to be called for it."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model = Net(draw)
    shape = (draw.choice([2, 5]), draw.choice([8, 17, 32]), model.width)
    sample: tuple[Tensor, ...] = (torch.randn(shape),)
    if draw.random() < 0.6:
        sample += (torch.randn(shape, requires_grad=False),)
    options: dict[str, Any] = {"sample": sample}
    if model.form == "tensor":
        options["loss"] = lambda output: output.square().mean()
    make = draw.choice(
        [
            None,
            lambda trained: torch.optim.SGD(trained, momentum=0.9),
            lambda trained: torch.optim.AdamW(trained),
            lambda trained: torch.optim.AdamW(trained, foreach=True),
        ]
    )
    if make is not None:
        options["optimizer"] = make(model.parameters())
    return model, options
