"""Which rows of its dataset a loader reads, in which order, without moving its sampler."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import islice
from random import Random
from typing import Any

from torch.utils.data import (
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from recoup.errors import SampleError

__all__ = ["MOST_READ", "indices_of", "innermost_sampler"]

MOST_READ = 100_000


def indices_of(loader: Any) -> Sequence[Any]:
    """The indices that a loader's sampler would yield, up to 100,000, in its own order; lists, if it yields batches.

    Where the sampler only shuffles, the order is a fixed one, so that a plan does not depend on a seed.

    Raises:
        SampleError: nobody but the loader can tell.

    >>> from torch.utils.data import DataLoader
    >>> indices_of(DataLoader(range(9), batch_size=2, sampler=[7, 2, 5]))
    [7, 2, 5]
    >>> sorted(indices_of(DataLoader(range(4), batch_size=2, shuffle=True)))
    [0, 1, 2, 3]
    """
    sampler = innermost_sampler(loader)
    if type(sampler) is SequentialSampler:
        return range(len(sampler.data_source))
    if (pool := _shuffled_by(sampler, loader)) is not None:
        return Random(0).sample(pool, min(len(pool), MOST_READ))
    # A copy is read, so that neither counters nor generators of the sampler's own move. Data are not copied.
    attributes = getattr(sampler, "__dict__", {})
    data = [loader.dataset, *(held for held in attributes.values() if isinstance(held, Dataset))]
    try:
        return list(islice(copy.deepcopy(sampler, {id(each): each for each in data}), MOST_READ))
    except Exception as error:
        raise SampleError(
            f"The loader's {type(sampler).__name__} cannot be read without moving it ({error}): give sample=, a batch"
            " as large as the largest."
        ) from error


def innermost_sampler(owner: Any) -> Any:
    """The sampler of rows inside a loader, and inside its samplers of batches; the innermost one that there is."""
    inner = owner
    while inner is not None:
        owner = inner
        inner = getattr(owner, "batch_sampler", None)
        inner = getattr(owner, "sampler", None) if inner is None else inner
    return owner


def _shuffled_by(sampler: Any, loader: Any) -> Sequence[Any] | None:
    """All indices of a sampler that is known to put them in any order."""
    if sampler is loader:
        return range(len(loader.dataset))
    if type(sampler) is RandomSampler:
        return range(len(sampler.data_source))
    if type(sampler) is DistributedSampler:
        return range(len(sampler.dataset))  # type: ignore[arg-type]
    return list(sampler.indices) if type(sampler) is SubsetRandomSampler else None
