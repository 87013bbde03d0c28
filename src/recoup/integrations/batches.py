"""A batch to plan for, from a loader that is not touched: neither its sampler nor its random state moves."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, TypeVar

import torch
from torch.utils.data import IterableDataset

from recoup.errors import SampleError
from recoup.integrations.indices import MOST_READ, indices_of
from recoup.integrations.lengths import known_lengths
from recoup.snapshot.random_state import held_random_state
from recoup.tensors import tensors_in

__all__ = ["batches_of", "largest_batch_of"]

T = TypeVar("T")


def largest_batch_of(loader: Any, *, num_batches: int, batch_size: int | None = None) -> Any:
    """The largest of a few batches, as `batches_of` makes them."""
    return batches_of(loader, num_batches=num_batches, batch_size=batch_size)[-1]


def batches_of(loader: Any, *, num_batches: int, batch_size: int | None = None) -> list[Any]:
    """A few batches in order of their elements, of the indices that the loader's sampler would yield together.

    Which ones is a fixed choice; where lengths of rows are known, they go from the shortest to the longest. Rows are
    read and collated here, not by the loader, so that training sees the same batches as without. A loader whose
    batches cannot be made so needs a sample of the user's.

    Args:
        loader: a `DataLoader`, or a wrapper with the same attributes.
        num_batches: how many are made.
        batch_size: rows in a batch, unless the loader says so.

    Raises:
        SampleError: the dataset is empty, may be a stream that can be read only once, or a sampler makes the batches.
    """
    put_back = held_random_state()
    try:
        # What samplers and collators draw is the same on all ranks, and in a run that is resumed.
        random.seed(0)
        torch.default_generator.manual_seed(0)
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
        return [collate(row) for [row] in _rows(loader, num_batches, None)]
    size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None) or batch_size
    if not isinstance(size, int):
        raise _unreadable("A sampler of the loader's own makes batches of any size")
    return [collate(rows) for rows in _rows(loader, num_batches, size)]


def _rows(loader: Any, num_batches: int, size: int | None) -> list[list[Any]]:
    """The rows of each batch; of one row each if there is no size."""
    dataset = loader.dataset
    if type(dataset).__module__.partition(".")[0] == "datasets" and not hasattr(dataset, "__getitem__"):
        size = size or 1
        rows = list(dataset.take(num_batches * size))  # which begins anew each time
        return [rows[first : first + size] for first in range(0, len(rows), size)]
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise _unreadable(
            "The training data may be a stream, of which rows that are read here would be missing"
        )
    batches = _choose(_in_batches(indices_of(loader), size), num_batches, known_lengths(loader))
    return [[dataset[index] for index in batch] for batch in batches]


def _in_batches(indices: Sequence[Any], size: int | None) -> Sequence[Sequence[Any]]:
    """Indices in batches as the sampler yields them; one that is not full only where there is no other."""
    if size is not None and indices and isinstance(indices[0], list):
        return indices
    size = size or 1
    firsts = range(0, max(1, len(indices) - size + 1), size) if indices else ()
    return [indices[first : first + size] for first in _first_and_others(firsts, max(1, MOST_READ // size))]


def _choose(
    batches: Sequence[Sequence[Any]], num_wanted: int, length: Callable[[Any], int] | None
) -> list[Sequence[Any]]:
    """Where lengths are known, from the longest to the shortest in even steps; else the first and any others."""
    if length is None:
        return _first_and_others(batches, num_wanted)
    # Rows are padded to the longest of them.
    by_size = sorted(batches, key=lambda batch: len(batch) * max(map(length, batch)), reverse=True)
    num_steps = max(1, min(num_wanted, len(by_size)) - 1)
    return [
        by_size[number * (len(by_size) - 1) // num_steps] for number in range(min(num_wanted, len(by_size)))
    ]


def _first_and_others(items: Sequence[T], num_wanted: int) -> list[T]:
    """The first item, since samplers that go by length begin with the longest, and a fixed choice of the others."""
    if len(items) <= num_wanted:
        return list(items)
    return [items[0], *Random(0).sample(items[1:], num_wanted - 1)] if num_wanted else []


def _unreadable(why: str) -> SampleError:
    return SampleError(f"{why}: give sample=, a batch as large as the largest.")
