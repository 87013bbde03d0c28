"""Models of every kind whose units can be captured, and what steps of them may be compared by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import GPT, ResNet, plainly
from models import Block as Attending
from torch import Tensor, nn

import recoup
from recoup.plans.profile import Profile
from recoup.plans.tree import leaves_of


class Convolutions(nn.Module):
    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(given, made, 3, padding=1), nn.Conv2d(made, made, 3, padding=1)
        self.norm = nn.GroupNorm(2, made)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.second(F.silu(self.norm(self.first(x)))))


class Normalized(Convolutions):
    """With buffers, of which replays have copies."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__(given, made)
        self.norm, self.last = nn.BatchNorm2d(made), nn.BatchNorm2d(made)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.last(self.second(F.relu(self.norm(self.first(x))))))


class UNet(nn.Module):
    """With skips from the way down to the way up."""

    def __init__(self, block: type[Convolutions] = Convolutions) -> None:
        super().__init__()
        self.down = nn.ModuleList([block(2, 4), block(4, 8)])
        self.middle = block(8, 8)
        self.up = nn.ModuleList([block(16, 4), block(8, 2)])

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1))
        return x.square().mean()


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Attending(8, 2) for _ in range(2))
        self.decoder = nn.ModuleList(Attending(8, 2, cross=True) for _ in range(2))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        for block in self.encoder:
            source = block(source)
        for block in self.decoder:
            target = block(target, source)
        return target.square().mean()


class Experts(nn.Module):
    """Every expert sees every row, weighted: sizes do not depend on values."""

    def __init__(self, width: int = 8, num_experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        made = [torch.tanh(expert(x)) * weights[:, index, None] for index, expert in enumerate(self.experts)]
        return x + torch.stack(made).sum(0)


class Dense(nn.Module):
    """A mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def gpt2() -> tuple[nn.Module, Any]:
    pytest.importorskip("transformers")
    from everyday.subjects import gpt2

    tokens = torch.arange(64).view(4, 16)
    return gpt2(), {"input_ids": tokens, "labels": tokens}


def llama() -> tuple[nn.Module, Any]:
    pytest.importorskip("transformers")
    from everyday.subjects import llama

    tokens = torch.arange(64).view(4, 16)
    return llama(), {"input_ids": tokens, "labels": tokens}


def vit() -> tuple[nn.Module, Any]:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        num_hidden_layers=3,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
        num_labels=4,
    )
    model = transformers.ViTForImageClassification(config).train()
    return model, {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.arange(4)}


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "GPT": lambda: (GPT(plainly), GPT.sample()),
    "ResNet with BatchNorm": lambda: (ResNet(plainly), ResNet.sample()),
    "U-Net": lambda: (UNet(), (torch.randn(2, 2, 8, 8),)),
    "U-Net with BatchNorm": lambda: (UNet(Normalized), (torch.randn(2, 2, 8, 8),)),
    "encoder-decoder": lambda: (EncoderDecoder(), (torch.randn(2, 5, 8), torch.randn(2, 4, 8))),
    "mixture of experts": lambda: (Dense(), (torch.randn(20, 8),)),
    "GPT-2": gpt2,
    "Llama": llama,
    "ViT": vit,
}
SLACK = {"GPT": 512, "Llama": 512, "U-Net": 512}
"""A backward is taken to need the gradients of all parameters at once; the last ones come when room is free."""


def run(model: nn.Module, sample: Any) -> dict[str, Tensor | None]:
    """A step from the same random numbers and buffers: everything that could differ."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    output = model(**sample) if isinstance(sample, dict) else model(*sample)
    loss = output if isinstance(output, Tensor) else output.loss
    loss.backward()
    seen: dict[str, Tensor | None] = {"loss": loss.detach(), "random numbers": torch.get_rng_state()}
    seen |= {f"gradient {name}": parameter.grad for name, parameter in model.named_parameters()}
    seen |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    for buffer, before in buffers:
        buffer.copy_(before)
    model.zero_grad(set_to_none=True)
    return seen


def assert_equal(ours: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        found = ours[name]
        assert (found is None) == (value is None), name
        assert value is None or (found is not None and torch.equal(found, value)), name


def cuts_in(plan: Any) -> set[str]:
    recipes = [plan.recipe(leaf) for leaf in leaves_of(plan.items)]
    return {recipe.name for recipe in recipes if recipe.cut is not None}


def budgets(profile: Profile, number: int) -> list[int]:
    low, high = recoup.minimum_budget(profile), profile.plain_bytes
    return [low + (high - low) * index // (number - 1) for index in range(number)]
