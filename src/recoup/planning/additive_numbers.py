"""The additive numbers of a problem: what solvers calculate with, derived here and nowhere else.

A solver's recurrences know a unit's output, its gradient, what its options hold and need, and what is there once its
backward has run. Values with other lifetimes are pressed into these numbers here: rounded up, so that a plan is safe
wherever a value's lifetime depends on the plan, or rounded down, so that a bound is valid. ``simulate`` judges the
plans on the values themselves.

NOTE [ Values as additive numbers ]
    1. A value that unit *p* makes for the forward of unit *p + 1* is part of *p*'s output. An option of *p + 1* whose
       backward does not read it frees it (``freed``).
    2. A value that only *p*'s own backward reads counts as held by the options of *p* that read it.
    3. Any other value of *p*'s forward counts as held by *p*, which then runs once. If it is freed with the backward of
       *e*, that is a change in bytes after the backward of *e*, which *p*'s backward takes back (``left``). If *p* may
       run again, it counts as resident.
    4. A value that later forwards read is scratch of those between its maker and the last of them.
    5. A gradient that goes to the unit before is the gradient of that unit's output. Any other one is a change in bytes
       after the backwards that make and read it.
    6. A value that stays and that a replay of a row makes a second time (NOTE [ Instances ], 4) is scratch of the
       backward of every option that needs no forward of its own.
    7. Where a measured backward needs less than the gradients of output and input together, its scratch is below 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from recoup.planning.lifetimes import SWEPT, Lifetime, Phase, Use
from recoup.planning.problem import Option, Problem, Scratch, Unit

__all__ = ["AdditiveOption", "AdditiveUnit", "additive", "rounded_bytes"]


@dataclass(frozen=True, slots=True, init=False)
class AdditiveOption(Option):
    """An option in a solver's numbers. Its scratch may be below 0.

    Attributes:
        freed: of the unit's input, bytes that nobody needs once this option's forward has run.
    """

    freed: int

    def __init__(self, name: str, *, freed: int = 0, **numbers: Any) -> None:
        object.__setattr__(self, "freed", freed)
        Option.__init__(self, name, **numbers)

    @classmethod
    def of(cls, option: Option, **changes: Any) -> AdditiveOption:
        """An option with other numbers."""
        return cls(**{item.name: getattr(option, item.name) for item in fields(option)} | changes)

    def _validate(self) -> None:
        """Nothing: its numbers were derived from checked ones."""

    @property
    def freed_input_bytes(self) -> int:
        """Of the unit's input, what nobody needs once this option's forward has run."""
        return self.freed


@dataclass(frozen=True, slots=True, init=False)
class AdditiveUnit(Unit):
    """A unit in a solver's numbers.

    Attributes:
        left: the net change in bytes after its backward, apart from parameter gradients; it may be below 0.
    """

    left: int

    def __init__(self, name: str, options: Sequence[Option], *, left: int = 0, **numbers: Any) -> None:
        object.__setattr__(self, "left", left)
        Unit.__init__(self, name, options, **numbers)

    @classmethod
    def of(cls, unit: Unit, **changes: Any) -> AdditiveUnit:
        """A unit with other numbers."""
        return cls(**{item.name: getattr(unit, item.name) for item in fields(unit)} | changes)

    @property
    def lasting_bytes(self) -> int:
        """By how much more is there once its backward has run, its own gradient and held bytes apart."""
        return self.parameter_gradient_bytes + self.left


def additive(problem: Problem, *, is_bound: bool = False) -> Problem:
    """The problem in a solver's numbers: rounded up, or down for a bound."""
    return _Numbers(problem, is_bound=is_bound).problem() if problem.other_values else problem


def rounded_bytes(problem: Problem) -> int:
    """At most by how much the additive numbers of any plan exceed its simulation."""
    return _Numbers(problem, is_bound=False).rounded_bytes if problem.other_values else 0


class _Numbers:
    """The sums that a problem's values add to, unit by unit."""

    def __init__(self, problem: Problem, *, is_bound: bool) -> None:
        self.source, self.is_bound = problem, is_bound
        units, num_units = problem.units, problem.num_units
        self.last = num_units - 1
        self.resident = 0
        self.output, self.gradient, self.left, self.passing = ([0] * num_units for _ in range(4))
        self.forward_made, self.backward_made, self.made_again = ([0] * num_units for _ in range(3))
        self.held = [[0] * len(unit.options) for unit in units]
        self.freed = [[0] * len(unit.options) for unit in units]
        self.holds = [[False] * len(unit.options) for unit in units]
        self.rounded_bytes = 0
        for value in problem.other_values:
            self._add(value)
        # One backward runs at a time.
        self.rounded_bytes += max(self.made_again)

    def problem(self) -> Problem:
        """The additive problem."""
        return Problem(
            [self._unit(index) for index in range(len(self.source.units))],
            resident_bytes=self.source.resident_bytes + self.resident,
            input_bytes=self.source.input_bytes,
            input_gradient_bytes=self.source.input_gradient_bytes,
            links=self.source.links,
        )

    def _unit(self, index: int) -> AdditiveUnit:
        unit = self.source.units[index]
        return AdditiveUnit.of(
            unit,
            options=[self._option(index, position) for position in range(len(unit.options))],
            output_bytes=unit.output_bytes + self.output[index],
            gradient_bytes=unit.gradient_bytes + self.gradient[index],
            left=self.left[index],
        )

    def _option(self, index: int, position: int) -> AdditiveOption:
        option = self.source.units[index].options[position]
        held_bytes = option.held_bytes + self.held[index][position]
        holds_output = option.holds_output or self.holds[index][position]
        again_bytes = 0 if held_bytes or holds_output else self.made_again[index]
        made_bytes = self.forward_made[index] - self.output[index] - self.held[index][position]
        # The solvers count the gradients of output and input beside the scratch; here it includes them.
        counted = self.gradient[index] + (self.gradient[index - 1] if index else 0)
        scratch = Scratch(
            max(0, option.scratch.forward + made_bytes) + self.passing[index],
            option.scratch.replay,
            option.scratch.backward + self.backward_made[index] + again_bytes - counted,
        )
        return AdditiveOption.of(
            option,
            freed=self.freed[index][position],
            held_bytes=held_bytes,
            holds_output=holds_output,
            scratch=scratch,
        )

    def _add(self, value: Lifetime) -> None:
        made = value.made
        if made is None:
            self._add_initial(value)
        elif made.phase is Phase.BACKWARD:
            self._add_gradient(value, made.unit)
        elif made.options == (SWEPT,) or made.phase is Phase.REPLAY:
            # Any unit may be swept over or replayed, or none.
            self._round(value)
            self.resident += 0 if self.is_bound else value.num_bytes
        else:
            self._add_activation(value, made)

    def _round(self, value: Lifetime) -> None:
        self.rounded_bytes += value.num_bytes

    def _add_initial(self, value: Lifetime) -> None:
        end = min(_backward_readers(value), default=self.last)
        self.resident += value.num_bytes
        if not value.stays:
            self.left[end] -= value.num_bytes

    def _add_gradient(self, value: Lifetime, maker: int) -> None:
        if not value.in_scratch:
            self.backward_made[maker] += value.num_bytes
        reader = min(_backward_readers(value), default=maker)
        if value.stays:
            self.left[maker] += value.num_bytes
        elif reader == maker - 1 and value.in_scratch:
            self.gradient[reader] += value.num_bytes
        elif reader < maker:
            self.left[maker] += value.num_bytes
            self.left[reader + value.in_scratch] -= value.num_bytes

    def _add_activation(self, value: Lifetime, made: Use) -> None:
        """NOTE [ Values as additive numbers ], 1 to 4."""
        maker, size, readers = made.unit, value.num_bytes, _backward_readers(value)
        runs_once = self.source.units[maker].runs_once
        if not value.in_scratch:
            self.forward_made[maker] += size
        forwards = {use.unit for use in value.read if use.phase is Phase.FORWARD}
        is_near = max([*readers, *forwards, maker]) <= maker + 1 and made.phase is Phase.FORWARD
        if value.stays and not runs_once:
            # A replay makes another instance.
            self._make_resident(value)
            self._make_again(value, made)
        last = max((use.unit for use in value.read if use.phase is not Phase.BACKWARD), default=maker)
        passed = range(maker + 1, last + 1)
        if is_near and forwards and not (value.stays and runs_once):
            self._add_output(value, maker)
            passed = passed[1:]
        elif is_near and set(readers) == {maker} and not value.stays:
            for position in self._positions(readers[maker], maker):
                self.held[maker][position] += size
        elif runs_once and (readers or value.stays):
            self._add_held(value, maker, min(readers, default=maker))
            passed = passed[:0]
        elif readers:
            self._make_resident(value, until=min(readers))
            passed = passed[:0]
        self._pass(value, passed)

    def _make_resident(self, value: Lifetime, until: int | None = None) -> None:
        self._round(value)
        if not self.is_bound:
            self.resident += value.num_bytes
            if until is not None:
                self.left[until] -= value.num_bytes

    def _make_again(self, value: Lifetime, made: Use) -> None:
        is_swept_in_a_row = made.phase is Phase.FORWARD and not made.options and made.unit > 0
        if is_swept_in_a_row and not value.in_scratch and not self.is_bound:
            self.made_again[made.unit] += value.num_bytes

    def _positions(self, uses: list[Use], unit: int) -> list[int]:
        """The options of a unit under which it uses a value."""
        options = range(len(self.source.units[unit].options))
        return [position for position in options if any(use.holds_for(position) for use in uses)]

    def _add_output(self, value: Lifetime, maker: int) -> None:
        readers, size = _backward_readers(value), value.num_bytes
        self.output[maker] += size
        holding = self._positions(readers.get(maker, []), maker)
        if holding:
            # An output is held as a whole or not at all.
            self._round(value)
        if not self.is_bound:
            for position in holding:
                self.holds[maker][position] = True
        reading = self._positions(readers.get(maker + 1, []), maker + 1)
        for position in range(len(self.source.units[maker + 1].options)):
            if position not in reading:
                self.freed[maker + 1][position] += size

    def _add_held(self, value: Lifetime, maker: int, end: int) -> None:
        """Held by every option of its maker until the backward of ``end``, or to the end of the step."""
        self._round(value)
        if self.is_bound:
            return
        for position in range(len(self.held[maker])):
            self.held[maker][position] += value.num_bytes
        if value.stays or end != maker:
            self.left[maker] += value.num_bytes
            self.left[end] -= 0 if value.stays else value.num_bytes

    def _pass(self, value: Lifetime, units: range) -> None:
        """Counts it as scratch of the forwards of some units; there it may be held anyway."""
        if units:
            self._round(value)
        for unit in units:
            self.passing[unit] += 0 if self.is_bound else value.num_bytes


def _backward_readers(value: Lifetime) -> dict[int, list[Use]]:
    found: dict[int, list[Use]] = {}
    for use in value.read:
        if use.phase is Phase.BACKWARD:
            found.setdefault(use.unit, []).append(use)
    return found
