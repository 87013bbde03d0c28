"""How long rows of a dataset are, where nothing has to be loaded or computed for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from typing import Any

from torch import Tensor
from torch.utils.data import Subset

from recoup.integrations.indices import innermost_sampler

__all__ = ["known_lengths"]


def known_lengths(loader: Any) -> Callable[[Any], int] | None:
    """The length of the row at an index: one that the loader's sampler goes by, or that of a row in a list.

    ``None`` where rows would have to be read: that may decode an image.

    >>> from torch.utils.data import DataLoader
    >>> length = known_lengths(DataLoader([{"ids": [3, 4, 5]}, {"ids": [6]}]))
    >>> length(0), length(1)
    (3, 1)
    """
    dataset = loader.dataset
    lengths = getattr(innermost_sampler(loader), "lengths", None)
    if (
        isinstance(lengths, list)
        and len(lengths) == len(dataset)
        and all(type(each) is int for each in lengths)
    ):
        return lengths.__getitem__
    return (lambda index: _num_elements(dataset[index])) if _is_list(dataset) else None


def _is_list(dataset: Any) -> bool:
    return _is_list(dataset.dataset) if type(dataset) is Subset else type(dataset) in (list, tuple)


def _num_elements(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, Mapping):
        return sum(map(_num_elements, value.values()))
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], (Sized, Tensor)):
        return sum(map(_num_elements, value))
    return len(value) if isinstance(value, Sized) else 1
