"""Dimensions of a model's inputs that vary from batch to batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from recoup.errors import SampleError

__all__ = ["Axis", "Shapes", "Size", "find_axes", "size_of", "volume"]

Size = tuple[int, ...]
"""The size of a batch: one number for each axis."""
Shapes = Mapping[str, Sequence[int]]

_MOST_AXES = 2


@dataclass(frozen=True, slots=True)
class Member:
    """A dimension of an input.

    Attributes:
        name: of the input.
        dim: its dimension.
        ratio: of that dimension to the axis, as two whole numbers.
    """

    name: str
    dim: int
    ratio: tuple[int, int] = (1, 1)


@dataclass(frozen=True, slots=True)
class Axis:
    """Dimensions that vary together.

    Attributes:
        members: at least one.
    """

    members: tuple[Member, ...]

    @property
    def name(self) -> str:
        """The first of them, as people write it.

        >>> Axis((Member("input_ids", 1),)).name
        'input_ids.shape[1]'
        """
        return f"{self.members[0].name}.shape[{self.members[0].dim}]"

    def read(self, shapes: Shapes) -> int | None:
        """The largest value that some inputs give to the axis; ``None`` if none of them has it."""
        return max(self._values(shapes), default=None)

    def _values(self, shapes: Shapes) -> Iterator[int]:
        for member in self.members:
            shape = shapes.get(member.name)
            if shape is not None and member.dim < len(shape):
                times, of = member.ratio
                yield -(-shape[member.dim] * of // times)


def find_axes(samples: Sequence[Shapes]) -> tuple[Axis, ...]:
    """The axes along which samples differ; dimensions that are in proportion to each other are one axis.

    Raises:
        SampleError: samples have other inputs than others; or they vary in too many ways, or not at all.

    >>> ids = [(4, 64), (4, 128), (2, 256)]
    >>> [axis.name for axis in find_axes([{"ids": shape, "labels": shape} for shape in ids])]
    ['ids.shape[0]', 'ids.shape[1]']
    """
    first = samples[0]
    for number, sample in enumerate(samples):
        if sample.keys() != first.keys() or any(len(sample[name]) != len(first[name]) for name in first):
            raise SampleError(
                f"Samples 0 and {number} differ in more than size: {_in_words(first)} and {_in_words(sample)}. Give"
                " samples with the same inputs, of the same number of dimensions."
            )
    members: dict[tuple[int, ...], list[Member]] = {}
    for name, shape in first.items():
        for dim in range(len(shape)):
            values = tuple(int(sample[name][dim]) for sample in samples)
            if len(set(values)) > 1:
                known = next((other for other in members if _in_proportion(values, other)), values)
                place = _first_above_0(known)
                ratio = Fraction(values[place], known[place])
                members.setdefault(known, []).append(Member(name, dim, ratio.as_integer_ratio()))
    if not members:
        raise SampleError(
            f"All samples are of the same size ({_in_words(first)}): give the shortest and the longest batch of"
            " training, or one sample= and no sizes."
        )
    axes = tuple(Axis(tuple(found)) for found in members.values())
    if len(axes) > _MOST_AXES:
        raise SampleError(
            f"The samples vary in {len(axes)} ways ({', '.join(axis.name for axis in axes)}), and bytes are followed"
            f" along {_MOST_AXES}: give samples of equal batch size, or pad all but two of these to the same length."
        )
    return axes


def size_of(axes: Sequence[Axis], shapes: Shapes) -> Size | None:
    """The size of a batch; ``None`` if an axis cannot be read from these inputs."""
    found = tuple(axis.read(shapes) for axis in axes)
    return None if None in found else found  # type: ignore[return-value]


def volume(size: Size) -> int:
    """What sizes are ordered by.

    >>> sorted([(8, 64), (1, 256), (4, 128)], key=volume)
    [(1, 256), (8, 64), (4, 128)]
    """
    return prod(size)


def _in_proportion(values: tuple[int, ...], others: tuple[int, ...]) -> bool:
    place = _first_above_0(others)
    own, other = values[place], others[place]
    return own > 0 and all(a * other == b * own for a, b in zip(values, others, strict=True))


def _first_above_0(values: tuple[int, ...]) -> int:
    """Where samples differ, one is above 0."""
    return next(index for index, value in enumerate(values) if value)


def _in_words(shapes: Shapes) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items()) or "no tensors"
