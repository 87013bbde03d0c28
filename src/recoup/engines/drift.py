"""How far the results of two runs are apart, and runs whose results are as equal as torch can make them."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.utils.deterministic
from torch import Tensor

__all__ = ["Drift", "Results", "deterministically", "drift_between", "list_drifts", "too_far"]

T = TypeVar("T")
# The most by which rounding makes two gradients differ, in 16 bits and after many layers.
_TOLERANCE = 0.05
# The drift of plain steps is known from a few samples only.
_FACTOR = 10.0
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"

Results = dict[str, Tensor]
"""Tensors in host memory, by their names."""


class Drift(NamedTuple):
    """How far two results of the same name are apart.

    Attributes:
        name: of a parameter, whose gradients these are.
        relative_error: the norm of their difference, as a share of the norm of the first.
        cosine: of the angle between them.
    """

    name: str
    relative_error: float
    cosine: float

    @property
    def distance(self) -> str:
        """Both figures in words."""
        return f"relative error {self.relative_error:.2g}, cosine {self.cosine:.4f}"


def drift_between(first: Results, second: Results) -> list[Drift]:
    """How far the two are apart, wherever they are not equal to the last bit.

    Some gradients are zero but for rounding, such as that of a bias before a normalisation: their errors are shares of
    what rounding leaves of all gradients together.
    """
    found = []
    size = math.hypot(*(_numbers(tensor).nan_to_num().norm().item() for tensor in first.values()))
    for name in sorted(first.keys() | second.keys()):
        if name not in first or name not in second or first[name].shape != second[name].shape:
            found.append(Drift(name, math.inf, 0.0))
        elif not _are_same_bits(first[name], second[name]):
            found.append(_drift(name, first[name], second[name], size * _rounding(first[name].dtype)))
    return found


def _are_same_bits(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(
        left.flatten().view(torch.uint8), right.flatten().view(torch.uint8)
    )


def _rounding(dtype: torch.dtype) -> float:
    """What rounding leaves of something that would be zero, as a share of what it is computed from."""
    is_rounded = dtype.is_floating_point or dtype.is_complex
    return min(16 * torch.finfo(dtype).eps, 1e-3) if is_rounded else 0.0


def _numbers(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().flatten()


def _drift(name: str, left: Tensor, right: Tensor, least: float) -> Drift:
    """How far two tensors are apart, as a share of the first, or of ``least`` if it is smaller."""
    left, right = _numbers(left), _numbers(right)
    missing = left.isnan()
    if not torch.equal(missing, right.isnan()):
        return Drift(name, math.inf, 0.0)
    if missing.any():  # picking elements takes far longer than all else here
        left, right = left[~missing], right[~missing]
    size, other = left.norm().item(), right.norm().item()
    apart = (left - right).norm().item()
    cosine = torch.dot(left, right).item() / (size * other) if size and other else float(size == other)
    size = max(size, least)
    return Drift(name, apart / size if size else (math.inf if apart else 0.0), cosine)


def too_far(found: Iterable[Drift], own: Iterable[Drift] = ()) -> list[Drift]:
    """Those that neither rounding explains nor the ``own`` drift of plain runs."""
    usual: dict[str, float] = {}
    for drift in own:
        usual[drift.name] = max(drift.relative_error, usual.get(drift.name, 0.0))
    return [
        drift
        for drift in found
        # Negated, so that NaN is too far.
        if not drift.relative_error <= max(_TOLERANCE, _FACTOR * usual.get(drift.name, 0.0))
    ]


def list_drifts(found: list[Drift]) -> str:
    """The first few in words."""
    few = [f"{drift.name!r} ({drift.distance})" for drift in found[:5]]
    return ", ".join(few) + (f" and {len(found) - 5} more" if len(found) > 5 else "")


def deterministically(run: Callable[[], T]) -> T:
    """Runs with operations that give the same bits each time; where torch lacks one, as near to that as it can."""
    try:
        with _deterministic(warn_only=False):
            return run()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
    with _deterministic(warn_only=True):
        return run()


@contextmanager
def _deterministic(*, warn_only: bool) -> Iterator[None]:
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    settings: Any = torch.utils.deterministic
    fills, workspace = settings.fill_uninitialized_memory, os.environ.get(_CUBLAS)
    os.environ.setdefault(_CUBLAS, ":4096:8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        settings.fill_uninitialized_memory = False
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            settings.fill_uninitialized_memory = fills
            if workspace is None:
                del os.environ[_CUBLAS]
