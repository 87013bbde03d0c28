"""Outputs that are read again further on: by code, by units, concatenated or added."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from made_up.parts import WIDTH, Gated, Mlp, Subject, images, in_turn, mlps, rows, subject

__all__ = ["SKIPS"]


class WeightedAll(nn.Module):
    """Every block is fed with a weighted sum of all outputs so far (DenseFormer)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = mlps(6)
        self.weights = nn.ParameterList(nn.Parameter(torch.rand(index + 1)) for index in range(6))

    def forward(self, x: Tensor) -> Tensor:
        outputs = [x]
        for block, weights in zip(self.blocks, self.weights, strict=True):
            mixed = sum((w * y for w, y in zip(weights, outputs, strict=True)), torch.zeros_like(x))
            outputs.append(block(mixed))
        return outputs[-1]


class ReadTwice(nn.Module):
    """One early output is added by two later units' callers, far apart."""

    def __init__(self, join: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks, self.join = mlps(9), join

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1:
                skip = x
            if index in (4, 7):
                x = self.join(x, skip)
        return x


class SkipArgument(nn.Module):
    """An early output is an argument of two later units."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = mlps(3), mlps(3), mlps(2)
        self.read1, self.read2 = Gated(), Gated()

    def forward(self, x: Tensor) -> Tensor:
        skip = in_turn(self.first, x)
        y = self.read1(in_turn(self.middle, skip), gate=skip)
        return self.read2(in_turn(self.last, y), gate=skip)


class AddingUNet(nn.Module):
    """Skips are added, not concatenated, innermost first."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.down, self.up = mlps(depth), mlps(depth)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
        for block in self.up:
            x = block(x + skips.pop())
        return x


class Nested(nn.Module):
    """A U-Net by recursion: a level holds the level below, and units are at different depths."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.first, self.down = Mlp(width), nn.Linear(width, 2 * width)
        self.below: nn.Module = Nested(2 * width, depth - 1) if depth > 1 else Mlp(2 * width)
        self.last = nn.Sequential(nn.Linear(3 * width, width), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(x)
        return self.last(torch.cat([skip, self.below(self.down(skip))], -1))


class ConvPair(nn.Module):
    """Two convolutions, with a normalisation or without, and activations in place or not."""

    def __init__(self, num_in: int, num_out: int, *, norm: bool, inplace: bool = False) -> None:
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv2d(num_in, num_out, 3, padding=1),
            nn.Conv2d(num_out, num_out, 3, padding=1),
        )
        self.norm1: nn.Module = nn.BatchNorm2d(num_out) if norm else nn.Identity()
        self.norm2: nn.Module = nn.BatchNorm2d(num_out) if norm else nn.Identity()
        self.act = nn.ReLU(inplace=inplace)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm2(self.conv2(self.act(self.norm1(self.conv1(x))))))


class ConvUNet(nn.Module):
    """A U-Net with concatenated skips; the way up is by transposed convolutions or by interpolation."""

    def __init__(
        self, depth: int, *, norm: bool, inplace: bool = False, learned: bool = False, width: int = 8
    ) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        make = {"norm": norm, "inplace": inplace}
        self.first = ConvPair(3, width, **make)
        self.down = nn.ModuleList(ConvPair(a, b, **make) for a, b in pairwise(widths))
        steps = [(a, b) for a, b in pairwise(widths)][::-1]
        self.ups = nn.ModuleList(
            nn.ConvTranspose2d(b, a, 2, 2)
            if learned
            else nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(b, a, 1))
            for a, b in steps
        )
        self.up = nn.ModuleList(ConvPair(2 * a, a, **make) for a, _ in steps)
        self.last = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.first(x)]
        for block in self.down:
            skips.append(block(F.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for grow, block in zip(self.ups, self.up, strict=True):
            x = block(torch.cat([skips.pop(), grow(x)], 1))
        return self.last(x)


class Pyramid(nn.Module):
    """A feature pyramid: every level's output is read again on the way back, and all are returned."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(4)]
        self.stem = ConvPair(3, width, norm=True)
        self.down = nn.ModuleList(ConvPair(a, b, norm=True) for a, b in pairwise(widths))
        self.lateral = nn.ModuleList(nn.Conv2d(w, width, 1) for w in widths)
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in widths)

    def forward(self, x: Tensor) -> list[Tensor]:
        features = [self.stem(x)]
        for block in self.down:
            features.append(block(F.max_pool2d(features[-1], 2)))
        levels = [lateral(f) for lateral, f in zip(self.lateral, features, strict=True)]
        for index in range(len(levels) - 2, -1, -1):
            levels[index] = levels[index] + F.interpolate(levels[index + 1], scale_factor=2)
        return [smooth(level) for smooth, level in zip(self.smooth, levels, strict=True)]


class DenseBlocks(nn.Module):
    """Each unit is fed with all outputs so far, concatenated by the model."""

    def __init__(self, num: int = 6, growth: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH + growth * index), nn.Linear(WIDTH + growth * index, growth), nn.GELU()
            )
            for index in range(num)
        )

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.layers:
            found.append(layer(torch.cat(found, -1)))
        return torch.cat(found, -1)


class DenseInside(nn.Module):
    """Each unit concatenates what it makes to its input."""

    def __init__(self, width: int, growth: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, growth), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], -1)


class MapsJoinedLate(nn.Module):
    """Code enlarges each unit's output and keeps it in a list; all are concatenated at the end."""

    def __init__(self, num: int = 5) -> None:
        super().__init__()
        self.blocks, self.head = mlps(num), nn.Linear(2 * WIDTH * num, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        maps = []
        for block in self.blocks:
            x = block(x)
            maps.append(x.tanh().repeat_interleave(2, -1))
        return self.head(torch.cat(maps, -1))


class CodeReadLate(nn.Module):
    """What code makes between units is read by code after the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = mlps(6)

    def forward(self, x: Tensor) -> Tensor:
        made = []
        for block in self.blocks:
            x = block(x)
            made.append(x.sigmoid())
        for part in made:
            x = x * part
        return x


class MeanOfAll(nn.Module):
    """The loss reads the mean of all blocks' outputs, stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = mlps(6, residual=True)

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        return torch.stack(outputs).mean(0)


class AllStates(nn.Module):
    """A recurrent cell whose states are all attended to at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.query, self.head = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[0])
        states = []
        for step in x:
            state = self.cell(step, state)
            states.append(state)
        stacked = torch.stack(states, 1)
        weights = (stacked @ self.query(state)[:, :, None]).softmax(1)
        return self.head((stacked * weights).sum(1))


SKIPS: dict[str, Callable[[int], Subject]] = {
    "weighted sum of all": subject(WeightedAll),
    "skip added twice": subject(lambda: ReadTwice(torch.add)),
    "skip multiplied twice": subject(lambda: ReadTwice(torch.mul)),
    "skip as argument of two units": subject(SkipArgument),
    "U-Net, added skips": subject(AddingUNet),
    "U-Net, nested": subject(Nested, lambda scale: rows(scale, 8, 4096)),
    "U-Net 3": subject(lambda: ConvUNet(3, norm=False), images),
    "U-Net 3, BatchNorm": subject(lambda: ConvUNet(3, norm=True), images),
    "U-Net 3, in place": subject(lambda: ConvUNet(3, norm=True, inplace=True), images),
    "U-Net 4": subject(lambda: ConvUNet(4, norm=False), images),
    "U-Net 4, BatchNorm": subject(lambda: ConvUNet(4, norm=True), images),
    "U-Net 4, learned up": subject(lambda: ConvUNet(4, norm=True, learned=True), images),
    "feature pyramid": subject(Pyramid, images),
    "dense connections": subject(DenseBlocks),
    "dense inside units": subject(
        lambda: nn.Sequential(*(DenseInside(WIDTH + 16 * index) for index in range(6)))
    ),
    "maps enlarged by code, joined late": subject(MapsJoinedLate),
    "code read late by code": subject(CodeReadLate),
    "mean of all outputs": subject(MeanOfAll),
    "recurrent, all states read": subject(AllStates, lambda scale: torch.randn(12, 128 * scale, WIDTH)),
}
