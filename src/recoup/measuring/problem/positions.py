"""The positions of a step: units' calls and the code between them, and which of them made which storage."""

from __future__ import annotations

from dataclasses import dataclass, field

from recoup.measuring.problem.costs import CodeSeconds, StepCosts
from recoup.measuring.stream.gradient_views import GradientViews
from recoup.measuring.stream.seen import Code, SeenCall
from recoup.tensors import num_bytes_of

__all__ = ["Position", "positions_of"]


@dataclass
class Position:
    """A unit's call, or code, in the order of the step.

    Attributes:
        name: of the call, or of the code by what follows.
        call: index of the call; ``None`` for code.
        seen: the call as it passed by; ``None`` for code.
        code: the code itself, or what ran before the call.
        seconds: of the code.
        is_tail: whether it is the rest of the model and the loss.
        runs_once: whether its forward cannot be run again.
        made: bytes of the storages that it makes.
        earlier: bytes of storages that were made before it by code without a position.
    """

    name: str
    call: int | None
    seen: SeenCall | None
    code: Code
    seconds: CodeSeconds
    is_tail: bool = False
    runs_once: bool = False
    made: dict[int, int] = field(default_factory=dict)
    earlier: dict[int, int] = field(default_factory=dict)

    @property
    def reads(self) -> dict[int, int]:
        """Storages that it is given, or saves."""
        return self.code.saved if self.seen is None else self.seen.arguments

    @property
    def alive(self) -> dict[int, int]:
        """Storages that live when it begins."""
        return self.code.alive if self.seen is None else self.seen.alive

    @property
    def given_gradients(self) -> dict[int, int]:
        """Bytes of the gradients that its backward gives storages made before it."""
        return self.code.gives_gradients if self.seen is None else self.seen.argument_gradients

    @property
    def views(self) -> GradientViews:
        """The storages that these gradients are views of."""
        return self.code.views if self.seen is None else self.seen.views

    @property
    def parameters(self) -> dict[int, int]:
        """Bytes of the gradients that its backward gives parameters, by their identity."""
        if self.seen is None:
            return self.code.parameters
        trained = (p for p in self.seen.module.parameters() if p.requires_grad)
        return {id(p): num_bytes_of(p) for p in trained} | self.seen.given_parameters

    def sums_with_view(self, storage: int) -> bool:
        """Whether its backward was measured with a gradient of a storage that waits as a view."""
        seen = self.seen
        return seen is not None and (storage, True) in zip(seen.numbers, seen.wait_as_views, strict=True)

    def begins_with_view(self, storage: int) -> bool:
        """Whether its backward was measured with a gradient of an output that is a view, and was not counted."""
        seen = self.seen
        return seen is not None and (storage, True) in zip(
            seen.output_numbers, seen.begins_with_views, strict=True
        )

    def reads_whole(self, storage: int) -> bool:
        """Whether its backward was measured with a gradient of an output that is a view, and with its whole storage."""
        seen = self.seen
        pairs = () if seen is None else zip(seen.output_numbers, seen.begins_as, strict=True)
        return any(number == storage and like is not None for number, like in pairs)

    def hands_on(self, storage: int) -> bool:
        """Whether it gives out what it was given, as a view or changed in place."""
        return self.seen is not None and storage in self.seen.outputs


def positions_of(costs: StepCosts) -> list[Position]:
    """The step's positions, with their producers and with what runs once."""
    structure = costs.structure
    found: list[Position] = []
    for index, seen in enumerate(structure.calls):
        seconds = costs.code_seconds[index]
        if seen.code.has_bytes:
            found.append(Position(f"before {seen.name}", None, None, seen.code, seconds, runs_once=True))
        found.append(Position(seen.name, index, seen, seen.code, seconds, runs_once=index in costs.once))
    code = structure.tail.code
    found.append(Position("loss", None, None, code, costs.code_seconds[-1], is_tail=True, runs_once=True))
    _find_producers(found)
    for index, position in enumerate(found[:-1]):
        position.runs_once |= any(_is_needed_elsewhere(found, index, storage) for storage in position.made)
    return found


def _find_producers(positions: list[Position]) -> None:
    """Says which position made which storage."""
    known: set[int] = set()
    for index, position in enumerate(positions):
        if position.seen is None:
            made = position.code.saved
        else:
            earlier = {**position.seen.alive, **position.seen.arguments}
            unknown = {storage: size for storage, size in earlier.items() if storage not in known}
            if index and positions[index - 1].seen is None:
                positions[index - 1].made |= unknown
            else:
                position.earlier = unknown
            known |= unknown.keys()
            made = position.seen.outputs
        position.made = {storage: size for storage, size in made.items() if storage not in known}
        known |= position.made.keys()


def _is_needed_elsewhere(positions: list[Position], index: int, storage: int) -> bool:
    """NOTE [ Values between units ], 3."""
    later = list(enumerate(positions))[index + 1 :]
    readers = [(place, position) for place, position in later if storage in position.reads]
    last_alive = max((place for place, p in later if p.seen and storage in p.seen.alive), default=index)
    is_remade = any(position.seen and storage in position.seen.remade for _, position in readers)
    return is_remade or last_alive > index + 2 or any(place > index + 1 for place, _ in readers)
