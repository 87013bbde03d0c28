"""From measured calls to a planning problem.

NOTE [ Values between units ]
    1. Positions are the units' calls and, between them, the code that made or saved anything; the tail (the rest
       of the model and the loss) is the last. Code only keeps, and runs once.
    2. A position's *output*, in the planner's sense, is what the next position reads (a unit: as an argument; code:
       by saving it). The planner drops it, or keeps it, as its plan says.
    3. What a later position than the next one reads or saves (a skip) must stay wherever it was made: it counts as
       held by its producer, whatever the option. It is gone when that one's own backward begins, unless its own graph
       may hold it. The producer runs once. If only replays need it, it counts as held by the reader's options that
       replay. What only the next position is given, and does not hold under an option, goes when that option's
       forward has run. A producer whose output is given to the next position as a view runs once, too: what replays
       several calls knows outputs by identity, and would hold the view.
    4. The gradient of such a value lives from the backward of the last position that computes with it, saved or
       not, to its producer's, and through the replays between them. Where another position's backward gives it
       one, that is added in place, unless the first is a view of something larger: then their sum is made beside
       both, when that backward has let go of what it held.
    5. What nobody holds but the user's own variables lives in the forward only: it is transient where it was seen. So
       are gradients of the step before that are cleared before the backward.
    6. What the caller holds, the loss and perhaps the model's output, lives through the whole backward, and through
       the replays in it.
    7. The planner takes the gradients of a position's output and input to live together, through its whole
       backward. Where a unit is measured to need less than the two of them, its transient is below 0.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise

from recoup.measuring.problem.costs import CodeSeconds, RecipeCosts, StepCosts
from recoup.measuring.stream.structure import Code, SeenCall
from recoup.planning import Option, Problem, Unit

__all__ = ["Position", "encode", "positions_of"]


@dataclass
class Position:
    """A unit's call, or code, in the order of the step."""

    name: str
    call: int | None
    seen: SeenCall | None
    code: Code
    seconds: CodeSeconds
    is_tail: bool = False
    made: dict[int, int] = field(default_factory=dict)
    outputs: dict[int, int] = field(default_factory=dict)
    runs_once: bool = False
    held: dict[int, int] = field(default_factory=dict)
    gone_bytes: int = 0
    back_bytes: int = 0
    replay_inputs: dict[int, int] = field(default_factory=dict)
    value_gradients: dict[int, int] = field(default_factory=dict)
    skip_gradient_bytes: int = 0
    summed_gradient_bytes: int = 0
    kept_output_bytes: int = 0
    user_bytes: int = 0
    sole_inputs: dict[int, int] = field(default_factory=dict)

    def gradient_bytes_from(self, following: Position) -> int:
        """Of the gradients of what it made, those that come from the position after it."""
        return sum(size for value, size in self.value_gradients.items() if following.gives_gradient(value))

    @property
    def gradient_bytes(self) -> int:
        """The gradients of what it made."""
        return sum(self.value_gradients.values())

    @property
    def held_bytes(self) -> int:
        """What it holds for later positions."""
        return sum(self.held.values())

    @property
    def waiting_bytes(self) -> int:
        """What lives through its backward, and through what is replayed before it, for others."""
        return self.kept_output_bytes + self.skip_gradient_bytes

    @property
    def reads(self) -> dict[int, int]:
        """Storages that it is given, or saves."""
        return self.code.saved if self.seen is None else self.seen.arguments

    def saves(self, value: int) -> bool:
        """Whether it holds on to a storage, though nothing of it is replayed."""
        return value in (self.code.saved if self.seen is None else self.seen.saved_arguments)

    def gives_gradient(self, value: int) -> bool:
        """Whether its backward gives a storage that was made before it a gradient."""
        return value in (self.code.gives_gradients if self.seen is None else self.seen.argument_gradients)

    def waiting_gradient(self, value: int) -> int:
        """Bytes that the gradient which it gives takes until the next one is added to it."""
        return (self.code.gives_gradients if self.seen is None else self.seen.argument_gradients)[value]

    @property
    def given_bytes(self) -> int:
        """The gradients that are there when its backward has run, its parameters' among them."""
        if self.seen is None:
            return sum(self.code.gives_gradients.values()) + sum(self.code.parameters.values())
        return sum(self.seen.argument_gradients.values()) + sum(_trained(self.seen).values())

    def hands_on(self, value: int) -> bool:
        """Whether it gives out what it was given, as a view or changed in place: one gradient for both."""
        return self.seen is not None and value in self.seen.outputs


def positions_of(costs: StepCosts) -> list[Position]:
    """The step's positions, with everything that passes between them settled."""
    structure = costs.structure
    found: list[Position] = []
    for index, seen in enumerate(structure.calls):
        if seen.code.saved or seen.code.transient_bytes:
            found.append(Position(f"before {seen.name}", None, None, seen.code, costs.code_seconds[index]))
        found.append(
            Position(
                seen.name, index, seen, seen.code, costs.code_seconds[index], runs_once=index in costs.once
            )
        )
    tail = structure.tail
    found.append(
        Position("loss", None, None, tail.code, costs.code_seconds[-1], is_tail=True, runs_once=True)
    )
    _find_producers(found)
    _settle_values(found, kept=costs.caller_holds.keys())
    _let_go(costs, found)
    return found


def _find_producers(positions: list[Position]) -> None:
    """Says which position made which storage."""
    known: set[int] = set()
    for index, position in enumerate(positions):
        if position.seen is None:
            position.runs_once = True
            position.made = {value: size for value, size in position.code.saved.items() if value not in known}
        else:
            earlier = {**position.seen.alive, **position.seen.arguments}
            unknown = {value: size for value, size in earlier.items() if value not in known}
            if unknown and index and positions[index - 1].seen is None:
                positions[index - 1].made |= unknown
            known |= unknown.keys()
            position.made = {
                value: size for value, size in position.seen.outputs.items() if value not in known
            }
        known |= position.made.keys()


def _settle_values(positions: list[Position], *, kept: Collection[int]) -> None:
    last_alive: dict[int, int] = {}
    for index, position in enumerate(positions):
        if position.seen is not None:
            last_alive |= dict.fromkeys(position.seen.alive, index)
    for index, position in enumerate(positions[:-1]):
        for value, size in position.made.items():
            _settle_value(
                positions, index, value, size, last_alive=last_alive.get(value, index), is_kept=value in kept
            )


def _settle_value(
    positions: list[Position], index: int, value: int, size: int, *, last_alive: int, is_kept: bool
) -> None:
    """NOTE [ Values between units ], 2 to 4, for one storage."""
    producer, following = positions[index], positions[index + 1]
    readers = [later for later in range(index + 1, len(positions)) if value in positions[later].reads]
    savers = [later for later in readers if positions[later].saves(value)]
    givers = [later for later in range(index + 1, len(positions)) if positions[later].gives_gradient(value)]
    gradient_bytes = _gradient_bytes(positions, index, value) if givers else 0
    if readers and readers[0] == index + 1:
        producer.outputs[value] = size
        is_handed_on = is_kept or following.hands_on(value)
        if following.seen is not None and len(readers) == 1 and not is_handed_on:
            following.sole_inputs[value] = size
    elif savers:
        producer.held[value] = size
    elif readers:
        positions[readers[0]].replay_inputs[value] = size
    if any(later > index + 1 for later in readers) or last_alive > index + 2:
        producer.runs_once = True
    if any(value in seen.remade for later in readers if (seen := positions[later].seen) is not None):
        producer.runs_once = True
    producer.value_gradients[value] = gradient_bytes
    if givers:
        first = index + 1 if givers[0] == index + 1 and len(givers) > 1 else index + 2
        waiting_bytes = positions[givers[-1]].waiting_gradient(value)
        for later in reversed(range(first, givers[-1])):
            if not positions[later].hands_on(value):
                positions[later].skip_gradient_bytes += waiting_bytes
            if later in givers and waiting_bytes != gradient_bytes:
                positions[later].summed_gradient_bytes += gradient_bytes
                waiting_bytes = gradient_bytes


def _let_go(costs: StepCosts, positions: list[Position]) -> None:
    """Lets what is held for later positions go before its producer's backward; the planner would let it go with that.

    Not with the backward of its first reader: a segment that is replayed holds it for all of its units.
    """
    for producer, following in pairwise(positions):
        kept = costs.caller_holds.keys() | _held_by_itself(costs, producer)
        gone_bytes = sum(size for value, size in producer.held.items() if value not in kept)
        following.gone_bytes += gone_bytes
        producer.back_bytes += gone_bytes


def _held_by_itself(costs: StepCosts, position: Position) -> set[int]:
    """Of what a position makes, what its own graph may hold until its backward."""
    if position.call is None or position.seen is None:
        return set(position.code.saved)
    numbers = position.seen.output_numbers
    return {
        number
        for option in costs.options[position.call]
        for number, is_held in zip(numbers, option.bytes.holds_outputs, strict=True)
        if is_held and number is not None
    }


def _gradient_bytes(positions: list[Position], index: int, value: int) -> int:
    """Of one value; where code made it, its first reader tells whether it needs one."""
    seen = positions[index].seen
    if seen is not None:
        return seen.gradients.get(value, 0)
    for later in positions[index + 1 :]:
        if later.seen is not None and value in later.seen.argument_gradients:
            return later.seen.argument_gradients[value]
    return 0


def encode(costs: StepCosts) -> Problem:
    """The planning problem of a measured step."""
    positions = positions_of(costs)
    _find_user_bytes(positions)
    if costs.structure.has_stale and not costs.accumulates:
        for position in positions:
            position.user_bytes += costs.residents.gradient_bytes
    _find_kept_outputs(costs, positions)
    gradients = _parameter_gradients(costs, positions)
    units = []
    for index, position in enumerate(positions):
        before = positions[index - 1] if index else None
        if position.call is None:
            options = [_code_option(position, before)]
        else:
            options = [_option(position, option, before) for option in costs.options[position.call]]
        units.append(
            Unit(
                position.name,
                options,
                output_bytes=sum(position.outputs.values()),
                gradient_bytes=position.gradient_bytes,
                parameter_gradient_bytes=gradients[index],
                left_bytes=_left_bytes(position, before),
                runs_once=position.runs_once,
            )
        )
    resident_bytes = costs.residents.total_bytes + costs.accumulates * costs.residents.gradient_bytes
    return Problem(units, resident_bytes=resident_bytes)


def _left_bytes(position: Position, before: Position | None) -> int:
    """By how much more is there once its backward has run; what waits for the last position's is its transient."""
    own_bytes = 0 if position.is_tail else position.waiting_bytes
    waiting_bytes = (0 if before is None else before.waiting_bytes) - own_bytes
    return waiting_bytes + position.back_bytes - position.gone_bytes


def _find_user_bytes(positions: list[Position]) -> None:
    """NOTE [ Values between units ], 5."""
    counted: set[int] = set()
    for index, position in enumerate(positions):
        before = positions[index - 1] if index else None
        if position.seen is not None:
            alive, given = position.seen.alive, position.seen.arguments
        else:
            alive, given = position.code.alive, {} if before is None else before.outputs
        position.user_bytes = sum(
            size for value, size in alive.items() if value not in counted and value not in given
        )
        for value in position.made:
            is_held = any(later.saves(value) for later in positions[index:])
            if value in position.outputs and value not in positions[index + 1].sole_inputs:
                is_held = True
            counted |= {value} if is_held else set()


def _find_kept_outputs(costs: StepCosts, positions: list[Position]) -> None:
    """NOTE [ Values between units ], 6: what the output holds on to, where the planner takes it to be free."""
    last = len(positions) - 1
    for value, size in costs.caller_holds.items():
        makers = [index for index, position in enumerate(positions) if value in position.made]
        until = last
        if makers:
            maker = positions[makers[0]]
            until = makers[0] if value in maker.outputs or maker.is_tail else last
            until -= maker.is_tail and value in maker.code.saved
        for position in positions[: until + 1]:
            position.kept_output_bytes += size


def _parameter_gradients(costs: StepCosts, positions: list[Position]) -> list[int]:
    """Bytes of the parameter gradients that appear in each position's backward: each once."""
    made = [0] * len(positions)
    if costs.accumulates:
        return made
    claimed: set[int] = set()
    for index, position in reversed(list(enumerate(positions))):
        seen = position.seen
        given = position.code.parameters if seen is None else _trained(seen) | seen.given_parameters
        made[index] = sum(size for parameter, size in given.items() if parameter not in claimed)
        claimed |= given.keys()
    # Parameters that only code without a position uses: their gradients come last.
    made[0] += costs.residents.gradient_bytes - sum(made)
    return made


def _trained(seen: SeenCall) -> dict[int, int]:
    return {id(p): p.numel() * p.element_size() for p in seen.module.parameters() if p.requires_grad}


def _code_option(position: Position, before: Position | None) -> Option:
    made = {value: size for value, size in position.code.saved.items() if value in position.made}
    own_bytes = sum(size for value, size in made.items() if value not in position.outputs)
    held_bytes = own_bytes + (0 if position.is_tail else position.held_bytes)
    transient_bytes = position.code.transient_bytes + position.user_bytes
    forward_bytes = max(0, transient_bytes - held_bytes - sum(position.outputs.values()))
    return Option(
        "keep",
        forward_s=position.seconds.forward_s,
        backward_s=position.seconds.backward_s,
        held_bytes=held_bytes,
        holds_output=any(value in position.outputs for value in made),
        forward_transient_bytes=forward_bytes,
        backward_transient_bytes=_backward_transient(
            position, before, position.code.backward_bytes, held_bytes=held_bytes
        ),
    )


def _backward_transient(
    position: Position, before: Position | None, needed_bytes: int, *, held_bytes: int
) -> int:
    """What a backward needs beyond the gradients of its own that the planner counts: NOTE 7.

    What code needs is known less exactly: at least what is counted.
    """
    if position.summed_gradient_bytes:
        needed_bytes = max(needed_bytes, position.given_bytes + position.summed_gradient_bytes - held_bytes)
    counted = position.gradient_bytes + (0 if before is None else before.gradient_bytes_from(position))
    if position.call is None:
        return max(0, needed_bytes - counted) + position.is_tail * position.waiting_bytes
    return needed_bytes - counted


def _held_arguments(position: Position, option: RecipeCosts) -> set[int]:
    """Of what a position is given, what it holds under an option."""
    assert position.seen is not None
    pairs = zip(position.seen.numbers, option.bytes.holds_arguments, strict=True)
    return {number for number, is_held in pairs if is_held and number is not None}


def _held_outputs(position: Position, option: RecipeCosts) -> dict[int, int]:
    """Of what a position makes and hands on, what its own graph holds under an option."""
    assert position.seen is not None
    pairs = zip(position.seen.output_numbers, option.bytes.holds_outputs, strict=True)
    numbers = {number for number, is_held in pairs if is_held}
    return {value: size for value, size in position.made.items() if value in numbers}


def _option(position: Position, option: RecipeCosts, before: Position | None) -> Option:
    cost = option.bytes
    held = _held_arguments(position, option)
    output_bytes = sum(position.outputs.values())
    held_outputs = _held_outputs(position, option)
    # To the planner only what the next position reads is an output, and it is held as a whole or not at all.
    holds_output = any(value in position.outputs for value in held_outputs)
    held_bytes = cost.held_bytes + position.held_bytes
    held_bytes += sum(
        size
        for value, size in held_outputs.items()
        if value not in position.held and not (holds_output and value in position.outputs)
    )
    held_bytes += sum(size for value, size in position.replay_inputs.items() if value in held)
    needed_bytes = cost.forward_peak_bytes + position.user_bytes
    return Option(
        option.recipe.name,
        forward_s=option.seconds.forward_s,
        # What holds nothing has nothing to set aside.
        again_s=option.seconds.replay_overhead_s if held_bytes or holds_output else 0.0,
        backward_s=option.seconds.backward_s,
        held_bytes=held_bytes,
        holds_output=holds_output,
        freed_input_bytes=sum(size for value, size in position.sole_inputs.items() if value not in held),
        forward_transient_bytes=max(0, needed_bytes - held_bytes - output_bytes),
        backward_transient_bytes=_backward_transient(
            position, before, cost.backward_peak_bytes, held_bytes=held_bytes
        ),
    )
