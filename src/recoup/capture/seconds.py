"""Measured seconds of single operations, by operation and shapes."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from recoup.devices.meter import Meter
from recoup.tensors import tensors_in

__all__ = ["OperationSeconds"]

_REPEATS = 3


class OperationSeconds:
    """Times operations on values of their own, each combination of operation and shapes once.

    Values are random, since kernels take less time for zeros. What cannot run by itself is priced as a copy of its
    result.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._known: dict[str, float] = {}

    def __call__(self, node: Node) -> float:
        """Seconds of a node's operation."""
        key = f"{node.target} {map_arg((node.args, node.kwargs), _described)}"
        if key not in self._known:
            self._known[key] = self._time(node)
        return self._known[key]

    def _time(self, node: Node) -> float:
        try:
            if node.target is operator.getitem:  # a dropout's result, made from its mask
                raise TypeError
            args, kwargs = map_arg((node.args, node.kwargs), lambda read: _made(read.meta.get("val")))

            def run() -> None:
                node.target(*args, **kwargs)  # type: ignore[operator]

            with torch.no_grad():
                run()
                return self._fastest(run)
        except Exception:  # operations of the compiler's own, and such as look at values
            results = [_made(value) for value in tensors_in(node.meta.get("val"))]
            return self._fastest(lambda: [result.clone() for result in results])

    def _fastest(self, run: Any) -> float:
        return min(self._meter.time(lambda: [run])[0].device_s for _ in range(_REPEATS))


def _described(node: Node) -> Any:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return f"{value.dtype}{list(value.shape)}{list(value.stride())}{value.device}"
    return str(value)


def _made(value: Any) -> Any:
    """A tensor with the shape, strides, type and device of a fake one."""
    if isinstance(value, (tuple, list)):
        return [_made(one) for one in value]
    if not isinstance(value, Tensor):
        return value
    made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
    return made.normal_() if made.is_floating_point() else made.zero_()
