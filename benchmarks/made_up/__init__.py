"""Models made up to be hard to predict: what lives between their units, and for how long, is unusual."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from models import MODELS

from made_up.outputs import OUTPUTS
from made_up.parts import Subject
from made_up.skips import SKIPS
from made_up.streams import STREAMS
from made_up.tables import TABLES
from made_up.without_gradient import WITHOUT_GRADIENT

__all__ = ["MADE_UP"]


def of_zoo(name: str) -> Callable[[int], Subject]:
    """A model of the other benchmarks, at the size of the device."""

    def make(scale: int) -> Subject:
        case = MODELS[name](scale > 1)
        return Subject(case.model, case.sample, case.loss)

    return make


def drawn(seed: int) -> Callable[[int], Subject]:
    """A model drawn at random, with a larger batch than the tests give it."""

    def make(scale: int) -> Subject:
        model, options = _random_models().random_step(seed)
        sample = tuple(part.repeat(32 * scale, 1, 1) for part in options["sample"])
        return Subject(model, sample, options.get("loss"))

    return make


def _random_models() -> Any:
    path = Path(__file__).parents[2] / "tests" / "random_models.py"
    spec = importlib.util.spec_from_file_location("random_models", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MADE_UP: dict[str, Callable[[int], Subject]] = {
    **WITHOUT_GRADIENT,
    **OUTPUTS,
    **STREAMS,
    **SKIPS,
    **TABLES,
    **{name: of_zoo(name) for name in MODELS if name != "ResNet, BatchNorm"},
    **{f"random {seed}": drawn(seed) for seed in range(1, 17)},
}
