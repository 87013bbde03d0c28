"""A folder with factories in it, in which the command line runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FACTORIES = """
import warnings

import torch
from torch import nn

import recoup.errors

def block():
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

def model():
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(4)))

def loss(output):
    return output.square().mean()

def make():
    return model(), torch.ones(64, 32), loss

def with_optimizer():
    made = model()
    return made, torch.ones(64, 32), loss, torch.optim.AdamW(made.parameters())

def by_name():
    return {"model": model(), "sample": torch.ones(64, 32), "loss": loss}

def by_name_with_optimizer():
    return dict(zip(("model", "sample", "loss", "optimizer"), with_optimizer()))

class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = model()

    def forward(self, x):
        return loss(self.blocks(x))

def pair():
    return WithLoss(), torch.ones(64, 32)

def loader_batch():
    return model(), (torch.ones(64, 32), torch.zeros(64, 32)), nn.MSELoss()

def several_optimizers():
    made = model()
    halves = [torch.optim.AdamW(part.parameters()) for part in (made[:2], made[2:])]
    return made, torch.ones(64, 32), loss, halves

def with_step():
    made = model()
    return {"model": made, "step": lambda: loss(made(torch.ones(64, 32))).backward()}

def sized(batch):
    return model(), torch.ones(batch, 32), loss

def sized_by_default(batch=64):
    return sized(batch)

def sized_with_optimizer(batch=64):
    made = model()
    return made, torch.ones(batch, 32), loss, torch.optim.AdamW(made.parameters())

def sized_by_name(batch=64):
    return dict(zip(("model", "sample", "loss", "optimizer"), sized_with_optimizer(batch)))

def sized_pair(batch):
    return WithLoss(), torch.ones(batch, 32)

def not_sized(batch=64):
    return make()

def at_most_four(batch=4):
    return sized(min(batch, 4))

def in_place():
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(inplace=True), nn.Linear(32, 1)), torch.ones(4, 32), torch.sum

class Models:
    @staticmethod
    def make():
        return make()

def only_a_model():
    return model()

def five():
    return 1, 2, 3, 4, 5

def no_model():
    return "GPT", torch.ones(3)

def odd_names():
    return {"net": model(), "sample": torch.ones(64, 32)}

def optimizer_as_loss():
    made = model()
    return made, torch.ones(64, 32), torch.optim.SGD(made.parameters(), lr=0.1)

def loss_as_optimizer():
    return model(), torch.ones(64, 32), None, loss

def wrong_sample():
    return model(), torch.ones(64, 7), loss

def no_scalar():
    return model(), torch.ones(64, 32)

def raises():
    raise OSError("no such weights:\\n  weights.pt")

def needs_values():
    sample = torch.rand(64, 32)
    return model(), sample / sample.max().item(), loss

class Failing(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.layer, self.error = nn.Linear(32, 1), error

    def forward(self, x):
        raise self.error

def out_of_memory():
    return Failing(torch.OutOfMemoryError("Tried to allocate\\n 20 GiB.")), torch.ones(64, 32)

def interrupted():
    return Failing(KeyboardInterrupt()), torch.ones(64, 32)

class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        raise RuntimeError("a bug in a backward")

class WrongBackward(WithLoss):
    def forward(self, x):
        return Wrong.apply(super().forward(x))

def wrong_backward():
    return WrongBackward(), torch.ones(64, 32)

def warned():
    warnings.warn("Mind\\n  the gap.", recoup.errors.RecoupWarning)
    return make()

ready = model()
number = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "factories.py").write_text(FACTORIES)
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit('not as a module')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    yield tmp_path
    for name in {"factories", "broken", "leaving"} & set(sys.modules) - known:
        del sys.modules[name]
