"""Residuals, parallel branches, shared modules and several streams."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from models import GPT, Experts
from torch import Tensor, nn

from made_up.parts import WIDTH, Mlp, Subject, as_tuple, in_turn, mlps, rows, subject, tokens

__all__ = ["STREAMS"]


class TwoStreams(nn.Module):
    """A unit of two streams, each added to from the other (a reversible block's arithmetic)."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = Mlp(), Mlp()

    def forward(self, streams: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        a, b = streams
        a = a + self.f(b)
        return a, b + self.g(a)


class Streams(nn.Module):
    """Two streams that are passed on as a tuple, or separately."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TwoStreams() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        a, b = in_turn(self.blocks, (x, x.flip(-1)))
        return a + b


class OneOfTwo(nn.Module):
    """Changes one stream of two, and hands the other through."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.body, self.index = Mlp(), index

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return (a + self.body(b), b) if self.index % 2 == 0 else (a, b + self.body(a))


class PassedThrough(nn.Module):
    """Units that return one of their arguments as it came."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OneOfTwo(index) for index in range(8))

    def forward(self, x: Tensor) -> Tensor:
        a, b = x, x.flip(-1)
        for block in self.blocks:
            a, b = block(a, b)
        return a * b


class Inline(nn.Module):
    """The residuals are the model's own code; its units are the branches."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = mlps(7)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Parallel(nn.Module):
    """Attention and MLP side by side from one normalised input, as in GPT-J."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.other = nn.LayerNorm(WIDTH), Mlp(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.mlp(y) + self.other(y)


class Branches(nn.Module):
    """Branches from one input that are summed at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(*mlps(3)) for _ in range(4))
        self.head = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(sum((branch(x) for branch in self.branches), x))


class Shared(nn.Module):
    """One module called several times (ALBERT); with an own head."""

    def __init__(self, num_calls: int = 6) -> None:
        super().__init__()
        self.block, self.head, self.num_calls = Mlp(residual=True), Mlp(), num_calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_calls):
            x = self.block(x)
        return self.head(x)


class Siamese(nn.Module):
    """One tower for two inputs, compared at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = mlps(4, residual=True)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = in_turn(self.tower, a), in_turn(self.tower, b)
        return F.cosine_similarity(a, b, -1).mean()


class TwoTowers(nn.Module):
    """Two inputs of different size, two towers, joined late."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = mlps(4, residual=True), mlps(3, 2 * WIDTH, residual=True)
        self.join, self.head = nn.Linear(3 * WIDTH, WIDTH), mlps(2, residual=True)

    def forward(self, *, left: Tensor, right: Tensor) -> Tensor:
        joined = torch.cat([in_turn(self.left, left), in_turn(self.right, right)], -1)
        return in_turn(self.head, self.join(joined)).square().mean()


class InPlace(nn.Module):
    """Activations in place, also on a unit's own output and on its argument."""

    def __init__(self, *, residual: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(inplace=True), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(6)
        )
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = F.relu_(block(x))
            x = x + y if self.residual else y
        return x


class Dropouts(nn.Module):
    """Dropout between units, whose masks are saved and whose arguments are not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.dropout = mlps(6), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.dropout(block(x))
        return x


class RoutedExperts(nn.Module):
    """Mixtures of experts, with the routers' logits collected for a loss of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.routers = (
            nn.ModuleList(Experts(WIDTH, 4) for _ in range(4)),
            nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(4)),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits = []
        for layer, router in zip(self.layers, self.routers, strict=True):
            logits.append(router(x))
            x = layer(x)
        return x.square().mean() + torch.stack(logits).logsumexp(-1).square().mean()


class FanOut(nn.Module):
    """One output feeds four units, whose outputs meet in a product."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.arms, self.last = mlps(3), mlps(4), mlps(2, residual=True)

    def forward(self, x: Tensor) -> Tensor:
        x = in_turn(self.trunk, x)
        first, second, third, fourth = (arm(x) for arm in self.arms)
        return in_turn(self.last, first * second + third * fourth)


class Hourglass(nn.Module):
    """Units of very different sizes, wide at both ends."""

    def __init__(self) -> None:
        super().__init__()
        widths = (128, 64, 32, 8, 32, 64, 128)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(a), nn.Linear(a, b), nn.GELU()) for a, b in pairwise(widths)
        )

    def forward(self, x: Tensor) -> Tensor:
        return in_turn(self.layers, x)


class Square(torch.autograd.Function):
    """A square with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradients[0]


class OwnFunction(nn.Module):
    """Units and code that run a function with a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = mlps(5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + Square.apply(block(x)).tanh()  # type: ignore[no-untyped-call]
        return x


class Autocast(nn.Module):
    """A GPT whose forward runs in bfloat16 by autocast, with float32 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = GPT(64, 4, 300, 64, dropout=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            return self.body(tokens)


def whole_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


STREAMS: dict[str, Callable[[int], Subject]] = {
    "two streams in a tuple": subject(Streams),
    "arguments passed through": subject(PassedThrough),
    "residual as code": subject(Inline),
    "residual inside units": subject(lambda: nn.Sequential(*mlps(7, residual=True))),
    "parallel attention and MLP": subject(lambda: nn.Sequential(*(Parallel() for _ in range(5)))),
    "parallel branches summed": subject(Branches),
    "one block six times": subject(Shared),
    "siamese": subject(Siamese, lambda scale: as_tuple(rows(scale), rows(scale)), loss=None),
    "two towers": subject(
        TwoTowers, lambda scale: {"left": rows(scale), "right": rows(scale, 2 * WIDTH)}, loss=None
    ),
    "ReLU in place": subject(lambda: InPlace(residual=False)),
    "ReLU in place, residual": subject(lambda: InPlace(residual=True)),
    "gradients accumulated": subject(lambda: nn.Sequential(*mlps(6)), accumulates=True),
    "gradients accumulated, shared": subject(Shared, accumulates=True),
    "autocast": subject(Autocast, lambda scale: torch.randint(300, (8 * scale, 64)), loss=None),
    "dropout between units": subject(Dropouts),
    "experts with router losses": subject(RoutedExperts, tokens, loss=None),
    "one output for four units": subject(FanOut),
    "hourglass": subject(Hourglass, lambda scale: rows(scale, 128)),
    "functions with own backwards": subject(OwnFunction),
    "encoder of torch": subject(whole_encoder, tokens),
    "bfloat16": subject(
        lambda: nn.Sequential(*mlps(6, residual=True)).bfloat16(), lambda scale: rows(scale).bfloat16()
    ),
}
