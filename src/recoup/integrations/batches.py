"""A batch to plan for, from a loader that is not touched: neither its sampler nor its random state moves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from recoup.errors import SampleError
from recoup.snapshot.random_state import held_random_state
from recoup.tensors import tensors_in

__all__ = ["largest_batch_of"]


def largest_batch_of(loader: Any, *, num_batches: int, batch_size: int | None = None) -> Any:
    """The largest of a few batches, by elements, made of rows from all over the loader's dataset.

    Rows are read and collated here, not by the loader, so that training sees the same batches as without.

    Args:
        loader: a `DataLoader`, or a wrapper with the same attributes; anything else is iterated over.
        num_batches: how many are made.
        batch_size: rows in a batch, unless the loader says so.

    Raises:
        SampleError: the dataset is empty, or can be read only once.
    """
    put_back = held_random_state()
    try:
        batches = list(_batches(loader, num_batches, batch_size))
    finally:
        put_back()
    if not batches:
        raise SampleError("The training data are empty: give sample=, a batch to plan for.")
    return max(batches, key=lambda batch: sum(tensor.numel() for tensor in tensors_in(batch)))


def _batches(loader: Any, num_batches: int, batch_size: int | None) -> Iterator[Any]:
    dataset, collate = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
    size = getattr(loader, "batch_size", None) or batch_size
    if dataset is None or collate is None or size is None:
        return islice(_begun(loader), num_batches)
    rows = _rows(dataset, num_batches * size)
    return (collate(rows[first : first + size]) for first in range(0, len(rows), size))


def _rows(dataset: Any, num_rows: int) -> Sequence[Any]:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return list(islice(_begun(dataset), num_rows))
    num_rows = min(num_rows, len(dataset))
    return [dataset[index * len(dataset) // num_rows] for index in range(num_rows)]


def _begun(data: Iterable[Any]) -> Iterator[Any]:
    found = iter(data)
    if found is data:
        raise SampleError(
            "The training data can be read only once, and a batch that is taken from them to plan for would be"
            " missing in training: give sample=, a batch as large as the largest."
        )
    return found
