"""Long unequal chains: neighbouring units are grouped, the groups are planned as units, the plan is expanded.

A group's options are a few ways to run its units, one option each (from keeping everything down to keeping
only inputs), and one that keeps only the group's input and replays it whole. What they hold and need is
measured by simulating the group alone, so a plan for the groups is a plan for the units that needs no more
bytes: the input of a group stays, though its first unit might free it.
A group with a unit that ``runs_once`` runs once itself, so those units get groups of their own as far
as the number of groups allows. Cuts inside a group are lost: this is a restriction, and plans found this way
claim no optimality. Planning a hierarchy of sub-graphs is the idea of the successors of Rockmate; here the
groups are fixed.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, pairwise
from typing import NamedTuple

from recoup.planning.actions import Action, Backward, Forward, Keep
from recoup.planning.additive_numbers import AdditiveOption, AdditiveUnit
from recoup.planning.problem import Option, Problem
from recoup.planning.schedule import Schedule
from recoup.planning.simulate import simulate
from recoup.planning.solvers.baselines import (
    REPLAY,
    actions_for,
    fastest_option,
    ladder_choices,
    one_option_each,
)

__all__ = ["Grouping", "group_chain"]

_NUM_MIXES = 12


class _Mix(NamedTuple):
    """One way to run a group: a choice for each unit, or ``None`` to keep nothing and replay the group."""

    choices: tuple[int, ...] | None
    option: Option


class Grouping(NamedTuple):
    """A chain of groups that stands for a longer chain of units."""

    problem: Problem
    source: Problem
    starts: tuple[int, ...]
    mixes: tuple[tuple[_Mix, ...], ...]

    def expand(self, schedule: Schedule) -> Schedule:
        """A schedule of groups as a schedule of units."""
        actions: list[Action] = []
        for action in schedule:
            units = range(self.starts[action.unit], self.starts[action.unit + 1])
            match action:
                case Forward(_, keep=keep, option=option):
                    mix = None if option is None else self.mixes[action.unit][option].choices
                    actions += self._forwards(units, keep, mix)
                case Backward(_, option=option):
                    actions += self._backwards(units, self.mixes[action.unit][option].choices)
                case _:
                    raise AssertionError(f"no solver of chains emits {action!r}")
        return Schedule(actions)

    def _forwards(self, units: range, keep: Keep, choices: tuple[int, ...] | None) -> list[Action]:
        if choices is None:
            keeps_input = keep is not Keep.NOTHING and units.start > 0
            head = Forward(units.start, keep=Keep.INPUT if keeps_input else Keep.NOTHING)
            return [head, *map(Forward, units[1:])]
        pairs = zip(units, choices, strict=True)
        return [actions_for(self.source, unit, choice)[0] for unit, choice in pairs]

    def _backwards(self, units: range, choices: tuple[int, ...] | None) -> list[Action]:
        if choices is None:
            return _replay(self.source, units)
        pairs = zip(reversed(units), reversed(choices), strict=True)
        return [action for unit, choice in pairs for action in actions_for(self.source, unit, choice)[1]]


def _replay(problem: Problem, units: range) -> list[Action]:
    """Forwards that keep everything under the fastest options, and the backwards."""
    fastest = [(unit, fastest_option(problem.units[unit])) for unit in units]
    actions: list[Action] = [Forward(unit, keep=Keep.OPTION, option=option) for unit, option in fastest]
    return actions + [Backward(unit, option=option) for unit, option in reversed(fastest)]


def group_chain(problem: Problem, *, num_groups: int) -> Grouping:
    """Groups neighbouring units into at most ``num_groups`` groups.

    They are nearly equal in length, but for units that run once, which are groups apart.
    """
    starts = _group_starts(problem, num_groups)
    known: dict[object, tuple[_Mix, ...]] = {}
    mixes, units = [], []
    for group, (start, stop) in enumerate(pairwise(starts)):
        members = problem.units[start:stop]
        source_bytes = problem.units[start - 1].gradient_bytes if start else problem.input_gradient_bytes
        # Equal groups are measured once; names do not matter.
        key = (source_bytes, tuple(replace(unit, name="unit") for unit in members))
        if key not in known:
            head = tuple(
                replace(option, freed=0) if isinstance(option, AdditiveOption) else option
                for option in members[0].options
            )
            members = (replace(members[0], options=head), *members[1:])
            known[key] = _measure(Problem(members, input_gradient_bytes=source_bytes))
        mixes.append(known[key])
        units.append(
            AdditiveUnit(
                f"group{group}",
                [mix.option for mix in known[key]],
                output_bytes=members[-1].output_bytes,
                gradient_bytes=members[-1].gradient_bytes,
                parameter_gradient_bytes=sum(unit.parameter_gradient_bytes for unit in members),
                left=sum(unit.lasting_bytes - unit.parameter_gradient_bytes for unit in members),
                runs_once=any(unit.runs_once for unit in members),
            )
        )
    groups = Problem(
        units,
        resident_bytes=problem.resident_bytes,
        input_bytes=problem.input_bytes,
        input_gradient_bytes=problem.input_gradient_bytes,
    )
    return Grouping(groups, problem, tuple(starts), tuple(mixes))


def _group_starts(problem: Problem, num_groups: int) -> list[int]:
    """Where groups begin, and the end of the last one.

    Short stretches between units that run once join these until the number of groups suffices: within them,
    little can be swept over anyway.
    """
    joined = 0
    while len(stretches := _stretches(problem, joined)) > num_groups:
        joined += 1
    length = -(-problem.num_units // num_groups)
    while sum(-(-len(stretch) // length) for stretch in stretches) > num_groups:
        length += 1
    starts: list[int] = []
    for stretch in stretches:
        num_parts = -(-len(stretch) // length)
        starts += stretch[:: -(-len(stretch) // num_parts)]
    return [*starts, problem.num_units]


def _stretches(problem: Problem, joined: int) -> list[range]:
    """Neighbours that all run once, or none of them; up to ``joined`` others count as running once."""
    found: list[range] = []
    was_once = None
    for flag, units in groupby(range(problem.num_units), lambda index: problem.units[index].runs_once):
        members = list(units)
        is_once = flag or len(members) <= joined
        first = found.pop().start if is_once == was_once else members[0]
        found.append(range(first, members[-1] + 1))
        was_once = is_once
    return found


def _measure(part: Problem) -> tuple[_Mix, ...]:
    """A group's options, from the fastest to the one that replays everything."""
    states = ladder_choices(part, num_states=_NUM_MIXES)
    mixes = [_Mix(state, _mix_option(part, f"mix{index}", state)) for index, state in enumerate(states)]
    if any(unit.runs_once for unit in part.units):
        return tuple(mixes)
    # First, so that a forward that keeps nothing runs as this one where another also holds no bytes.
    return (_Mix(None, _replay_option(part)), *mixes)


def _mix_option(part: Problem, name: str, choices: tuple[int, ...]) -> Option:
    """What running a group with one choice for each unit holds and needs."""
    last = part.units[-1]
    schedule = one_option_each(part, choices)
    result = simulate(part, schedule)
    forwards = [m for m in result.timeline if m.action < part.num_units]
    start_bytes = forwards[-1].num_bytes
    holds_output = choices[-1] != REPLAY and last.options[choices[-1]].holds_output
    held_bytes = start_bytes - last.gradient_bytes - holds_output * last.output_bytes
    forward_peak = max(m.num_bytes for m in forwards if m.phase == "forward")
    backward_peak = max(m.num_bytes for m in result.timeline if m.action >= part.num_units)
    forward_s = sum(
        (unit.lightest if choice == REPLAY else unit.options[choice]).forward_s
        for unit, choice in zip(part.units, choices, strict=True)
    )
    again_s = sum(
        unit.options[choice].again_s
        for unit, choice in zip(part.units, choices, strict=True)
        if choice != REPLAY
    )
    return Option(
        name,
        forward_s=forward_s,
        again_s=again_s,
        backward_s=max(0.0, result.seconds - forward_s),
        held_bytes=held_bytes,
        holds_output=holds_output,
        forward_transient_bytes=max(0, forward_peak - held_bytes - last.output_bytes),
        backward_transient_bytes=max(0, backward_peak - start_bytes - part.input_gradient_bytes),
    )


def _replay_option(part: Problem) -> Option:
    """What keeping only a group's input, and replaying it before its backward, needs."""
    num_units, last = part.num_units, part.units[-1]
    units = range(num_units)
    result = simulate(part, Schedule([*map(Forward, units), *_replay(part, units)]))
    forward_peak = max(m.num_bytes for m in result.timeline if m.action < num_units and m.phase == "forward")
    # After the sweep the gradient of the group's output is there, as it will be when the group is replayed.
    later = [m for m in result.timeline if m.action >= num_units]
    forward_s = sum(unit.lightest.forward_s for unit in part.units)
    kept = [unit.options[fastest_option(unit)] for unit in part.units]
    replay_s = sum(option.forward_s + option.again_s for option in kept)
    needed = max(m.num_bytes for m in later) - last.gradient_bytes
    return Option(
        "replay",
        forward_s=forward_s,
        extra_s=replay_s,
        backward_s=max(0.0, result.seconds - forward_s - replay_s),
        forward_transient_bytes=max(0, forward_peak - last.output_bytes),
        replay_transient_bytes=needed,
        backward_transient_bytes=max(0, needed - part.input_gradient_bytes),
    )
