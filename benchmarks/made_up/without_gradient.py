"""Parts of a step that get no gradient: frozen, detached, under no_grad, or used by nobody."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from made_up.parts import WIDTH, Gated, Mlp, Subject, in_turn, mlps, subject

__all__ = ["WITHOUT_GRADIENT"]


class FrozenBranch(nn.Module):
    """A frozen branch is run first; what it makes is used after the trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained, self.head = mlps(4), mlps(5, residual=True), Mlp(2 * WIDTH)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = in_turn(self.frozen, x)
        return self.head(torch.cat([in_turn(self.trained, x), y], -1))


class FrozenMiddle(nn.Module):
    """Frozen blocks between trained ones, as in adapters: gradients pass through them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = mlps(8, residual=True)
        for index, block in enumerate(self.blocks):
            block.requires_grad_(index % 2 == 0)

    def forward(self, x: Tensor) -> Tensor:
        return in_turn(self.blocks, x)


class FrozenStart(nn.Module):
    """The first half is frozen, as in fine-tuning: no gradient reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = mlps(8, residual=True)
        self.blocks[:4].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return in_turn(self.blocks, x)


class Detached(nn.Module):
    """Two branches; one is fed with what the other makes, without its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlps(4, residual=True), mlps(4, residual=True)

    def forward(self, x: Tensor) -> list[Tensor]:
        y = in_turn(self.first, x)
        return [y, in_turn(self.second, y.detach())]


class Teacher(nn.Module):
    """Self-distillation: a teacher runs under no_grad first, and the loss reads what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = mlps(6, residual=True), mlps(6, residual=True)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = in_turn(self.teacher, x)
        return F.mse_loss(in_turn(self.student, x), target)


class Modulated(nn.Module):
    """What a part makes under no_grad is read by every later unit."""

    def __init__(self) -> None:
        super().__init__()
        self.condition, self.blocks = mlps(2), nn.ModuleList(Gated() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = in_turn(self.condition, x).sigmoid()
        for block in self.blocks:
            x = block(x, gate=gate)
        return x


class FixedPoint(nn.Module):
    """Iterates a cell under no_grad, and twice with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.cell, self.head = Mlp(), Mlp(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        start = self.start(x)
        y = start
        with torch.no_grad():
            for _ in range(4):
                y = self.cell(y) + start
        for _ in range(2):
            y = self.cell(y) + start
        return self.head(y)


class DeadBranch(nn.Module):
    """A unit runs with a gradient, and nobody uses what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.dead = mlps(6, residual=True), mlps(6)

    def forward(self, x: Tensor) -> Tensor:
        for block, dead in zip(self.blocks, self.dead, strict=True):
            dead(x)
            x = block(x)
        return x


class Gathered(nn.Module):
    """Rows are picked, worked on and put back: masked autoencoders do so."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlps(4, residual=True), mlps(3, residual=True)
        self.missing = nn.Parameter(torch.zeros(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        picked = torch.arange(0, len(x), 3, device=x.device)
        seen = in_turn(self.encoder, x[picked])
        full = self.missing.expand(len(x), -1).index_copy(0, picked, seen)
        return F.mse_loss(in_turn(self.decoder, full), x)


WITHOUT_GRADIENT: dict[str, Callable[[int], Subject]] = {
    "frozen branch, used late": subject(FrozenBranch),
    "frozen middle": subject(FrozenMiddle),
    "frozen start": subject(FrozenStart),
    "detached branch": subject(Detached),
    "teacher under no_grad": subject(Teacher, loss=None),
    "gate under no_grad": subject(Modulated),
    "fixed point, partly no_grad": subject(FixedPoint),
    "dead branches": subject(DeadBranch),
    "rows picked and put back": subject(Gathered, loss=None),
}
