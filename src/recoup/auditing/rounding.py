"""Whether two runs of a unit differ by rounding only, as sums do whose order the device does not fix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from recoup.checkpointing.comparison import is_close
from recoup.model.preserve import preserving
from recoup.model.streaming import UnitCall
from recoup.tensors import tensors_in

__all__ = ["differs_by_rounding"]


def differs_by_rounding(call: UnitCall) -> bool:
    """Runs a call twice from the same random state and compares all that it saves and returns.

    The first run's results are held in host memory. Where a run fails, for lack of memory say, the answer is no.
    """
    held: list[Tensor] = []
    are_close: list[bool] = []

    def compare(tensor: Tensor) -> None:
        position = len(are_close)
        then = held[position].to(tensor.device) if position < len(held) else None
        are_close.append(then is not None and is_close(then, tensor))

    try:
        with preserving(call.module):
            _run(call, lambda tensor: held.append(tensor.to("cpu", copy=True)))
        _run(call, compare)
    except Exception:
        return False
    return len(are_close) == len(held) and all(are_close)


def _run(call: UnitCall, see: Callable[[Tensor], None]) -> None:
    def note(tensor: Tensor) -> None:
        if not (tensor.is_leaf and tensor.requires_grad):
            see(tensor.detach())

    output = replace(call.again(), holds=True).glance(note)
    for tensor in tensors_in(output):
        see(tensor.detach())
