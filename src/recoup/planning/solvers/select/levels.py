"""A problem as ``select`` reads it: what each choice of each unit holds, needs and takes.

NOTE [ One constraint per unit ]
    A selection runs all forwards in order and then all backwards; a unit may run its forward a second time
    right before its backward (unless it ``runs_once``), and nothing else is replayed. All moments of the step
    that concern unit *i* (its forward, its replay, its backward, and the level that the backward before it
    left) have the form

        constant of the moment + H_i + something that only the choice for unit i decides,

    where H_i is the sum of the bytes held by the units before *i*: outputs stay until the next unit's
    backward whatever is chosen, and later units' held bytes come after *i*'s forward and are gone before its
    backward. So the moments of unit *i* fold into one number per choice, ``need_bytes``, and a selection fits
    the budget M if and only if

        H_i + need_bytes[i, choice of i] <= M    for every unit i,    and    floor_bytes <= M.

    Skips are in the constants: the gradient of a skip's source appears with the backward of its last reader.

NOTE [ Inputs that go ]
    A kept unit whose option frees its input holds so much less (below 0 if it holds nothing else), unless the
    unit before holds its output: that is for another choice to say. So schedules count inputs as freed only where
    no option of the unit before holds its output, and bounds wherever one may not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from recoup.planning.actions import Action, Backward, Forward, Keep, Value
from recoup.planning.problem import Problem
from recoup.planning.schedule import Schedule

__all__ = [
    "Choice",
    "Floats",
    "Ints",
    "Levels",
    "Move",
    "Run",
    "all_choices",
    "backward_actions",
    "forward_action",
]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# The sum of the slowest choices in ticks: sums stay exact in 64-bit integers and nearly so in floats.
_TICKS = 1 << 48


class Run(Enum):
    """How a choice runs its unit."""

    KEPT = "kept"
    """The forward leaves what the option holds."""
    PLAIN = "plain"
    """The forward leaves its input only, and the option's backward needs no more."""
    REPLAYED = "replayed"
    """The forward leaves its input only, and runs again with the option right before the backward."""


class Move(NamedTuple):
    """A value that leaves over a link when the unit's forward has run, and is back for its backward."""

    unit: int
    value: Value
    link: str
    num_bytes: int


class Choice(NamedTuple):
    """How one unit runs, and what follows from it.

    ``forward_need_bytes`` and ``backward_need_bytes`` are the most of its moments in each pass, beside what
    earlier units hold; ``need_bytes`` is the larger. What ``moves`` away is not in ``held_bytes``, which is
    below 0 where an output leaves that the needs of later units count. ``select`` itself moves nothing.
    """

    option: int
    run: Run
    held_bytes: int
    forward_need_bytes: int
    backward_need_bytes: int
    seconds: float
    moves: tuple[Move, ...] = ()

    @property
    def need_bytes(self) -> int:
        """The most bytes of all its moments, beside what earlier units hold."""
        return max(self.forward_need_bytes, self.backward_need_bytes)


class Levels:
    """The choices of every unit in flat arrays; those of unit *i* are ``first[i]`` up to ``first[i + 1]``.

    A choice that another one of the same unit matches or beats in held bytes, need and seconds is left out.

    Args:
        problem: any.
        choices: of every unit, if not ``all_choices``.

    Attributes:
        choices: of each unit.
        held_bytes, need_bytes, ticks: of all choices, flat; ``ticks`` are seconds over ``tick_s``, rounded.
        first: where each unit's choices begin.
        most_before: the most bytes that the units before each one can hold.
        floor_bytes: what is there at the start or the end of the step, whatever is chosen.

    >>> from recoup.planning.problem import Unit
    >>> a = Unit.keep_or_recompute("a", forward_s=1, backward_s=2, held_bytes=100, output_bytes=10)
    >>> levels = Levels(Problem([a], resident_bytes=1000))
    >>> [(choice.option, choice.held_bytes, choice.need_bytes) for choice in levels.choices[0]]
    [(0, 100, 1110), (1, 0, 1120)]
    """

    def __init__(self, problem: Problem, choices: Sequence[Sequence[Choice]] | None = None) -> None:
        self.choices = [_undominated(own) for own in (choices or all_choices(problem))]
        flat = [choice for choices in self.choices for choice in choices]
        self.num_units = len(self.choices)
        self.first = np.cumsum([0, *map(len, self.choices)])
        self.owner = np.repeat(np.arange(self.num_units), np.diff(self.first))
        self.held_bytes: Ints = np.array([choice.held_bytes for choice in flat], dtype=np.int64)
        self.need_bytes: Ints = np.array([choice.need_bytes for choice in flat], dtype=np.int64)
        slowest_s = math.fsum(max(choice.seconds for choice in choices) for choices in self.choices)
        self.tick_s = (slowest_s or 1.0) / _TICKS
        self.ticks: Ints = np.rint([choice.seconds / self.tick_s for choice in flat]).astype(np.int64)
        self._by_held = [
            sorted((choice.held_bytes, choice.need_bytes) for choice in choices) for choices in self.choices
        ]
        most = np.maximum.reduceat(self.held_bytes, self.first[:-1])
        self.most_before: Ints = np.concatenate([[0], np.cumsum(most)[:-1]])
        fixed = problem.resident_bytes + problem.input_bytes
        lasting = sum(unit.lasting_bytes for unit in problem.units)
        self.floor_bytes = max(fixed, fixed + problem.input_gradient_bytes + lasting)

    def least_before(self, budget_bytes: int) -> Ints:
        """The fewest bytes that the units before each one can hold within a feasible budget."""
        least, held_bytes = [], 0
        for choices in self._by_held:
            least.append(held_bytes)
            room = budget_bytes - held_bytes
            held_bytes += next(held for held, need in choices if need <= room)
        return np.array(least, dtype=np.int64)

    def levels(self, selection: Sequence[int]) -> list[int]:
        """The most bytes during each unit's moments, exactly."""
        levels, held_bytes = [], 0
        for choices, position in zip(self.choices, selection, strict=True):
            levels.append(held_bytes + choices[position].need_bytes)
            held_bytes += choices[position].held_bytes
        return levels

    def peak_bytes(self, selection: Sequence[int]) -> int:
        """The peak of a selection, exactly as ``simulate`` has it."""
        return max(self.floor_bytes, *self.levels(selection))

    def seconds(self, selection: Sequence[int]) -> float:
        """The seconds of a selection."""
        pairs = zip(self.choices, selection, strict=True)
        return math.fsum(choices[position].seconds for choices, position in pairs)

    def schedule(self, selection: Sequence[int]) -> Schedule:
        """All forwards in order, then all backwards."""
        chosen = [choices[position] for choices, position in zip(self.choices, selection, strict=True)]
        return Schedule(
            [
                *(forward_action(unit, choice) for unit, choice in enumerate(chosen)),
                *(
                    action
                    for unit in reversed(range(len(chosen)))
                    for action in backward_actions(unit, chosen[unit])
                ),
            ]
        )

    def fastest(self) -> list[int]:
        """The selection with the least seconds; among equals the one that holds and needs least."""
        return [
            min(range(len(choices)), key=lambda k: (choices[k].seconds, choices[k].held_bytes, k))
            for choices in self.choices
        ]

    def smallest(self) -> tuple[int, list[int]]:
        """The smallest feasible budget, and a selection that reaches it.

        Backwards over the units, m_i = min over choices of max(need, m_{i+1} + held): what must be free as
        unit *i* starts grows with what must be free after it, so the least at each unit is enough.
        """
        free_bytes, selection = 0, []
        for choices in reversed(self.choices):
            needs = [max(choice.need_bytes, free_bytes + choice.held_bytes) for choice in choices]
            free_bytes = min(needs)
            selection.append(needs.index(free_bytes))
        selection.reverse()
        return max(free_bytes, self.floor_bytes), selection


def forward_action(unit: int, choice: Choice) -> Action:
    """The forward of a unit in the first pass."""
    if choice.run is Run.KEPT:
        return Forward(unit, keep=Keep.OPTION, option=choice.option)
    return Forward(unit, keep=Keep.INPUT)


def backward_actions(unit: int, choice: Choice) -> list[Action]:
    """The backward of a unit, with the forward that it needs again."""
    again: list[Action] = []
    if choice.run is Run.REPLAYED:
        again.append(Forward(unit, keep=Keep.OPTION, option=choice.option))
    return [*again, Backward(unit, option=choice.option)]


def all_choices(problem: Problem, *, is_bound: bool = False) -> list[list[Choice]]:
    """The choices of every unit, with the constants of NOTE [ One constraint per unit ].

    Args:
        problem: any.
        is_bound: whether they are for a bound, and not for schedules: see NOTE [ Inputs that go ].
    """
    units = problem.units
    goes = _inputs_that_go(problem, is_bound=is_bound)
    # Outputs and parameter gradients that are there; gradients of outputs come and go with the backwards.
    forward_bytes = problem.resident_bytes + problem.input_bytes
    waiting = _waiting_gradients(problem)
    after_bytes = sum(unit.lasting_bytes for unit in units)
    found = []
    for index, unit in enumerate(units):
        after_bytes -= unit.lasting_bytes
        before_bytes, new_bytes = waiting[index]
        backward_bytes = forward_bytes + after_bytes + before_bytes
        forward_bytes += unit.output_bytes
        choices: list[Choice] = []
        replayed: list[Choice] = []
        for position, option in enumerate(unit.options):
            kept_bytes = option.held_bytes + option.holds_output * unit.output_bytes
            run_bytes = max(option.replay_transient_bytes, new_bytes + option.backward_transient_bytes)
            kept_need = forward_bytes + option.held_bytes + option.forward_transient_bytes
            plain_need = forward_bytes + unit.plain_transient_bytes
            back_need = backward_bytes + kept_bytes + run_bytes
            again_need = (
                backward_bytes + unit.output_bytes + option.held_bytes + option.forward_transient_bytes
            )
            plain_s, own_s = unit.lightest.forward_s, (option.forward_s, option.extra_s, option.backward_s)
            freed_bytes, kept_s = option.freed_input_bytes * goes[index], math.fsum(own_s)
            held_bytes = option.held_bytes - freed_bytes
            replayed_s = math.fsum((plain_s, option.again_s, *own_s))
            choices.append(Choice(position, Run.KEPT, held_bytes, kept_need, back_need - freed_bytes, kept_s))
            if unit.runs_once:
                continue
            if not option.needs_forward:
                direct_s = math.fsum((plain_s, *own_s[1:]))
                choices.append(Choice(position, Run.PLAIN, 0, plain_need, back_need, direct_s))
            both_need = max(again_need, back_need)
            replayed.append(Choice(position, Run.REPLAYED, 0, plain_need, both_need, replayed_s))
        # Of equal choices the first stays: an option of its own goes before a replay of another.
        found.append(choices + replayed)
    return found


def _inputs_that_go(problem: Problem, *, is_bound: bool) -> list[bool]:
    """For each unit, whether its input counts as freed by options that free it."""
    skipped_from = {source for unit in problem.units for source in unit.skips}
    goes = [False]
    for index, unit in enumerate(problem.units[:-1]):
        holding = [option.holds_output for option in unit.options]
        # A unit that may run again may leave its output to others whatever its option.
        is_held = all(holding) and unit.runs_once if is_bound else any(holding)
        goes.append(not is_held and index not in skipped_from)
    return goes


def _waiting_gradients(problem: Problem) -> list[tuple[int, int]]:
    """For each unit: gradients of outputs that are there before its backward, and those it adds."""
    units, there = problem.units, {problem.num_units - 1}
    total_bytes = units[-1].gradient_bytes
    found = []
    for index in reversed(range(problem.num_units)):
        fresh = [source for source in (index - 1, *units[index].skips) if source not in there]
        new_bytes = sum(
            units[source].gradient_bytes if source >= 0 else problem.input_gradient_bytes for source in fresh
        )
        found.append((total_bytes, new_bytes))
        there.update(fresh)
        total_bytes += new_bytes - units[index].gradient_bytes
    found.reverse()
    return found


def _undominated(choices: Sequence[Choice]) -> list[Choice]:
    def beats(one: Choice, other: Choice) -> bool:
        return (
            one.held_bytes <= other.held_bytes
            and one.forward_need_bytes <= other.forward_need_bytes
            and one.backward_need_bytes <= other.backward_need_bytes
            and one.seconds <= other.seconds
        )

    kept: list[Choice] = []
    for choice in choices:
        if not any(beats(one, choice) for one in kept):
            kept = [one for one in kept if not beats(choice, one)] + [choice]
    return kept
