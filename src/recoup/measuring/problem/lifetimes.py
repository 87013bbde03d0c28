"""From measured calls to a planning problem: every storage becomes a value with a lifetime.

NOTE [ Values between units ]
    1. Positions are the units' calls and, between them, the code that made or saved anything; the tail (the rest
       of the model and the loss) is the last. Code only keeps, and runs once.
    2. A storage that a position makes is read by the forwards that are given it, by the backwards whose graphs hold it
       under an option (its own among them), and by the first forwards during which the user's variables hold it.
    3. A position runs once if a later one than the next reads what it makes, or if the next one is given a view of it:
       what replays several calls knows outputs by identity, and would hold the view.
    4. The gradient of a storage lives from the last backward that computes it to the backward of its producer. Where
       another backward gives it one, their sum is made beside both: autograd adds in place where it can, which a view
       or a dispatch mode (the memory tracker) keeps it from. Gradients that are views of one storage (of a sum, of a
       concatenation) are one value with several readers, whether code or a unit gave them. A unit that reads one of
       them, or adds to it, is measured with a view: where the storage outlives the unit's backward, the backward frees
       nothing as it goes on, and a sum takes memory from the first operation that adds; else the backward begins with
       the whole storage. A position that hands a storage on (a view, a change in place)
       reads one gradient and makes another.
    5. What the caller holds, the loss and perhaps the model's output, stays. So do parameter gradients. Gradients of
       the step before that are cleared before the backward live in the forward only.
    6. A segment's sweep leaves copies for the replay, of buffers and of decisions. They live as long as the segment:
       until the backward of its first unit has run.
    7. Scratch of a backward includes the gradients that it reads and makes, as it was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from recoup.measuring.problem.costs import StepCosts
from recoup.measuring.problem.gradients import Gradients, PassedGradients
from recoup.measuring.problem.positions import Position, positions_of
from recoup.model.recipe import RECOMPUTE, Recipe
from recoup.planning import Option, Problem, Unit
from recoup.planning.lifetimes import SWEPT, Lifetime, Phase, Use, merged
from recoup.planning.problem import Scratch

__all__ = ["SUMMED", "encode"]

SUMMED = "gradients of parameters that are summed up"


def encode(costs: StepCosts) -> Problem:
    """The planning problem of a measured step."""
    positions = positions_of(costs)
    gradients = Gradients(positions)
    activations = list(_activations(costs, positions))
    made_bytes, read_bytes = [0] * len(positions), [0] * len(positions)
    for value in activations:
        if value.made and not value.in_scratch:
            made_bytes[value.made.unit] += value.num_bytes
        readers = {use.unit for use in value.read if use.phase is Phase.BACKWARD}
        if len(readers) == 1 and not value.stays:
            read_bytes[readers.pop()] += value.num_bytes
    parameter_bytes = _parameter_gradients(costs, positions)
    units = [
        Unit(
            position.name,
            list(_options(costs, position, gradients.at(index), made_bytes[index], read_bytes[index])),
            output_bytes=0,
            parameter_gradient_bytes=parameter_bytes[index],
            runs_once=position.runs_once,
        )
        for index, position in enumerate(positions)
    ]
    values = merged([*activations, *gradients.values, *_copies(costs, positions), *_shared(costs, positions)])
    resident_bytes = costs.residents.total_bytes + bool(costs.accumulates) * costs.residents.gradient_bytes
    return Problem(units, resident_bytes=resident_bytes, values=values)


def _options(
    costs: StepCosts, position: Position, gradients: PassedGradients, made_bytes: int, read_bytes: int
) -> Iterator[Option]:
    """The ways to run a position.

    Args:
        costs: of the step.
        position: to run.
        gradients: that its backward reads and makes.
        made_bytes: of the values that its forward makes.
        read_bytes: of the values that only its backward reads, which frees them on its way.
    """
    if position.call is None:
        # It frees a gradient that waited as soon as it has added its own, before the rest of it runs.
        freed_bytes = gradients.counted_bytes + gradients.ended_bytes
        backward_bytes = max(position.code.backward_bytes - freed_bytes, gradients.passed_bytes)
        # A gradient that waited as a view is not added to in place: the sum takes room of its own.
        backward_bytes = max(backward_bytes, gradients.within_bytes)
        if gradients.apart_bytes:
            given_bytes = sum(position.given_gradients.values()) - gradients.waiting_bytes
            backward_bytes = max(backward_bytes, given_bytes + gradients.apart_bytes - read_bytes)
        yield Option(
            "keep",
            forward_s=position.seconds.forward_s,
            backward_s=position.seconds.backward_s,
            forward_transient_bytes=max(0, position.code.transient_bytes - made_bytes),
            backward_transient_bytes=backward_bytes,
        )
        return
    for option in costs.options[position.call]:
        cost = option.bytes
        backward_bytes = cost.backward_peak_bytes - gradients.counted_bytes
        if gradients.summed_bytes:
            # The sum is made when the unit's own backward has freed what it held.
            given_bytes = sum(position.given_gradients.values()) + sum(position.parameters.values())
            given_bytes += gradients.summed_bytes - gradients.waiting_bytes
            backward_bytes = max(backward_bytes, given_bytes - cost.held_bytes - read_bytes)
        made = Option(
            option.recipe.name,
            forward_s=option.seconds.forward_s,
            # What holds nothing has nothing to store in a replay.
            again_s=option.seconds.replay_overhead_s if cost.held_bytes or cost.holds_output else 0.0,
            backward_s=option.seconds.backward_s,
            held_bytes=cost.held_bytes,
            forward_transient_bytes=max(0, cost.forward_peak_bytes - cost.held_bytes - made_bytes),
            backward_transient_bytes=max(0, backward_bytes),
        )
        yield _without_backward(made) if _is_dead(costs, position) else made


def _is_dead(costs: StepCosts, position: Position) -> bool:
    """Whether nobody gives its outputs a gradient or holds them: its graph dies with them."""
    assert position.seen is not None
    held = costs.caller_holds
    return (
        bool(position.seen.wanted)
        and not any(position.seen.wanted)
        and not any(s in held for s in position.made)
    )


def _without_backward(option: Option) -> Option:
    forward_bytes = option.scratch.forward + option.held_bytes
    return replace(option, held_bytes=0, backward_s=0.0, again_s=0.0, scratch=Scratch(forward_bytes))


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


def _copies(costs: StepCosts, positions: list[Position]) -> Iterator[Lifetime]:
    """NOTE [ Values between units ], 6."""
    for index, position in enumerate(positions):
        if position.call is None or position.runs_once:
            continue
        held = costs.copied_bytes[position.call]
        left = [_copied_bytes(option.recipe, held) for option in costs.options[position.call]]
        least_bytes = min(left)
        made = Use(Phase.FIRST, index, (SWEPT,))
        yield Lifetime("copies for a replay", least_bytes, made=made, read=(Use(Phase.SEGMENT, index),))
        for number, size in enumerate(left):
            read = (Use(Phase.SEGMENT, index, (number,)),)
            yield Lifetime("copies for a replay", size - least_bytes, made=made, read=read)


def _copied_bytes(recipe: Recipe, held: Mapping[Recipe, int]) -> int:
    """What a sweep leaves of a unit that is replayed under a recipe.

    Modules inside it that are replayed again leave copies too, as does the whole unit where it is replayed again. Where
    that was not measured, at most as much as with further modules, or else as the whole unit does.
    """
    known = [
        size for whole, size in held.items() if whole.cut == recipe.cut and {*recipe.inner} <= {*whole.inner}
    ]
    if known:
        return min(known) + (held.get(RECOMPUTE, min(known)) if recipe.whole else 0)
    return min(held.values(), default=0) * (2 if recipe.inner else 1)


def _shared(costs: StepCosts, positions: list[Position]) -> Iterator[Lifetime]:
    """Gradients of parameters that several positions use, which autograd sums before it adds them to earlier ones."""
    users: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    for index, position in enumerate(positions):
        for parameter, size in position.parameters.items():
            users.setdefault(parameter, []).append(index)
            sizes[parameter] = size
    for parameter, found in users.items():
        if costs.accumulates and len(found) > 1:
            made, read = Use(Phase.BACKWARD, found[-1]), (Use(Phase.BACKWARD, found[0]),)
            yield Lifetime(SUMMED, sizes[parameter], made=made, read=read, in_scratch=True)


def _parameter_gradients(costs: StepCosts, positions: list[Position]) -> list[int]:
    """Bytes of the parameter gradients that appear in each position's backward: each once."""
    made = [0] * len(positions)
    if costs.accumulates:
        return made
    claimed: set[int] = set()
    for index, position in reversed(list(enumerate(positions))):
        given = {} if position.seen and _is_dead(costs, position) else position.parameters
        made[index] = sum(size for parameter, size in given.items() if parameter not in claimed)
        claimed |= given.keys()
    # Parameters that only code without a position uses: their gradients come last.
    made[0] += costs.residents.gradient_bytes - sum(made)
    return made
