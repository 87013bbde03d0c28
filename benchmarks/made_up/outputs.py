"""Units and models that return several tensors: unused, read late, held by the caller, or views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from models import Block
from torch import Tensor, nn

from made_up.parts import WIDTH, Subject, in_turn, mean_square, mlps, subject, tokens

__all__ = ["OUTPUTS"]


class Several(nn.Module):
    """Returns its output beside parts that nobody uses, as a tuple, a list or a dict."""

    def __init__(self, form: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )
        self.form = form

    def forward(self, x: Tensor) -> Any:
        hidden = self.up(self.norm(x))
        active = F.gelu(hidden)
        return self.form(x + self.down(active), active.softmax(-1), hidden)


class Unused(nn.Module):
    """Of the three tensors that each unit returns, one is used."""

    def __init__(self, form: Callable[[Tensor, Tensor, Tensor], Any], first: Any) -> None:
        super().__init__()
        self.blocks, self.first = nn.ModuleList(Several(form) for _ in range(6)), first

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)[self.first]
        return x


class UsedLate(nn.Module):
    """The second tensor that each unit returns is used after the last unit."""

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Several(lambda a, b, c: {"x": a, "weights": b}) for _ in range(6))
        self.every = every

    def forward(self, x: Tensor) -> Tensor:
        weights = []
        for index, block in enumerate(self.blocks):
            found = block(x)
            x = found["x"]
            if index % self.every == 0:
                weights.append(found["weights"])
        return x.square().mean() + torch.stack([w.square().mean() for w in weights]).sum()


class AllHidden(nn.Module):
    """Returns every block's output, as output_hidden_states does; the loss reads the last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = mlps(7, residual=True)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = [x]
        for block in self.blocks:
            hidden.append(block(hidden[-1]))
        return {"loss": hidden[-1].square().mean(), "hidden": tuple(hidden)}


class AuxiliaryLoss(nn.Module):
    """A second head in the middle, whose loss is added."""

    def __init__(self, *, in_model: bool) -> None:
        super().__init__()
        self.blocks, self.middle, self.last = (
            mlps(8, residual=True),
            nn.Linear(WIDTH, 200),
            nn.Linear(WIDTH, 200),
        )
        self.in_model = in_model

    def forward(self, x: Tensor) -> Any:
        x = in_turn(self.blocks[:4], x)
        early = self.middle(x)
        late = self.last(in_turn(self.blocks[4:], x))
        return mean_square([early, late]) if self.in_model else {"early": early, "late": late}


class ManyHeads(nn.Module):
    """Heads of different sizes on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = mlps(5, residual=True)
        self.heads = nn.ModuleDict({f"out{size}": nn.Linear(WIDTH, size) for size in (4, 64, 300)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = in_turn(self.trunk, x)
        return {name: head(x) for name, head in self.heads.items()}


class Variational(nn.Module):
    """Mean and variance are read by the sampling and again by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlps(3, residual=True), mlps(3, residual=True)
        self.moments = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mean, log_variance = self.moments(in_turn(self.encoder, x)).chunk(2, -1)
        drawn = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        made = in_turn(self.decoder, drawn)
        divergence = (mean.square() + log_variance.exp() - log_variance).mean()
        return {"loss": F.mse_loss(made, x) + divergence, "made": made}


class WideHead(nn.Module):
    """A trunk, and logits that are larger than everything else."""

    def __init__(self, num_words: int = 400) -> None:
        super().__init__()
        self.trunk, self.head = mlps(5, residual=True), nn.Linear(WIDTH, num_words)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.head(in_turn(self.trunk, x))
        targets = torch.zeros(logits.shape[:-1], dtype=torch.long, device=x.device)
        return {"loss": F.cross_entropy(logits.flatten(0, -2), targets.flatten()), "logits": logits}


class LastOnly(nn.Module):
    """The head is given one token of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(64, 2) for _ in range(4)), nn.Linear(64, 100)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(in_turn(self.blocks, x)[:, -1])


class Chunks(nn.Module):
    """What a unit returns is split, and its parts go different ways: some are views that are read late."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(4))
        self.blocks, self.heads = mlps(4), mlps(4)

    def forward(self, x: Tensor) -> Tensor:
        late = []
        for wide, block in zip(self.wide, self.blocks, strict=True):
            now, later = wide(x).chunk(2, -1)
            late.append(later)
            x = block(now)
        for head, later in zip(self.heads, reversed(late), strict=True):
            x = head(x * later)
        return x


class Splitter(nn.Module):
    """A unit that returns views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.wide(x).split(WIDTH, -1)


class ViewsOut(nn.Module):
    """Units that return views of one tensor, of which one is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.splits, self.blocks = nn.ModuleList(Splitter() for _ in range(5)), mlps(5)

    def forward(self, x: Tensor) -> Tensor:
        for split, block in zip(self.splits, self.blocks, strict=True):
            a, b, _ = split(x)
            x = block(a) + b
        return x


class Transposed(nn.Module):
    """Units that return views of what they were given: mixing over tokens, then over channels."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.tokens, self.channels = nn.ModuleList(mlps(4, length)), nn.ModuleList(mlps(4))

    def forward(self, x: Tensor) -> Tensor:
        for mixing, channels in zip(self.tokens, self.channels, strict=True):
            x = x + mixing(x.transpose(1, 2)).transpose(1, 2)
            x = x + channels(x)
        return x


OUTPUTS: dict[str, Callable[[int], Subject]] = {
    "unused outputs, tuple": subject(lambda: Unused(lambda *parts: parts, 0)),
    "unused outputs, list": subject(lambda: Unused(lambda *parts: list(parts), 0)),
    "unused outputs, dict": subject(lambda: Unused(lambda a, b, c: {"a": a, "b": b, "c": c}, "a")),
    "second output used late": subject(UsedLate, loss=None),
    "every third second output used late": subject(lambda: UsedLate(3), loss=None),
    "all hidden states returned": subject(AllHidden, loss=None),
    "all hidden states returned, let go": subject(AllHidden, loss=None, holds_output=False),
    "chunks, one read late": subject(Chunks),
    "views as outputs": subject(ViewsOut),
    "transposed views": subject(lambda: Transposed(48), tokens),
    "auxiliary loss in the model": subject(lambda: AuxiliaryLoss(in_model=True), loss=None),
    "auxiliary loss of the output": subject(lambda: AuxiliaryLoss(in_model=False)),
    "heads of three sizes": subject(ManyHeads),
    "variational autoencoder": subject(Variational, loss=None),
    "large output, held": subject(WideHead, loss=None),
    "large output, let go": subject(WideHead, loss=None, holds_output=False),
    "last token only": subject(LastOnly, lambda scale: tokens(scale, 64)),
}
