"""A print of everything that can be reached from some objects, to be compared before and after."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

_VALUES = (int, float, str, bytes, type(None), torch.dtype, torch.Size)
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def print_of(*roots: Any) -> dict[str, Any]:
    """By path: values, which objects are the same, and how many hooks; and the state of the process."""
    return _Walk().of(roots) | {
        "torch": torch.get_rng_state().tolist(),
        "numpy": np.random.get_state()[1].tolist(),
        "python": random.getstate(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "grad mode": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
    }


def assert_as_before(now: dict[str, Any], then: dict[str, Any]) -> None:
    changed = [
        path for path in (now | then) if path not in now or path not in then or now[path] != then[path]
    ]
    assert not changed, changed[:5]


class _Walk:
    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.seen: dict[int, Any] = {}

    def of(self, roots: Any) -> dict[str, Any]:
        for index, root in enumerate(roots):
            self.visit(str(index), root)
        return self.found

    def visit(self, path: str, value: Any) -> None:
        if isinstance(value, _VALUES):
            self.found[path] = value
            return
        self.found[path] = (type(value).__name__, id(value))
        if id(value) in self.seen:
            return
        self.seen[id(value)] = value
        for key, item in self.parts(value):
            self.visit(f"{path}.{key}", item)

    def parts(self, value: Any) -> list[tuple[str, Any]]:
        match value:
            case Tensor():
                return self.tensor(value)
            case torch.Generator():
                return [("state", str(value.get_state().tolist()))]
            case np.ndarray():
                return [("values", str(value.tolist()))]
            case np.random.Generator():
                return [("state", str(value.bit_generator.state))]
            case random.Random():
                return [("state", str(value.getstate()))]
            case dict():
                return [("keys", str(list(value))), *((str(key), item) for key, item in value.items())]
            case list() | tuple() | deque():
                return [("length", len(value)), *((str(index), item) for index, item in enumerate(value))]
            case set():
                return [("items", str(sorted(value, key=str)))]
            case type() | torch.utils.hooks.RemovableHandle():
                return []
        slots = [name for name in getattr(type(value), "__slots__", ()) if hasattr(value, name)]
        return (
            [*vars(value).items()] if hasattr(value, "__dict__") else [(s, getattr(value, s)) for s in slots]
        )

    def tensor(self, value: Tensor) -> list[tuple[str, Any]]:
        is_strided = value.layout is torch.strided
        facts = [
            ("values", str((value if is_strided else value.to_dense()).detach().flatten().tolist())),
            ("place", value.data_ptr() if is_strided else 0),
            ("needs", value.requires_grad),
            *((name, len(getattr(value, name, None) or ())) for name in _HOOKS),
        ]
        return [*facts, ("grad", value.grad)] if value.is_leaf else facts
