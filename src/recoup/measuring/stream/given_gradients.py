"""Who gives gradients to whom, found by going backwards through the calls of a step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from recoup.measuring.stream.gradient_views import GradientViews
from recoup.model.cut_graph import Gradient

if TYPE_CHECKING:
    from recoup.measuring.stream.seen import SeenCall, Tail

__all__ = ["noting_gradients", "noting_views"]


def noting_gradients(calls: Sequence[SeenCall], tail: Tail) -> tuple[SeenCall, ...]:
    """Says of each call which of its parameters and outputs got gradients before, going backwards."""
    known, given = set(tail.code.parameters), set(tail.code.gives_gradients)
    noted = []
    for seen in reversed(calls):
        trained = {id(parameter) for parameter in seen.module.parameters() if parameter.requires_grad}
        shares = bool(trained & known)
        wanted = tuple(number is None or number in given for number in seen.output_numbers)
        noted.append(replace(seen, shares=shares, wanted=wanted, kind=(seen.kind, shares, wanted)))
        known |= trained | seen.code.parameters.keys()
        given |= seen.argument_gradients.keys() | seen.code.gives_gradients.keys()
    return noting_views(noted[::-1], tail)


def noting_views(calls: Sequence[SeenCall], tail: Tail) -> tuple[SeenCall, ...]:
    """Says of each call which gradients its backward finds as views of storages that outlive it."""
    given = set(tail.code.gives_gradients)
    views = _Views(calls)
    if tail.code.has_bytes:
        views.add(tail.code.gives_gradients, tail.code.views, set())
    noted = []
    for index, seen in reversed(list(enumerate(calls))):
        summed = seen.argument_gradients.keys() - seen.outputs.keys()
        as_views = tuple(number in summed and views.waits(number, index) for number in seen.numbers)
        begins_as = views.begins_as(seen, index)
        begins = tuple(
            like is None and views.begins(number, index)
            for number, like in zip(seen.output_numbers, begins_as, strict=True)
        )
        noted.append(replace(seen, wait_as_views=as_views, begins_with_views=begins, begins_as=begins_as))
        views.add(seen.argument_gradients, seen.views, given - seen.outputs.keys())
        given |= seen.argument_gradients.keys()
        if seen.code.has_bytes:
            views.add(seen.code.gives_gradients, seen.code.views, given)
        given |= seen.code.gives_gradients.keys()
    return tuple(reversed(noted))


class _Views:
    """Gradients that backwards made as views of one storage: of a concatenation, of a sum."""

    def __init__(self, calls: Sequence[SeenCall]) -> None:
        self._owners: dict[int, tuple[GradientViews, int]] = {}
        self._full_bytes: dict[int, int] = {}
        self._born: dict[int, float] = {}
        for index, seen in reversed(list(enumerate(calls))):
            self._full_bytes |= seen.argument_gradients
            # Made by code, unless a call turns out to hand it on.
            self._born |= dict.fromkeys(seen.arguments, index - 0.5)
        for index, seen in reversed(list(enumerate(calls))):
            self._full_bytes |= seen.gradients
            self._born |= {number: index for number in seen.outputs if number not in seen.arguments}

    def add(self, numbers: Iterable[int], views: GradientViews, given: Collection[int]) -> None:
        """A backward has given these storages gradients; what was given one before has a sum now."""
        for number in numbers:
            owner = views.owner_of(number, self._full_bytes.get(number, 0))
            if owner is None or number in given:
                self._owners.pop(number, None)
            else:
                self._owners[number] = (views, owner)

    def waits(self, number: int | None, call: int) -> bool:
        """Whether a gradient shares its storage with one that the backward of an earlier position reads."""
        return any(self._born.get(other, call) < call for other in self._sharing(number))

    def begins(self, number: int | None, call: int) -> bool:
        """The same of a contiguous gradient of an output, also if this call's backward reads the other one."""
        found = None if number is None else self._owners.get(number)
        if found is None or number in found[0].strided:
            return False
        return any(self._born.get(other, call) <= call for other in self._sharing(number))

    def begins_as(self, seen: SeenCall, call: int) -> tuple[Gradient | None, ...]:
        """The gradients of a call's outputs that are views, where its backward is the last to read their storage."""
        numbers = seen.output_numbers
        found: dict[int, Gradient] = {}
        for number, shape in zip(numbers, seen.output_shapes, strict=True):
            if number is not None and number in self._owners and numbers.count(number) == 1:
                gradient = self._owners[number][0].gradients.get(number)
                if gradient is not None and gradient.shape == shape:
                    found[number] = gradient
        # Others among its outputs that share the storage have to be made with it.
        whole = {number for number in found if all(other in found for other in self._sharing(number))}
        return tuple(found[number] if number in whole else None for number in numbers)

    def _sharing(self, number: int | None) -> list[int]:
        """Those whose gradients are views of the storage that this one's gradient is a view of."""
        found = None if number is None else self._owners.get(number)
        return [
            other
            for other, (views, owner) in self._owners.items()
            if found is not None and other != number and views is found[0] and owner == found[1]
        ]
