"""What people do without a planner, for comparison and as a last resort. Skips are understood.

Each baseline is a family of schedules that does not depend on the budget; its answer is the fastest member
that fits, so that more bytes never cost more seconds. Segments follow Chen, Xu, Zhang, Guestrin: Training
deep nets with sublinear memory cost (2016); the last segment is not replayed, since its backward comes at
once. An output that a later unit reads by a skip stays until that unit's backward has run. A unit that
``runs_once`` ends a segment and is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import pairwise

from recoup.planning.actions import Action, Backward, Forward, Keep
from recoup.planning.problem import Problem, Unit
from recoup.planning.schedule import Schedule
from recoup.planning.simulate import simulate
from recoup.planning.solvers.base import PERSISTENT_SCHEDULES, Candidate, Prepared, Solver

__all__ = [
    "BASELINES",
    "BY_HAND",
    "REPLAY",
    "Baseline",
    "actions_for",
    "every",
    "fastest_option",
    "greedy",
    "keep_all",
    "ladder_choices",
    "one_option_each",
    "sqrt_segments",
]

#: What a plan names as its solver if a person could have made it.
BY_HAND = "by hand"
#: A choice that keeps a unit's input only.
REPLAY = -1


def fastest_option(unit: Unit) -> int:
    """The index of a unit's option with the least seconds, and the fewest held bytes among those.

    Baselines and groups replay under it too, though another may have fewer seconds there (``again_s``).
    """
    options = unit.options
    return min(range(len(options)), key=lambda index: (options[index].total_s, options[index].held_bytes))


def every(problem: Problem, length: int) -> Schedule:
    """A checkpoint every ``length`` units; each segment but the last is replayed before its backward.

    >>> units = [
    ...     Unit.keep_or_recompute(f"b{i}", forward_s=1, backward_s=2, held_bytes=9, output_bytes=1)
    ...     for i in range(4)
    ... ]
    >>> print(every(Problem(units), 2))
    F0 F1 F2:0 F3:0 B3 B2 F0:0 F1:0 B1 B0
    """
    segments = _segments(problem, length)
    passing = [segment.start for segment in segments if not problem.units[segment.start].runs_once]
    # All that follows this one is kept anyway, so its own backward comes before anything is replayed.
    last_passing = max(passing, default=0)
    skipped = {source for unit in problem.units for source in unit.skips}
    forwards: list[Action] = []
    backwards: list[Action] = []
    for units in segments:
        kept = [(unit, fastest_option(problem.units[unit])) for unit in units]
        keeping = [Forward(unit, keep=Keep.OPTION, option=option) for unit, option in kept]
        is_replayed = units.start < last_passing and not problem.units[units.start].runs_once
        forwards += (
            [_passing(unit, keeps_input=unit == units.start or unit - 1 in skipped) for unit in units]
            if is_replayed
            else keeping
        )
        replay = keeping if is_replayed else []
        backwards = [*replay, *(Backward(unit, option=option) for unit, option in reversed(kept)), *backwards]
    return Schedule([*forwards, *backwards])


def _segments(problem: Problem, length: int) -> list[range]:
    """Segments of ``length`` units; units that run once are segments of their own."""
    starts = [0]
    for unit in range(1, problem.num_units):
        is_apart = problem.units[unit].runs_once or problem.units[unit - 1].runs_once
        if is_apart or unit - starts[-1] == length:
            starts.append(unit)
    return [range(first, stop) for first, stop in pairwise([*starts, problem.num_units])]


def _passing(unit: int, *, keeps_input: bool) -> Forward:
    """A forward that keeps no results; its input stays if it is a checkpoint or has other readers."""
    return Forward(unit, keep=Keep.INPUT if keeps_input and unit else Keep.NOTHING)


def keep_all(problem: Problem) -> Schedule:
    """Everything stays, under each unit's fastest option."""
    return one_option_each(problem, map(fastest_option, problem.units))


def sqrt_segments(problem: Problem) -> Schedule:
    """About √N segments of about √N units."""
    return every(problem, math.isqrt(problem.num_units - 1) + 1)


def one_option_each(problem: Problem, choices: Iterable[int]) -> Schedule:
    """Every unit under one option; ``-1`` keeps a unit's input only and replays it before its backward.

    A unit that runs once must have an option.

    >>> unit = Unit.keep_or_recompute("a", forward_s=1, backward_s=2, held_bytes=9, output_bytes=1)
    >>> print(one_option_each(Problem([unit]), [-1]))
    F0 F0:0 B0
    """
    chosen = [actions_for(problem, unit, choice) for unit, choice in enumerate(choices)]
    backwards = [action for _, actions in reversed(chosen) for action in actions]
    return Schedule([*(forward for forward, _ in chosen), *backwards])


def actions_for(problem: Problem, unit: int, choice: int) -> tuple[Action, list[Action]]:
    """The forward of a unit under a choice, and what runs in its turn of the backward."""
    if choice != REPLAY:
        return Forward(unit, keep=Keep.OPTION, option=choice), [Backward(unit, option=choice)]
    option = fastest_option(problem.units[unit])
    again: list[Action] = [Forward(unit, keep=Keep.OPTION, option=option), Backward(unit, option=option)]
    return _passing(unit, keeps_input=True), again


def greedy(problem: Problem) -> list[Schedule]:
    """From keeping everything down to keeping nothing: whatever frees most bytes per second goes first."""
    states = ladder_choices(problem, num_states=_num_members(problem))
    return [one_option_each(problem, choices) for choices in states]


def _num_members(problem: Problem) -> int:
    """How many members a family may have: fewer for long chains, since each is simulated."""
    return max(8, min(64, 64_000 // problem.num_units))


def ladder_choices(problem: Problem, *, num_states: int) -> list[tuple[int, ...]]:
    """States on the way from every unit's fastest choice to its lightest, cheapest bytes first.

    At most ``num_states`` of them, evenly spaced, the first and the last included.
    """
    steps: list[tuple[float, int, int, int]] = []
    for index, unit in enumerate(problem.units):
        for rung, (upper, lower) in enumerate(pairwise(_ladder(unit))):
            steps.append((_rate(upper, lower), index, rung, lower[2]))
    choices = [fastest_option(unit) for unit in problem.units]
    states = [tuple(choices)]
    wanted = {len(steps) * state // (num_states - 1) for state in range(num_states)}
    for taken, (_, index, _, choice) in enumerate(sorted(steps), start=1):
        choices[index] = choice
        if taken in wanted:
            states.append(tuple(choices))
    return states


def _ladder(unit: Unit) -> list[tuple[int, float, int]]:
    """A unit's choices (held bytes, seconds, option) from its fastest down, each step dearer."""
    fastest = unit.options[fastest_option(unit)]
    choices = [(option.held_bytes, option.total_s, index) for index, option in enumerate(unit.options)]
    if not unit.runs_once:
        choices.append((0, unit.lightest.forward_s + fastest.again_s + fastest.total_s, REPLAY))
    choices.sort(key=lambda choice: (-choice[0], choice[1], -choice[2]))
    ladder = [(fastest.held_bytes, fastest.total_s, fastest_option(unit))]
    for choice in choices:
        if choice[0] >= ladder[-1][0]:
            continue
        # Steps must get dearer per byte, or a later one would be taken before an earlier one.
        while len(ladder) > 1 and _rate(ladder[-1], choice) <= _rate(ladder[-2], ladder[-1]):
            ladder.pop()
        ladder.append(choice)
    return ladder


def _rate(upper: tuple[int, float, int], lower: tuple[int, float, int]) -> float:
    return (lower[1] - upper[1]) / (upper[0] - lower[0])


class Baseline(Solver):
    """A fixed family of schedules as a solver."""

    schedules = PERSISTENT_SCHEDULES

    def __init__(self, name: str, *, family: Callable[[Problem], list[Schedule]]) -> None:
        self.name = name
        self.family = family

    def applies(self, problem: Problem) -> bool:
        """Baselines apply to everything."""
        return True

    def prepare(self, problem: Problem, *, time_limit_s: float) -> Prepared:
        """Simulates the whole family."""
        return _PreparedFamily(problem, self.family(problem))


class _PreparedFamily(Prepared):
    def __init__(self, problem: Problem, schedules: list[Schedule]) -> None:
        self._members: list[tuple[float, int, Schedule]] = []
        for schedule in schedules:
            result = simulate(problem, schedule)
            self._members.append((result.seconds, result.peak_bytes, schedule))

    @property
    def smallest_bytes(self) -> int:
        """The lowest peak in the family."""
        return min(peak_bytes for _, peak_bytes, _ in self._members)

    def best(self, budget_bytes: int) -> Candidate | None:
        """The fastest member that fits; of equal ones, that with the lower peak."""
        fitting = [member for member in self._members if member[1] <= budget_bytes]
        return Candidate(min(fitting, key=lambda member: member[:2])[2]) if fitting else None

    def suggested_budgets(self) -> list[int]:
        """The members' peaks."""
        return sorted({peak_bytes for _, peak_bytes, _ in self._members})


def _every_length(problem: Problem) -> list[Schedule]:
    last, num_members = problem.num_units, _num_members(problem)
    lengths = set(range(1, last + 1))
    if last > num_members:
        lengths = {round(last ** (member / (num_members - 1))) for member in range(num_members)}
    return [every(problem, length) for length in sorted(lengths)]


BASELINES: tuple[Solver, ...] = (
    Baseline("keep_all", family=lambda problem: [keep_all(problem)]),
    Baseline("keep_none", family=lambda problem: [every(problem, 1)]),
    Baseline("every_n", family=_every_length),
    Baseline("sqrt_n", family=lambda problem: [sqrt_segments(problem)]),
    Baseline("greedy", family=greedy),
)
