"""A module of Lightning's to train, on one rank and on several."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import Tensor, nn


def block() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))


class Classifier(lightning.LightningModule):
    """Its step calls two networks, and not the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), *(block() for _ in range(4)))
        self.head = nn.Linear(32, 10)
        self.num_steps = 0

    def training_step(self, batch: Any) -> Tensor:
        inputs, targets = batch
        self.num_steps += 1
        loss = nn.functional.cross_entropy(self.head(self.body(inputs)), targets)
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"again": loss})
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())
