"""Comparing what a replay saves with what its forward saved, while the operations that save it run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor

from recoup.checkpointing import mismatch
from recoup.checkpointing.digest import Digest, are_same, digest_of_saved, is_same
from recoup.checkpointing.mismatch import Record, kind_of
from recoup.checkpointing.sampling import is_close, never_again
from recoup.errors import RecoupWarning

__all__ = ["Compare", "Comparison", "compare_exactly"]

Compare: TypeAlias = Callable[[int, Tensor], None]
"""Is told the position of a saved tensor, and the tensor that the replay saves there."""


def compare_exactly(
    fn: Any, records: list[Record], digests: list[Digest] | None, position: int, tensor: Tensor
) -> None:
    """Compares one tensor with what the forward noted.

    Raises:
        ReplayMismatchError: it is of another kind, or has other contents.
    """
    record = records[position]
    if kind_of(tensor) != record[1]:
        raise mismatch.saved_otherwise(fn, record, tensor, len(records))
    then = None if digests is None else digests[position]
    if then is not None and not is_same(then, digest_of_saved(tensor)):
        raise mismatch.values_drifted(fn, record, len(records))


class Comparison:
    """One replay compared by content; and, where that differs, a second one with the first.

    See NOTE [ Sampled comparison ], 3.
    """

    def __init__(self, fn: Any, records: list[Record], digests: list[Digest]) -> None:
        self._fn, self._records, self._digests = fn, records, digests
        self._seen: dict[int, Digest] = {}
        self._first: dict[int, Tensor] = {}
        self._drifted: set[int] = set()
        self._rounds = False

    def note(self, position: int, tensor: Tensor) -> None:
        """Notes a tensor of the first replay."""
        if self._digests[position] is not None:
            self._seen[position] = digest_of_saved(tensor)

    def drifts(self, values: dict[int, Tensor]) -> bool:
        """Whether the first replay, which gave these values, differs from the forward in any of them."""
        positions = [position for position in self._seen if position in values]
        # Together, since on a device each comparison would wait for it.
        if are_same([(self._digests[p], self._seen[p]) for p in positions]):
            return False
        self._drifted = {p for p in positions if not is_same(self._digests[p], self._seen[p])}
        self._first = values
        return True

    def judge(self, position: int, tensor: Tensor) -> None:
        """Compares a tensor of the second replay with the first one's.

        Raises:
            ReplayMismatchError: they are equal, so that it is the forward that they differ from; or too far apart.
        """
        if position not in self._drifted:
            return
        first = self._first[position]
        repeats = is_same(digest_of_saved(first), digest_of_saved(tensor))
        # Behind a sum that rounds differently, an index may well fall differently too.
        if not self._rounds and (repeats or not is_close(first.detach(), tensor.detach())):
            raise mismatch.values_drifted(self._fn, self._records[position], len(self._records))
        self._rounds = True

    def warn(self) -> None:
        """Says once that a function does not repeat itself to the last bit."""
        if self._rounds:
            never_again(self._fn)
            warnings.warn(
                f"{mismatch.describe_function(self._fn)}: its replays round differently each time, because an operation"
                " in it is not deterministic on this device. Gradients may differ in their last digits, and its replays"
                " are no longer compared. torch.use_deterministic_algorithms(True) avoids that.",
                RecoupWarning,
                stacklevel=2,
            )
