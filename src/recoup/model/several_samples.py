"""Batches of several sizes, as users give them: some samples, or one that is cut to other sizes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from recoup.errors import SampleError
from recoup.tensors import map_tensors, tensors_in

__all__ = ["read_samples"]


def read_samples(sample: Any, samples: Iterable[Any] | None, sizes: Iterable[int] | None) -> list[Any]:
    """All samples to measure, the largest first; of the others none is alike.

    Args:
        sample: one batch; with ``sizes``, as long as the longest of these.
        samples: several batches.
        sizes: numbers of rows or tokens that the sample is cut to: its dimensions of that length, from the end.

    Raises:
        SampleError: these make no samples of several sizes; it says why.
    """
    if samples is None and sizes is None:
        return [sample]
    if samples is not None:
        if sample is not None or sizes is not None:
            raise SampleError("samples= goes alone: leave out sample and sizes=.")
        given = _listed(samples, "samples=", "[short, medium, long], batches of several sizes")
        return sorted(given, key=_num_elements, reverse=True)
    if sample is None:
        raise SampleError("sizes= goes with a sample as long as the longest of them: give one.")
    wanted = _listed(sizes, "sizes=", "[128, 512, 2048], lengths that batches have")
    for size in wanted:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise SampleError(f"sizes= are whole numbers of at least 1; got {size!r}.")
    longest = max(wanted)
    _check_longest(sample, longest)
    others = sorted(set(wanted) - {longest}, reverse=True)
    return [sample, *(_cut(sample, longest, size) for size in others)]


def _listed(given: Any, name: str, what: str) -> list[Any]:
    found = list(given) if isinstance(given, Iterable) and not isinstance(given, (Tensor, dict, str)) else []
    if len(found) < 2:
        raise SampleError(f"{name} takes {what}; got {type(given).__name__} with {len(found)} of them.")
    return found


def _num_elements(sample: Any) -> int:
    return sum(tensor.numel() for tensor in tensors_in(sample))


def _check_longest(sample: Any, longest: int) -> None:
    shapes = [list(tensor.shape) for tensor in tensors_in(sample)]
    numbers = {shape.count(longest) for shape in shapes}
    if numbers <= {0}:
        raise SampleError(
            f"No tensor of the sample has a dimension of {longest}, the longest of sizes= (they are"
            f" {', '.join(map(str, shapes)) or 'no tensors'}): give a sample of that length."
        )
    if max(numbers) > 1:
        twice = next(shape for shape in shapes if shape.count(longest) > 1)
        raise SampleError(
            f"A tensor of the sample is {twice}, and which of its dimensions sizes= are about cannot be told: give"
            " samples=, batches of several sizes."
        )


def _cut(sample: Any, longest: int, size: int) -> Any:
    def cut(tensor: Tensor) -> Tensor:
        if longest not in tensor.shape:
            return tensor
        return tensor.narrow(list(tensor.shape).index(longest), 0, size).clone()

    return map_tensors(cut, sample)
