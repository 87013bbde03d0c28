"""Blocks with parametrizations, each of which has classes of its own: captured without too many compilations of one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engines.captured_models import assert_equal, run
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import recoup

pytestmark = [
    # The compiler looks at the gradients of what it is given.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf.*:UserWarning"),
    # Its code generator imports what torch itself calls deprecated.
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method.:DeprecationWarning"),
]

NUM_BLOCKS = 10  # torch compiles one function eight times


class Parametrized(nn.Module):
    def __init__(self, parametrize: Callable[[nn.Module], nn.Module], width: int = 8) -> None:
        super().__init__()
        self.up, self.down = (
            parametrize(nn.Linear(width, 2 * width)),
            parametrize(nn.Linear(2 * width, width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Blocks(nn.Module):
    def __init__(self, parametrize: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Parametrized(parametrize) for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """What the compiler logs as a warning."""
    found: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler, logger = Kept(logging.WARNING), logging.getLogger("torch._dynamo")
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch._dynamo.")]
    loggers = [logger, *map(logging.getLogger, names), logging.getLogger("torch._dynamo.convert_frame")]
    for one in set(loggers):
        one.addHandler(handler)
    yield found
    for one in set(loggers):
        one.removeHandler(handler)


@pytest.mark.parametrize(
    ("engine", "parametrize"),
    [
        ("captured", parametrizations.weight_norm),
        ("captured", parametrizations.spectral_norm),
        pytest.param("captured", parametrizations.orthogonal, marks=pytest.mark.slow),
        pytest.param("compiled", parametrizations.weight_norm, marks=pytest.mark.slow),
    ],
)
def test_no_function_is_compiled_too_often(engine: str, parametrize: Any, warned: list[str]) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model, x = Blocks(parametrize), torch.randn(64, 8)
    expected = run(model, (x,))
    profile = recoup.measure(model, x, engine=engine)
    assert profile.is_captured
    recoup.apply(model, recoup.plan(profile, profile.plain_bytes))  # all blocks under one cut
    ours = run(model, (x,))
    if engine == "captured":
        assert_equal(ours, expected)
    assert warned == []
