"""Which rows of its dataset a loader reads, without moving its sampler."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from torch.utils.data import Dataset, DistributedSampler, RandomSampler, SequentialSampler

from recoup.errors import SampleError

__all__ = ["indices_of"]

_MOST_READ = 100_000


def indices_of(loader: Any) -> Sequence[Any]:
    """The indices that a loader's sampler draws from, or those that it would yield next, up to 100,000, sorted.

    Raises:
        SampleError: nobody but the loader can tell.

    >>> from torch.utils.data import DataLoader, SubsetRandomSampler
    >>> indices_of(DataLoader(range(9), batch_size=2, sampler=SubsetRandomSampler([7, 2, 5])))
    [2, 5, 7]
    """
    sampler = _innermost(loader)
    if sampler is loader:
        return range(len(loader.dataset))
    if type(sampler) in (SequentialSampler, RandomSampler):
        return range(len(sampler.data_source))
    if type(sampler) is DistributedSampler:
        return range(len(sampler.dataset))  # type: ignore[arg-type]
    # A copy is read, so that neither counters nor generators of the sampler's own move. Data are not copied.
    attributes = getattr(sampler, "__dict__", {})
    data = [loader.dataset, *(held for held in attributes.values() if isinstance(held, Dataset))]
    try:
        drawn = list(islice(copy.deepcopy(sampler, {id(each): each for each in data}), _MOST_READ))
    except Exception as error:
        raise SampleError(
            f"The loader's {type(sampler).__name__} cannot be read without moving it ({error}): give sample=, a batch"
            " as large as the largest."
        ) from error
    indices = [index for each in drawn for index in (each if isinstance(each, list) else [each])]
    with suppress(TypeError):  # keys that have no order stay as they were drawn
        indices.sort()  # so that a plan does not depend on a seed
    return indices


def _innermost(owner: Any) -> Any:
    """The sampler of rows inside a loader, and inside its samplers of batches; the innermost one that there is."""
    inner = owner
    while inner is not None:
        owner = inner
        inner = getattr(owner, "batch_sampler", None)
        inner = getattr(owner, "sampler", None) if inner is None else inner
    return owner
