"""Comparing gradients of two runs without holding either: a digest of their bits, and their size."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.utils.deterministic
from torch import Tensor

from recoup.checkpointing.digest import digest

__all__ = ["Fingerprint", "Prints", "deterministically", "differing_bits", "differing_size", "fingerprint"]

T = TypeVar("T")
# How far apart the norms of two gradients may lie that differ by rounding, in 16 bits and after many layers.
_TOLERANCE = 0.05
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


class Fingerprint(NamedTuple):
    """What is left of a tensor: a digest of its bits (``None`` where it has none) and its norm."""

    bits: Tensor | None
    norm: Tensor


Prints = dict[str, Fingerprint]


def fingerprint(tensor: Tensor) -> Fingerprint:
    """Takes a tensor's fingerprint, where it lives."""
    with torch.no_grad():
        dense = tensor.coalesce().values() if tensor.is_sparse else tensor
        norm = torch.linalg.vector_norm(dense, dtype=None if dense.is_complex() else torch.float32)
    return Fingerprint(digest(dense), norm)


def differing_bits(first: Prints, second: Prints) -> list[str]:
    """Names under which the two have different bits, or only one has anything."""
    return [
        name
        for name in sorted(first.keys() | second.keys())
        if not _same_bits(first.get(name), second.get(name))
    ]


def _same_bits(first: Fingerprint | None, second: Fingerprint | None) -> bool:
    if first is None or second is None or first.bits is None or second.bits is None:
        return first is second or (first is not None and second is not None and first.bits is second.bits)
    return torch.equal(first.bits, second.bits)


def differing_size(first: Prints, second: Prints) -> list[str]:
    """Names under which the two differ by more than rounding can explain."""
    names = sorted(first.keys() | second.keys())
    return [name for name in names if not _similar(first.get(name), second.get(name))]


def _similar(first: Fingerprint | None, second: Fingerprint | None) -> bool:
    if first is None or second is None:
        return first is second
    return bool(
        torch.isclose(first.norm.abs(), second.norm.abs(), rtol=_TOLERANCE, atol=1e-12, equal_nan=True)
    )


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
