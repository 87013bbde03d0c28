"""Small units of every kind that may be captured, each with arguments."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(4, 8, requires_grad=True),), {}


class FeedForward(nn.Module):
    """A block with its feed-forward inline: three operations whose results the backward reads."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))

    def given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(4, 8, requires_grad=True),), {}


class Block(FeedForward):
    """The same with dropout."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Normalized(Unit):
    """Its statistics change with each forward, by different amounts."""

    def __init__(self) -> None:
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm1d(8), nn.BatchNorm1d(8, momentum=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn2(self.b(F.relu(self.bn1(self.a(x)), inplace=True))) + x)


class Counting(Unit):
    """Reads a buffer before and after it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(self.a(x) + self.seen.view(1, 8))
        self.seen.add_(1)
        z = torch.sin(y + self.seen)
        self.seen.mul_(0.5)
        return self.b(z)


class Constant(Unit):
    """Its code makes a tensor of a number."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x) / torch.sqrt(torch.tensor(4.0))))


class InPlace(Unit):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y.mul_(2).add_(1)
        z = self.b(torch.tanh(y))
        z[:, :2] = 0.0
        return z.sin_()


class ViewOutput(Unit):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x)).view(2, 2, 8).transpose(0, 1)


class InputOutput(Unit):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x, torch.tanh(self.a(x)), x.view(2, 2, 8)


class SeveralOutputs(Unit):
    """The second is made of the first, and the third is a view of it."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(self.a(x))
        return y, self.b(y), y[:2]


class DictOutput(Unit):
    """Only ``y`` is read."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = torch.tanh(self.a(x))
        return {"y": self.b(y), "unused": torch.exp(y), "number": 3, "nothing": None}


class Parts(Unit):
    """Views of one result: two halves, two rows, and all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        p, q = self.norm(self.a(x)).chunk(2, -1)
        u, v = self.b(torch.cat([F.silu(p) * q, torch.tanh(q)], -1)).view(4, 2, 4).unbind(1)
        return torch.tanh(u) * v


class Keywords(Unit):
    def forward(self, x: Tensor, *, scale: Tensor, mask: Tensor | None = None, twice: bool = False) -> Tensor:
        y = self.a(x) * scale
        y = torch.where(mask, y, torch.zeros_like(y)) if mask is not None else y
        return torch.tanh(self.b(y)) * (2 if twice else 1)

    def given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, _ = super().given()
        return args, {
            "scale": torch.randn(8, requires_grad=True),
            "mask": torch.rand(4, 8) > 0.3,
            "twice": True,
        }


class Frozen(Unit):
    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(torch.tanh(self.a(torch.tanh(x)))))


class Shared(Unit):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(torch.tanh(self.a(x)))


class WithoutGradient(Unit):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.a(x))
        with torch.no_grad():
            z = torch.exp(y)
        return self.b(y * z), z


class Indexed(Unit):
    """Operations with several results, of which some are integers."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(9, 8)

    def forward(self, index: Tensor) -> Tensor:
        largest, _ = self.a(self.rows(index)).max(-1, keepdim=True)
        return F.max_pool1d(torch.tanh(self.b(self.rows(index) - largest))[None], 2)

    def given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.arange(4),), {}


PLAIN = (
    FeedForward,
    Normalized,
    Counting,
    Constant,
    InPlace,
    ViewOutput,
    InputOutput,
    SeveralOutputs,
    DictOutput,
    Parts,
    Keywords,
    Frozen,
    Shared,
    WithoutGradient,
    Indexed,
)


class TwoDropouts(Unit):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(torch.sin(F.dropout(self.a(x), 0.3)), 0.5)


class OwnCheckpoint(Unit):
    """Its code checkpoints a dropout, and marks it so in the graph."""

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self._dropped, x, use_reentrant=False)

    def _dropped(self, x: Tensor) -> Tensor:
        return torch.sin(F.dropout(self.b(F.gelu(self.a(x))), 0.3))


class RandnLike(Unit):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return torch.tanh(y * torch.randn_like(y)) * self.b(x)


class Rand(Unit):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x) + torch.rand(4, 8))
        return torch.tanh(self.b(y) * torch.empty_like(y).normal_())


class Bernoulli(Unit):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return torch.tanh(self.b(torch.tanh(y) * torch.bernoulli(torch.full_like(y, 0.5))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)
        return x + self.out(y.transpose(1, 2).flatten(2))

    def given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(2, 3, 8, requires_grad=True),), {}


class StochasticDepth(Unit):
    """Drops whole samples, as vision transformers do."""

    def forward(self, x: Tensor) -> Tensor:
        keep = x.new_empty(x.shape[0], 1).bernoulli_(0.5)
        return x + torch.tanh(self.b(torch.tanh(self.a(x)).mul(keep))).div(0.5)


class DropsAll(Unit):
    """Eager code draws nothing for the first dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.a(x)), 1.0) + F.dropout(self.b(x), 0.5)


RANDOM = (TwoDropouts, OwnCheckpoint, DropsAll, RandnLike, Rand, Bernoulli, Attention, StochasticDepth)
