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

__all__ = [
    "AFTER",
    "Drift",
    "Results",
    "beyond_rounding",
    "deterministically",
    "drift_between",
    "list_drifts",
    "sizes_of",
    "too_far",
]

T = TypeVar("T")
# The most by which rounding makes two gradients differ, in 16 bits and after many layers.
_TOLERANCE = 0.05
# The drift of plain steps is known from a few samples only.
_FACTOR = 10.0
# Elements that are compared at a time.
_PART = 2**20
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
# What rounding leaves in 16 bits, see `_rounding`.
_FEW_DIGITS = 1e-3
AFTER = " (after the step)"
"""Ends the name of a parameter, where results are parameters beside gradients."""

Results = dict[str, Tensor]
"""Tensors by their names."""
Sizes = tuple[float, float]
"""The norm of all gradients together, and that of all parameters after the step."""


class Drift(NamedTuple):
    """How far two results of the same name are apart.

    Attributes:
        name: of a parameter, whose gradients these are.
        relative_error: the norm of their difference, as a share of the norm of the first; of all, where both are zero
            but for rounding.
        cosine: of the angle between them.
    """

    name: str
    relative_error: float
    cosine: float

    @property
    def distance(self) -> str:
        """Both figures in words."""
        return f"relative error {self.relative_error:.2g}, cosine {self.cosine:.4f}"


def drift_between(first: Results, second: Results, *, sizes: Sizes | None = None) -> list[Drift]:
    """How far the two are apart, wherever they are not equal to the last bit.

    Some gradients are zero but for rounding, such as that of a bias before a normalisation: what rounding leaves of all
    gradients together is no less. Their errors are shares of all gradients.

    Args:
        first: some results.
        second: the same of another run.
        sizes: of all results, where these are a few of them.
    """
    names = first.keys() & second.keys()
    comparable = [name for name in names if _kind(first[name]) == _kind(second[name])]
    distances = {name: _compare(first[name], second[name]) for name in comparable}
    sizes = sizes or _sizes({name: one.first for name, one in distances.items()})
    found = {name: Drift(name, math.inf, 0.0) for name in (first.keys() | second.keys()) - distances.keys()}
    for name, one in distances.items():
        if not one.is_equal:
            found[name] = one.drift(name, sizes[name.endswith(AFTER)], _rounding(first[name].dtype))
    return [found[name] for name in sorted(found)]


def sizes_of(results: Results) -> Sizes:
    """The norms of some results."""
    norms = {}
    for name, tensor in results.items():
        parts = (part.double() for part in _parts(tensor, tensor.device))
        norms[name] = math.sqrt(sum(float(part.dot(part)) for part in parts))
    return _sizes(norms)


def _sizes(norms: dict[str, float]) -> Sizes:
    # One gradient that overflowed is no measure for the others.
    known = {name: norm for name, norm in norms.items() if math.isfinite(norm)}
    gradients = [norm for name, norm in known.items() if not name.endswith(AFTER)]
    return math.hypot(*gradients), math.hypot(*(norm for name, norm in known.items() if name.endswith(AFTER)))


def _kind(tensor: Tensor) -> tuple[torch.Size, bool]:
    return tensor.shape, tensor.is_complex()


class _Distance(NamedTuple):
    """Norms of two tensors and of their difference, and their dot product, without what is NaN in both.

    Attributes:
        has_other_nans: whether something is NaN in one of them only.
        is_equal: to the last bit.
    """

    first: float
    second: float
    apart: float
    dot: float
    has_other_nans: bool
    is_equal: bool

    def drift(self, name: str, all_size: float, rounding: float) -> Drift:
        """As a share of the first; if both are no larger than what rounding leaves of all, as a share of all."""
        if self.has_other_nans:
            return Drift(name, math.inf, 0.0)
        is_known = self.first and self.second
        cosine = self.dot / (self.first * self.second) if is_known else float(self.first == self.second)
        least = rounding * all_size
        # In 16 bits that is too much to be taken for nothing.
        is_zero = rounding < _FEW_DIGITS and max(self.first, self.second) <= least
        size = all_size if is_zero else max(self.first, least)
        return Drift(name, self.apart / size if size else (math.inf if self.apart else 0.0), cosine)


def _compare(left: Tensor, right: Tensor) -> _Distance:
    """Compares two tensors on the GPU if one of them is there, a part at a time: it may have little memory left."""
    device = next((one.device for one in (left, right) if one.is_cuda), torch.device("cpu"))
    is_equal, has_other_nans = left.dtype == right.dtype, False
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    for first, second in zip(_parts(left, device), _parts(right, device), strict=True):
        is_equal = is_equal and torch.equal(first.view(torch.uint8), second.view(torch.uint8))
        one, other = first.double(), second.double()
        missing = one.isnan()
        has_other_nans = has_other_nans or not torch.equal(missing, other.isnan())
        one, other = one.masked_fill_(missing, 0), other.masked_fill_(missing, 0)
        apart = one - other
        sums += torch.stack([one.dot(one), other.dot(other), apart.dot(apart), one.dot(other)])
    first_2, second_2, apart_2, dot = sums.tolist()
    norms = math.sqrt(first_2), math.sqrt(second_2), math.sqrt(apart_2)
    return _Distance(*norms, dot, has_other_nans, is_equal)


def _parts(tensor: Tensor, device: torch.device) -> Iterator[Tensor]:
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    plain = dense.resolve_conj().resolve_neg()
    real = torch.view_as_real(plain) if plain.is_complex() else plain
    return (part.to(device) for part in real.reshape(-1).split(_PART))


def _rounding(dtype: torch.dtype) -> float:
    """What rounding leaves of something that would be zero, as a share of what it is computed from."""
    is_rounded = dtype.is_floating_point or dtype.is_complex
    return min(16 * torch.finfo(dtype).eps, 1e-3) if is_rounded else 0.0


def too_far(found: Iterable[Drift], own: Iterable[Drift] = (), *, factor: float = _FACTOR) -> list[Drift]:
    """Those that neither rounding explains nor the ``own`` drift of plain runs, so many times larger."""
    usual: dict[str, float] = {}
    for drift in own:
        usual[drift.name] = max(drift.relative_error, usual.get(drift.name, 0.0))
    return [
        drift
        for drift in found
        # Negated, so that NaN is too far.
        if not drift.relative_error <= max(_TOLERANCE, factor * usual.get(drift.name, 0.0))
    ]


def beyond_rounding(found: Iterable[Drift], results: Results, autocast: str = "") -> list[Drift]:
    """Those that another order of sums does not explain: it leaves half of the digits of what is computed with.

    That is the results' dtype or, with fewer digits, the ``autocast`` dtype of the step.
    """
    least = torch.finfo(getattr(torch, autocast)).eps if autocast else 0.0
    return [
        drift
        for drift in found
        if drift.name not in results
        or not drift.relative_error
        <= min(_TOLERANCE, math.sqrt(max(torch.finfo(results[drift.name].dtype).eps, least)))
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
