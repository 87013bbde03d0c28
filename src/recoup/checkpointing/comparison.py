"""Comparing what a replay saves and returns with what its forward saved and returned."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from recoup.checkpointing import mismatch
from recoup.checkpointing.digest import Digest, are_same, digest, digest_of_saved, fetched, has_bits, is_same
from recoup.checkpointing.mismatch import Record, kind_of
from recoup.checkpointing.sampling import never_again
from recoup.errors import RecoupWarning
from recoup.tensors import plain_tensors
from recoup.torch_private import WithoutDispatch

__all__ = ["Compare", "Comparison", "Result", "compare_exactly", "is_close", "results_of"]

Compare: TypeAlias = Callable[[int, Tensor], None]
"""Is told the position of a saved tensor, and the tensor that the replay saves there."""


def compare_exactly(
    fn: Any, records: list[Record], digests: list[Digest] | None, position: int, tensor: Tensor
) -> None:
    """Compares one tensor with what the forward noted.

    Raises:
        ReplayMismatchError: it is of another kind, or has other contents.
    """
    if kind_of(tensor) != records[position][1]:
        raise mismatch.saved_otherwise(fn, records, position, tensor)
    then = None if digests is None else digests[position]
    if then is not None and not is_same(then, digest_of_saved(tensor)):
        raise mismatch.values_drifted(fn, records, position)


class Comparison:
    """A replay whose saved tensors are compared by content; and a second one, where they differ.

    See NOTE [ Sampled comparison ], 3.
    """

    def __init__(self, fn: Any, records: list[Record], digests: list[Digest]) -> None:
        self._fn, self._records, self._digests = fn, records, digests
        self._seen: dict[int, Digest] = {}
        self._first: dict[int, Tensor] = {}
        self._are_equal: dict[int, bool] = {}
        """For what drifted in the first replay: whether the second saves what the forward saved."""
        self._are_close = True

    def note(self, position: int, tensor: Tensor) -> None:
        """Notes a tensor that the replay saves."""
        if self._digests[position] is not None:
            self._seen[position] = digest_of_saved(tensor)

    def drifts(self, values: dict[int, Tensor]) -> bool:
        """Whether any of the replay's values, which the backward needs, differs from the forward's."""
        positions = [position for position in self._seen if position in values]
        # Together, since on a device each comparison would wait for it.
        if are_same([(self._digests[p], self._seen[p]) for p in positions]):
            return False
        self._first = {p: values[p] for p in positions if not is_same(self._digests[p], self._seen[p])}
        return True

    def note_again(self, position: int, tensor: Tensor) -> None:
        """Compares a tensor that the second replay saves with the forward's, and with the first replay's."""
        first = self._first.get(position)
        if first is not None:
            self._are_equal[position] = is_same(self._digests[position], digest_of_saved(tensor))
            self._are_close &= is_close(first.detach(), tensor.detach())

    def judge(self, then: list[Result], now: list[Result]) -> None:
        """Says what the differences mean, from the results of the forward and of the second replay.

        Raises:
            ReplayMismatchError: what the function depends on has changed.
        """
        pairs = list(zip(then, now, strict=True)) if len(then) == len(now) else []
        if pairs and all(is_same(one.bits, other.bits) for one, other in pairs):
            if not any(self._are_equal.values()):
                return  # memory that nobody filled
            rounds = self._are_close  # the second replay repeats the forward, and the first did not
        else:
            rounds = _differ_by_rounding(pairs)
        if not rounds:
            raise mismatch.values_drifted(self._fn, self._records, min(self._first))
        never_again(self._fn)
        warnings.warn(
            f"{mismatch.describe_function(self._fn)}: its replay rounds differently than its forward, because an"
            " operation in it is not deterministic on this device, or because something that it depends on has changed"
            " a little. Gradients may differ in their last digits, and its replays are no longer compared."
            " torch.use_deterministic_algorithms(True) shows which it is.",
            RecoupWarning,
            stacklevel=2,
        )


class Result(NamedTuple):
    """What is noted of a tensor that a call returns: its hash, and some of its values."""

    bits: Digest
    values: Tensor | None


def results_of(tensors: list[Tensor]) -> list[Result]:
    """Notes what a call returned, on the host: a plan may have no byte of the device to spare."""
    return list(map(Result, fetched(list(map(digest, tensors))), map(_some_values, tensors)))


def _some_values(tensor: Tensor) -> Tensor | None:
    """A few values from all over a tensor of numbers; of one that is divided over ranks, from this rank's part."""
    parts = [part for one in plain_tensors(tensor) if (part := _values_of_part(one)) is not None]
    return torch.cat(parts) if len(parts) > 1 else next(iter(parts), None)


def _values_of_part(tensor: Tensor) -> Tensor | None:
    if not has_bits(tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    with torch.no_grad(), WithoutDispatch():
        some = tensor.detach()[tuple(slice(None, None, max(1, size // 3)) for size in tensor.shape)]
        some = torch.view_as_real(some.resolve_conj()) if some.is_complex() else some
        dtype = torch.float64 if some.dtype is torch.float64 else torch.float32
        return some.to("cpu", dtype, copy=True).flatten()


def _differ_by_rounding(pairs: list[tuple[Result, Result]]) -> bool:
    # Behind a sum that rounds differently an index may well fall differently, so that integers say nothing.
    values = [(one.values, other.values) for one, other in pairs if one.values is not None]
    return bool(values) and all(right is not None and is_close(left, right) for left, right in values)


def is_close(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors agree to half of their digits.

    >>> is_close(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + 1e-6]))
    True
    >>> is_close(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1]))
    False
    """
    if left.shape != right.shape or left.dtype != right.dtype or left.layout is not torch.strided:
        return False
    if not (left.is_floating_point() or left.is_complex()) or left.numel() == 0:
        return torch.equal(left, right)
    # Half of the digits: rounding grows within a unit. Compared with the largest value, since sums cancel.
    tolerance = math.sqrt(torch.finfo(left.dtype).eps)
    finite = left[left.isfinite()].abs()
    scale = finite.max().item() if finite.numel() else 0.0
    return torch.allclose(left, right, rtol=0.0, atol=tolerance * scale, equal_nan=True)
