"""Who gives gradients to whom, found by going backwards through the calls of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recoup.measuring.stream.structure import Code, SeenCall, Tail

__all__ = ["noting_gradients"]


def noting_gradients(calls: Sequence[SeenCall], tail: Tail) -> tuple[SeenCall, ...]:
    """Says of each call which of its parameters, outputs and arguments got gradients before, going backwards."""
    known, given = set(tail.code.parameters), set(tail.code.gives_gradients)
    views = _Views(calls)
    views.add_code(tail.code, set())
    noted = []
    for index, seen in reversed(list(enumerate(calls))):
        trained = {id(parameter) for parameter in seen.module.parameters() if parameter.requires_grad}
        shares = bool(trained & known)
        wanted = tuple(number is None or number in given for number in seen.output_numbers)
        summed = seen.argument_gradients.keys() - seen.outputs.keys()
        as_views = tuple(number in summed and views.outlives(number, index) for number in seen.numbers)
        begins = tuple(views.outlives(n, index, is_contiguous=True) for n in seen.output_numbers)
        noted.append(
            replace(
                seen,
                shares=shares,
                wanted=wanted,
                wait_as_views=as_views,
                begins_with_views=begins,
                kind=(seen.kind, shares, wanted),
            )
        )
        known |= trained | seen.code.parameters.keys()
        views.end(seen)
        given |= seen.argument_gradients.keys()
        views.add_code(seen.code, given)
        given |= seen.code.gives_gradients.keys()
    return tuple(reversed(noted))


class _Views:
    """Gradients that code made as views of one storage: of a concatenation, of a sum."""

    def __init__(self, calls: Sequence[SeenCall]) -> None:
        self._owners: dict[int, tuple[Code, int]] = {}
        self._full_bytes: dict[int, int] = {}
        self._born: dict[int, float] = {}
        for index, seen in reversed(list(enumerate(calls))):
            self._full_bytes |= seen.argument_gradients
            # Made by code, unless a call turns out to hand it on.
            self._born |= dict.fromkeys(seen.arguments, index - 0.5)
        for index, seen in reversed(list(enumerate(calls))):
            self._full_bytes |= seen.gradients
            self._born |= {number: index for number in seen.outputs if number not in seen.arguments}

    def add_code(self, code: Code, given: set[int]) -> None:
        """The backward of code has run; what was given a gradient before has a sum now."""
        for number in code.gives_gradients if code.has_bytes else ():
            owner = code.owner_of(number, self._full_bytes.get(number, 0))
            if owner is None or number in given:
                self._owners.pop(number, None)
            else:
                self._owners[number] = (code, owner)

    def end(self, seen: SeenCall) -> None:
        """The backward of a call has run, and has added to the gradients of its arguments."""
        for number in seen.argument_gradients:
            self._owners.pop(number, None)

    def outlives(self, number: int | None, call: int, *, is_contiguous: bool = False) -> bool:
        """Whether a gradient shares its storage with one that the backward of an earlier position reads."""
        found = None if number is None else self._owners.get(number)
        if found is None or (is_contiguous and number in found[0].strided):
            return False
        return any(
            other != number and code is found[0] and owner == found[1] and self._born.get(other, call) < call
            for other, (code, owner) in self._owners.items()
        )
