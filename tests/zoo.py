"""The models of the benchmarks: ``zoo.MODELS["GPT"](False)`` in its small size, with ``True`` in its large one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

_PATH = Path(__file__).parent.parent / "benchmarks" / "models.py"
# Not as "models": that is the tests' own.
_spec = importlib.util.spec_from_file_location("zoo_models", _PATH)
assert _spec is not None
assert _spec.loader is not None
_models = importlib.util.module_from_spec(_spec)
sys.modules["zoo_models"] = _models
_spec.loader.exec_module(_models)

MODELS: dict[str, Any] = _models.MODELS
Llama: Any = _models.Llama
DoubleConv: Any = _models.DoubleConv
mean_square: Any = _models.mean_square
