"""Values with lifetimes: exact bytes, moment by moment."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recoup.planning import (
    Backward,
    Forward,
    Keep,
    Lifetime,
    Option,
    Phase,
    Problem,
    Schedule,
    Unit,
    Use,
    simulate,
)
from recoup.planning.lifetimes import SWEPT, merged

KEEP = Option("keep", forward_s=1, backward_s=2, held_bytes=100, forward_transient_bytes=1)
LIGHT = Option("light", forward_s=1, backward_s=3, forward_transient_bytes=2, backward_transient_bytes=5)


def keep(unit: int, option: int = 0) -> Forward:
    return Forward(unit, keep=Keep.OPTION, option=option)


def b(unit: int, option: int = 0) -> Backward:
    return Backward(unit, option=option)


def forward(unit: int, *options: int) -> Use:
    return Use(Phase.FORWARD, unit, options)


def first(unit: int) -> Use:
    return Use(Phase.FIRST, unit)


def backward(unit: int, *options: int) -> Use:
    return Use(Phase.BACKWARD, unit, options)


def steps(*values: Lifetime, num_units: int = 3) -> Problem:
    """Units whose outputs and gradients are nothing, so that what is counted is held bytes, scratch and the values."""
    units = [Unit(f"u{index}", [KEEP, LIGHT], output_bytes=0) for index in range(num_units)]
    return Problem(units, values=values)


PLAIN = (keep(0), keep(1), keep(2), b(2), b(1), b(0))


def levels(problem: Problem, *actions: Forward | Backward) -> list[int]:
    """Bytes while each action runs and after it, beyond the same step without values."""
    schedule = Schedule(actions)
    with_values, without = simulate(problem, schedule), simulate(Problem(problem.units), schedule)
    pairs = zip(with_values.timeline[1:], without.timeline[1:], strict=True)
    return [one.num_bytes - other.num_bytes for one, other in pairs]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        # A skip: from its maker's forward to the backward of its last reader.
        (
            Lifetime("x", 7, made=forward(0), read=[forward(2), backward(2)]),
            [7, 7, 7, 7, 7, 7, 7, 0, 0, 0, 0, 0],
        ),
        # Read by a forward only.
        (Lifetime("x", 7, made=forward(0), read=[forward(1)]), [7, 7, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        # A variable of the user's, and an output that nobody reads.
        (Lifetime("x", 7, made=forward(0), read=[first(2)]), [7, 7, 7, 7, 7, 0, 0, 0, 0, 0, 0, 0]),
        (Lifetime("x", 7, made=forward(0)), [7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        # An output that the caller holds.
        (Lifetime("x", 7, made=forward(1), stays=True), [0, 0, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7]),
        # Held under the other option only.
        (Lifetime("x", 7, made=forward(0), read=[backward(1, 1)]), [7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        # A gradient that waits, beside the scratch and as a part of it.
        (Lifetime("g", 7, made=backward(2), read=[backward(0)]), [0, 0, 0, 0, 0, 0, 7, 7, 7, 7, 7, 0]),
        (
            Lifetime("g", 7, made=backward(2), read=[backward(0)], in_scratch=True),
            [0, 0, 0, 0, 0, 0, 0, 7, 7, 7, 0, 0],
        ),
        # There before the step, and freed with the first forward of the last unit.
        (Lifetime("old", 7, made=None, read=[first(2)]), [7, 7, 7, 7, 7, 0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_when_a_value_is_there(value: Lifetime, expected: list[int]) -> None:
    assert levels(steps(value), *PLAIN) == expected


def test_under_the_option_that_holds_it() -> None:
    value = Lifetime("x", 7, made=forward(0), read=[forward(1), backward(1, 1)])
    actions = (keep(0), keep(1, 1), keep(2), b(2), b(1, 1), b(0))
    assert levels(steps(value), *actions) == [7, 7, 7, 7, 7, 7, 7, 7, 7, 0, 0, 0]


def test_made_again_in_a_replay() -> None:
    """Dropped inside a segment, and made again by its replay; what the caller holds is the first instance."""
    inside = Lifetime("x", 7, made=forward(0), read=[forward(1), backward(1)])
    actions = (Forward(0), Forward(1), keep(2), b(2), keep(0), keep(1), b(1), b(0))
    assert levels(steps(inside), *actions) == [7, 7, 7, 0, 0, 0, 0, 0, 7, 7, 7, 7, 7, 0, 0, 0]
    held = Lifetime("x", 7, made=forward(0), read=[forward(1), backward(1)], stays=True)
    assert levels(steps(held), *actions) == [7, 7, 7, 7, 7, 7, 7, 7, 14, 14, 14, 14, 14, 7, 7, 7]


def test_what_stays_is_made_again_beside_the_scratch_of_a_backward_that_replays_a_row() -> None:
    """A backward without a forward of its own, of a unit that was swept over: a second instance while it runs."""
    held = Lifetime("x", 7, made=forward(1), stays=True)
    in_a_row = (Forward(0, keep=Keep.INPUT), Forward(1), keep(2), b(2), keep(0), b(1, 1), b(0))
    assert levels(steps(held), *in_a_row) == [0, 0, 7, 7, 7, 7, 7, 7, 7, 7, 14, 7, 7, 7]
    # From its own input, under an option that was kept, or by a forward of its own, the backward makes nothing again.
    alone = (keep(0), Forward(1, keep=Keep.INPUT), keep(2), b(2), b(1, 1), b(0))
    assert levels(steps(held), *alone) == [0, 0, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7]
    kept = (keep(0), keep(1, 1), keep(2), b(2), b(1, 1), b(0))
    assert levels(steps(held), *kept) == [0, 0, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7]
    replayed = (Forward(0, keep=Keep.INPUT), Forward(1), keep(2), b(2), keep(0), keep(1), b(1), b(0))
    assert levels(steps(held), *replayed) == [0, 0, 7, 7, 7, 7, 7, 7, 7, 7, 14, 7, 7, 7, 7, 7]
    # What does not stay is read by the replay, and what the scratch counts is not counted again.
    for value in (replace(held, stays=False), replace(held, in_scratch=True)):
        assert levels(steps(value), *in_a_row)[10:] == [7 * value.stays] * 4


def test_values_that_live_alike_become_one() -> None:
    one, other = Lifetime("x", 7, made=forward(0)), Lifetime("x", 5, made=forward(0), stays=True)
    assert merged([one, other, replace(one, num_bytes=2)]) == (replace(one, num_bytes=9), other)
    assert merged([replace(one, num_bytes=0)]) == ()


def test_an_argument_from_outside_is_held_for_the_replay_and_until_its_backward() -> None:
    mask = Lifetime("mask", 7, made=forward(0), read=[forward(1)])
    actions = (keep(0), Forward(1, keep=Keep.INPUT), keep(2), b(2), keep(1), b(1), b(0))
    assert levels(steps(mask), *actions) == [7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 0, 0, 0]


def test_what_only_a_sweep_leaves() -> None:
    copies = Lifetime("copies", 7, made=forward(0, SWEPT), read=[forward(0)])
    assert levels(steps(copies), *PLAIN) == [0] * 12
    actions = (Forward(0), keep(1), keep(2), b(2), b(1), keep(0), b(0))
    # Of the one unit that reads them twice, until its backward has run.
    assert levels(steps(copies), *actions) == [7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 0, 0, 0]
    for_light = Lifetime("copies", 7, made=forward(0, SWEPT), read=[forward(0, 1)])
    assert set(levels(steps(for_light), *actions)[1:]) == {0}


def test_what_a_sweep_leaves_for_as_long_as_its_segment_lives() -> None:
    of_segment = Use(Phase.SEGMENT, 1)
    copies = Lifetime("copies", 7, made=Use(Phase.FIRST, 1, (SWEPT,)), read=[of_segment])
    assert levels(steps(copies), *PLAIN) == [0] * 12
    actions = (Forward(0), Forward(1), keep(2), b(2), keep(0), keep(1), b(1), b(0))
    # Unit 0 begins the segment: beyond the backward of unit 1, until its own has run.
    assert levels(steps(copies), *actions) == [0, 0, *[7] * 13, 0]
    # A sweep inside the replay leaves nothing more; the segment is the outermost.
    nested = (
        Forward(0),
        Forward(1),
        keep(2),
        b(2),
        keep(0),
        Forward(1, keep=Keep.INPUT),
        keep(1),
        b(1),
        b(0),
    )
    assert levels(steps(copies), *nested) == [0, 0, *[7] * 15, 0]
    for_light = Lifetime("copies", 7, made=copies.made, read=[Use(Phase.SEGMENT, 1, (1,))])
    assert set(levels(steps(for_light), *actions)[4:]) == {0}
