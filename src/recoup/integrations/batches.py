"""A batch to plan for, from a loader that is not touched: neither its sampler nor its random state moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import IterableDataset

from recoup.errors import SampleError
from recoup.integrations.indices import indices_of
from recoup.snapshot.random_state import held_random_state
from recoup.tensors import tensors_in

__all__ = ["batches_of", "largest_batch_of"]


def largest_batch_of(loader: Any, *, num_batches: int, batch_size: int | None = None) -> Any:
    """The largest of a few batches, as `batches_of` makes them."""
    return batches_of(loader, num_batches=num_batches, batch_size=batch_size)[-1]


def batches_of(loader: Any, *, num_batches: int, batch_size: int | None = None) -> list[Any]:
    """A few batches in order of their elements, made of rows from all over what the loader's sampler draws from.

    Rows are read and collated here, not by the loader, so that training sees the same batches as without. A loader
    whose batches cannot be made so needs a sample of the user's.

    Args:
        loader: a `DataLoader`, or a wrapper with the same attributes.
        num_batches: how many are made.
        batch_size: rows in a batch, unless the loader says so.

    Raises:
        SampleError: the dataset is empty, may be a stream that can be read only once, or a sampler makes the batches.
    """
    put_back = held_random_state()
    try:
        batches = _batches(loader, num_batches, batch_size)
    finally:
        put_back()
    if not batches:
        raise SampleError("The training data are empty: give sample=, a batch to plan for.")
    return sorted(batches, key=lambda batch: sum(tensor.numel() for tensor in tensors_in(batch)))


def _batches(loader: Any, num_batches: int, batch_size: int | None) -> list[Any]:
    dataset, collate = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
    if dataset is None or collate is None:
        raise _unreadable(f"A {type(loader).__name__} does not say what it reads")
    sampler = getattr(loader, "batch_sampler", None)
    if sampler is None and not isinstance(dataset, IterableDataset):  # rows are batches
        return [collate(row) for row in _rows(loader, num_batches)]
    size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None) or batch_size
    if not isinstance(size, int):
        raise _unreadable("A sampler of the loader's own makes batches of any size")
    rows = _rows(loader, num_batches * size)
    return [collate(rows[first : first + size]) for first in range(0, len(rows), size)]


def _rows(loader: Any, num_rows: int) -> Sequence[Any]:
    dataset = loader.dataset
    if type(dataset).__module__.partition(".")[0] == "datasets" and not hasattr(dataset, "__getitem__"):
        return list(dataset.take(num_rows))  # which begins anew each time
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise _unreadable(
            "The training data may be a stream, of which rows that are read here would be missing"
        )
    indices = indices_of(loader)
    num_rows = min(num_rows, len(indices))
    return [dataset[indices[number * len(indices) // num_rows]] for number in range(num_rows)]


def _unreadable(why: str) -> SampleError:
    return SampleError(f"{why}: give sample=, a batch as large as the largest.")
