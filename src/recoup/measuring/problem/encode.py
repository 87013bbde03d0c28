"""From measured calls to a planning problem: every storage becomes a value with a lifetime.

NOTE [ Values between units ]
    1. Positions are the units' calls and, between them, the code that made or saved anything; the tail (the rest
       of the model and the loss) is the last. Code only keeps, and runs once.
    2. A storage that a position makes is read by the forwards that are given it, by the backwards whose graphs hold it
       under an option (its own among them), and by the first forwards during which the user's variables hold it.
    3. A position runs once if a later one than the next reads what it makes, or if the next one is given a view of it:
       what replays several calls knows outputs by identity, and would hold the view.
    4. The gradient of a storage lives from the last backward that computes it to the backward of its producer. Where
       another backward gives it one, that is added in place, unless the first is a view of something larger: then their
       sum is made beside both. A position that hands a storage on (a view, a change in place) reads one gradient and
       makes another.
    5. What the caller holds, the loss and perhaps the model's output, stays. So do parameter gradients. Gradients of
       the step before that are cleared before the backward live in the forward only.
    6. A segment's sweep leaves copies of buffers for the replay.
    7. Scratch of a backward includes the gradients that it reads and makes, as it was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from recoup.measuring.problem.costs import CodeSeconds, RecipeCosts, StepCosts
from recoup.measuring.stream.structure import Code, SeenCall
from recoup.model.recipe import RECOMPUTE, Recipe
from recoup.planning import Option, Problem, Unit
from recoup.planning.values import SWEPT, Lifetime, Phase, Use, merged

__all__ = ["Position", "encode", "positions_of"]


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
    def parameters(self) -> dict[int, int]:
        """Bytes of the gradients that its backward gives parameters, by their identity."""
        if self.seen is None:
            return self.code.parameters
        trained = (p for p in self.seen.module.parameters() if p.requires_grad)
        return {id(p): p.numel() * p.element_size() for p in trained} | self.seen.given_parameters

    def hands_on(self, storage: int) -> bool:
        """Whether it gives out what it was given, as a view or changed in place."""
        return self.seen is not None and storage in self.seen.outputs


def positions_of(costs: StepCosts) -> list[Position]:
    """The step's positions, with their producers and with what runs once."""
    structure = costs.structure
    found: list[Position] = []
    for index, seen in enumerate(structure.calls):
        seconds = costs.code_seconds[index]
        if seen.code.saved or seen.code.transient_bytes:
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


def encode(costs: StepCosts) -> Problem:
    """The planning problem of a measured step."""
    positions = positions_of(costs)
    values = [*_activations(costs, positions), *_gradients(positions), *_copies(costs, positions)]
    made_bytes = [0] * len(positions)
    for value in values:
        if (
            value.made
            and value.made.phase is not Phase.BACKWARD
            and not value.in_scratch
            and not value.made.options
        ):
            made_bytes[value.made.unit] += value.num_bytes
    gradients = [value for value in values if value.made and value.made.phase is Phase.BACKWARD]
    parameter_bytes = _parameter_gradients(costs, positions)
    units = [
        Unit(
            position.name,
            _options(costs, position, made_bytes[index], _Gradients.of(index, gradients)),
            output_bytes=0,
            parameter_gradient_bytes=parameter_bytes[index],
            runs_once=position.runs_once,
        )
        for index, position in enumerate(positions)
    ]
    resident_bytes = costs.residents.total_bytes + costs.accumulates * costs.residents.gradient_bytes
    return Problem(units, resident_bytes=resident_bytes, values=merged(values))


@dataclass(frozen=True)
class _Gradients:
    """Bytes of the gradients of other positions and its own that one backward reads and makes.

    Attributes:
        passed_bytes: those that it reads, and those that it makes for the position before.
        summed_bytes: sums of gradients that it makes.
        waiting_bytes: of what it makes, what its measured scratch counts though it is a value of its own.
    """

    passed_bytes: int
    summed_bytes: int
    waiting_bytes: int

    @classmethod
    def of(cls, index: int, gradients: Sequence[Lifetime]) -> _Gradients:
        made = [value for value in gradients if value.made and value.made.unit == index]
        read = [value for value in gradients if value.in_scratch and value.read[0].unit == index]
        to_neighbour = [value for value in made if value.in_scratch and value.read[0].unit == index - 1]
        return cls(
            sum(value.num_bytes for value in [*read, *to_neighbour]),
            sum(value.num_bytes for value in made if value.name == _SUM),
            sum(value.num_bytes for value in made if not value.in_scratch),
        )


def _options(costs: StepCosts, position: Position, made_bytes: int, gradients: _Gradients) -> list[Option]:
    if position.call is not None:
        return [_option(position, option, made_bytes, gradients) for option in costs.options[position.call]]
    backward_bytes = max(position.code.backward_bytes, gradients.passed_bytes)
    return [
        Option(
            "keep",
            forward_s=position.seconds.forward_s,
            backward_s=position.seconds.backward_s,
            forward_transient_bytes=max(0, position.code.transient_bytes - made_bytes),
            backward_transient_bytes=max(0, backward_bytes - gradients.waiting_bytes),
        )
    ]


def _option(position: Position, option: RecipeCosts, made_bytes: int, gradients: _Gradients) -> Option:
    cost = option.bytes
    backward_bytes = cost.backward_peak_bytes
    if gradients.summed_bytes:
        # The sum is made when the unit's own backward has freed what it held.
        given_bytes = sum(position.given_gradients.values()) + sum(position.parameters.values())
        backward_bytes = max(backward_bytes, given_bytes + gradients.summed_bytes - cost.held_bytes)
    return Option(
        option.recipe.name,
        forward_s=option.seconds.forward_s,
        # What holds nothing has nothing to store in a replay.
        again_s=option.seconds.replay_overhead_s if cost.held_bytes or cost.holds_output else 0.0,
        backward_s=option.seconds.backward_s,
        held_bytes=cost.held_bytes,
        forward_transient_bytes=max(0, cost.forward_peak_bytes - cost.held_bytes - made_bytes),
        backward_transient_bytes=max(0, backward_bytes - gradients.waiting_bytes),
    )


def _activations(costs: StepCosts, positions: list[Position]) -> Iterator[Lifetime]:
    """NOTE [ Values between units ], 2 and 5."""
    held = dict(costs.caller_holds)
    for index, position in enumerate(positions):
        for storage, size in position.earlier.items():
            made = Use(Phase.FIRST, index - 1) if index else None
            value = _activation(costs, positions, index - 1, storage, size)
            yield replace(value, made=made, stays=held.pop(storage, 0) > 0, in_scratch=True)
        for storage, size in position.made.items():
            value = _activation(costs, positions, index, storage, size)
            yield replace(value, stays=held.pop(storage, 0) > 0)
    at_end = Use(Phase.FORWARD, len(positions) - 1)
    for size in held.values():
        yield Lifetime("held by the caller", size, made=at_end, stays=True, in_scratch=True)
    if costs.structure.has_stale and not costs.accumulates:
        stale_bytes = costs.residents.gradient_bytes
        until = Use(Phase.FIRST, len(positions) - 1)
        yield Lifetime("gradients of the step before", stale_bytes, made=None, read=(until,))


def _activation(costs: StepCosts, positions: list[Position], maker: int, storage: int, size: int) -> Lifetime:
    read: list[Use] = []
    if maker >= 0 and (options := _holding(costs, positions[maker], storage, is_own=True)) is not None:
        read.append(Use(Phase.BACKWARD, maker, options))
    last_read = last_alive = maker
    for index in range(maker + 1, len(positions)):
        position = positions[index]
        if storage in position.reads:
            last_read = index
            read.append(Use(Phase.FORWARD, index))
            if (options := _holding(costs, position, storage, is_own=False)) is not None:
                read.append(Use(Phase.BACKWARD, index, options))
        # Code begins while the graph of the unit before it holds what that saved.
        before = positions[index - 1].seen if position.seen is None and index else None
        if storage in position.alive and not (before and storage in before.saved_arguments):
            last_alive = index
    if last_alive > last_read:
        read.append(Use(Phase.FIRST, last_alive))
    name = f"from {positions[max(maker, 0)].name}"
    return Lifetime(name, size, made=Use(Phase.FORWARD, max(maker, 0)), read=tuple(read))


def _holding(costs: StepCosts, position: Position, storage: int, *, is_own: bool) -> tuple[int, ...] | None:
    """The options under which a position's graph holds a storage, empty for all; ``None`` if it never does."""
    if position.call is None or position.seen is None:
        return () if storage in position.code.saved else None
    seen, options = position.seen, costs.options[position.call]
    numbers = seen.output_numbers if is_own else seen.numbers
    found = []
    for index, option in enumerate(options):
        holds = option.bytes.holds_outputs if is_own else option.bytes.holds_arguments
        if any(held and number == storage for number, held in zip(numbers, holds, strict=True)):
            found.append(index)
    return None if not found else () if len(found) == len(options) else tuple(found)


_SUM = "sum of gradients"


def _gradients(positions: list[Position]) -> Iterator[Lifetime]:
    """NOTE [ Values between units ], 4."""
    for producer, position in enumerate(positions):
        for storage in position.made:
            yield from _gradient(positions, producer, storage)


def _gradient(positions: list[Position], producer: int, storage: int) -> Iterator[Lifetime]:
    later = reversed(range(producer + 1, len(positions)))
    givers = [index for index in later if storage in positions[index].given_gradients]
    if not givers:
        return
    full_bytes = _gradient_bytes(positions, producer, storage)
    maker, name = givers[0], "gradient"
    size = positions[maker].given_gradients[storage]
    for giver in givers[1:]:
        if positions[giver].hands_on(storage):
            yield _waiting(name, size, maker, giver)
            maker, name, size = giver, "gradient", positions[giver].given_gradients[storage]
        elif size != full_bytes:
            yield replace(_waiting(name, size, maker, giver), in_scratch=False)
            maker, name, size = giver, _SUM, full_bytes
    # What a neighbour gives is the whole gradient, whatever it is a view of.
    yield _waiting(name, full_bytes if maker == producer + 1 else size, maker, producer)


def _waiting(name: str, num_bytes: int, maker: int, reader: int) -> Lifetime:
    made, read = Use(Phase.BACKWARD, maker), (Use(Phase.BACKWARD, reader),)
    return Lifetime(name, num_bytes, made=made, read=read, in_scratch=True)


def _gradient_bytes(positions: list[Position], index: int, storage: int) -> int:
    """Of one storage; where code made it, its first reader tells whether it needs one."""
    seen = positions[index].seen
    if seen is not None:
        return seen.gradients.get(storage, 0)
    for later in positions[index + 1 :]:
        if later.seen is not None and storage in later.seen.argument_gradients:
            return later.seen.argument_gradients[storage]
    return 0


def _copies(costs: StepCosts, positions: list[Position]) -> Iterator[Lifetime]:
    """NOTE [ Values between units ], 6."""
    for index, position in enumerate(positions):
        if position.call is None or position.runs_once:
            continue
        options = costs.options[position.call]
        held = {option.recipe: option.bytes.held_bytes for option in options if option.recipe.whole}
        left = [_copied_bytes(option, held) for option in options]
        least_bytes = min(left)
        made = Use(Phase.FORWARD, index, (SWEPT,))
        yield Lifetime("copies for a replay", least_bytes, made=made, read=(Use(Phase.FORWARD, index),))
        for number, size in enumerate(left):
            read = (Use(Phase.FORWARD, index, (number,)),)
            yield Lifetime("copies for a replay", size - least_bytes, made=made, read=read)


def _copied_bytes(option: RecipeCosts, held: dict[Recipe, int]) -> int:
    """What a sweep leaves of a unit that is replayed under an option.

    Modules inside it that are replayed again leave copies too, as does the whole unit where it is replayed again. Where
    that was not measured, as much as with any of them.
    """
    recipe = option.recipe
    whole = replace(recipe, whole=True)
    if whole in held:
        return held[whole] + (held.get(RECOMPUTE, held[whole]) if recipe.whole else 0)
    return max(held.values(), default=0) if recipe.inner else min(held.values(), default=0)


def _parameter_gradients(costs: StepCosts, positions: list[Position]) -> list[int]:
    """Bytes of the parameter gradients that appear in each position's backward: each once."""
    made = [0] * len(positions)
    if costs.accumulates:
        return made
    claimed: set[int] = set()
    for index, position in reversed(list(enumerate(positions))):
        given = position.parameters
        made[index] = sum(size for parameter, size in given.items() if parameter not in claimed)
        claimed |= given.keys()
    # Parameters that only code without a position uses: their gradients come last.
    made[0] += costs.residents.gradient_bytes - sum(made)
    return made
