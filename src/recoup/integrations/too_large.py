"""A batch for which no plan fits, in the words by which Accelerate and the trainers know that it is too large."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from recoup.errors import BudgetError

__all__ = ["BatchTooLargeError", "as_out_of_memory"]


class BatchTooLargeError(BudgetError, RuntimeError):
    """No plan fits: `accelerate.utils.find_executable_batch_size` takes it for a reason to try a smaller batch."""


@contextmanager
def as_out_of_memory() -> Iterator[None]:
    """Raises a `BatchTooLargeError` for a `BudgetError`: the batch shrinks only where no plan fits."""
    try:
        yield
    except BudgetError as error:
        # The search for a batch size looks for the last words, in an error with one argument.
        raise BatchTooLargeError(
            f"{error} No plan fits this batch: out of memory.",
            budget_bytes=error.budget_bytes,
            smallest_bytes=error.smallest_bytes,
            unit=error.unit,
        ) from error
