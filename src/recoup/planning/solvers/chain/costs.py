"""A problem as the chain solver's recurrences read it: arrays of bytes and seconds.

Notation of Beaumont et al. in brackets; C(s, t, m) has the input of unit s resident and outside m, and the
gradient of output t inside m (see ``chain``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from recoup.planning.actions import Forward, Keep
from recoup.planning.problem import Option, Problem

__all__ = ["ChainCosts", "Floats", "Ints", "OptionCosts", "Options"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class OptionCosts:
    """One option of one unit.

    Attributes:
        index: among the unit's options.
        forward_s: of a forward that keeps what the option holds.
        backward_s: of the backward with the option's extra seconds.
        kept_bytes: output and held bytes [ā].
        forward_bytes: what the forward needs, without the gradients that are there meanwhile [ā + of].
        backward_bytes: what the backward needs, with all gradients [δ + ā + ob].
        is_direct: whether the backward can run from the input alone, with no forward of its own.
        holds_output: whether the output stays until the backward has run.
        freed_bytes: of the unit's input, what goes with the forward: see NOTE [ Inputs that go ].
    """

    index: int
    forward_s: float
    backward_s: float
    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    is_direct: bool
    holds_output: bool = False
    freed_bytes: int = 0

    @property
    def total_s(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.backward_s

    def forward(self, unit: int) -> Forward:
        """The forward that goes with it."""
        return Forward(unit, keep=Keep.OPTION, option=self.index)

    def freeing(self) -> OptionCosts:
        """The same where nobody else holds the input: what goes of it makes room for all that follows."""
        kept_bytes, backward_bytes = (
            self.kept_bytes - self.freed_bytes,
            self.backward_bytes - self.freed_bytes,
        )
        return replace(self, kept_bytes=kept_bytes, backward_bytes=backward_bytes)

    @property
    def closing_s(self) -> float:
        """Seconds where the unit ends a part of the chain: a direct backward needs no forward."""
        return self.backward_s if self.is_direct else self.total_s


class Options:
    """The options of all units, as parts of the chain see them that begin and end in the same way.

    Attributes:
        of: ``of[k]`` are those of unit k.
        fastest: of each unit, the option with the least seconds in all.
        closing: of each unit, the fastest option where it ends a part (a direct one needs no forward there).
        fastest_s: of each unit, the seconds of its fastest option.
    """

    def __init__(self, of: list[list[OptionCosts]]) -> None:
        self.of = of
        self.fastest = [min(options, key=lambda o: (o.total_s, o.kept_bytes)) for options in of]
        self.closing = [min(options, key=lambda o: (o.closing_s, o.backward_bytes)) for options in of]
        self.fastest_s = np.array([option.total_s for option in self.fastest], dtype=np.float64)

    def full_s(self, first: int, last: int) -> float:
        """Seconds of a part that keeps everything under its fastest options."""
        # One after the other, not as a difference of sums: equal schedules have equal seconds to the last bit.
        sums = np.cumsum(self.fastest_s[first:last])
        return (float(sums[-1]) if last > first else 0.0) + self.closing[last].closing_s

    def is_fastest_least(self, plain_s: Floats) -> bool:
        """Whether keeping everything under the fastest options is the least any schedule can take."""
        return all(
            fastest.total_s <= unit_s + option.backward_s
            for fastest, unit_s, options in zip(self.fastest, plain_s, self.of, strict=True)
            for option in options
            if option.is_direct
        )


class ChainCosts:
    """A chain in numbers.

    NOTE [ First and further runs ]
        A part that ends before the chain does is run after a sweep over all its units; one that reaches the end of
        the chain runs all of them for the first time. So where a part ends says whether ``again_s`` counts.

    NOTE [ The end ]
        After the last unit comes one more, the *end*: it takes no time, and its backward makes the gradient of the last
        output, which nothing else reads. So the last unit is like any other: it may be swept over, with all units
        before it, and run again from there. Actions of the end are no part of a schedule.

    NOTE [ Inputs that go ]
        Whether an option may free its unit's input depends on who else holds it: the unit before, if its option
        holds its output, or a replay, if the unit has been the first of a sweep (``Keep.INPUT``). All that
        matters is how a part begins. A left part begins where a sweep began, so its input is *held*; so is that
        of what follows an option that holds its output. The input of a right part, or of what follows another
        option, is not held.

    Args:
        problem: a chain.
        raised_bytes: by which all needs are counted higher. Backwards may free what was there from the start, such as
            gathered parameters: then units before them need less than nothing beyond that.

    Attributes:
        num_units: with the end.
        output_bytes: of each unit [a]; of the last unit none, since no unit reads it.
        before_bytes: what is there while units up to t run forward: the gradient of output t and what the
            backwards of all units after t leave.
        plain_s: seconds of a forward that keeps nothing [uf].
        start_s: ``start_s[k]`` is the sum of ``plain_s`` before unit k.
        first_bytes: what a forward that keeps nothing needs beyond its input and ``before_bytes``.
        sweep_bytes: the same with its input, for units after the first of a sweep.
        fastest_is_least: whether keeping everything under the fastest options is the least any schedule can take.
    """

    def __init__(self, problem: Problem, raised_bytes: int = 0) -> None:
        units = problem.units
        self.num_units = len(units) + 1
        self.output_bytes = np.array([*(unit.output_bytes for unit in units[:-1]), 0, 0], dtype=np.int64)
        gradient = np.array([*(unit.gradient_bytes for unit in units), 0], dtype=np.int64)
        lasting = np.array([*(unit.lasting_bytes for unit in units), 0], dtype=np.int64)
        #: What the backwards of the units after t leave.
        self.after_bytes = raised_bytes + lasting.sum() - np.cumsum(lasting)
        self.before_bytes = gradient + self.after_bytes
        self.plain_s = np.array([*(unit.lightest.forward_s for unit in units), 0.0], dtype=np.float64)
        self.start_s = np.concatenate([[0.0], np.cumsum(self.plain_s)])
        plain = [unit.output_bytes + unit.plain_transient_bytes for unit in units]
        self.first_bytes = np.array([*plain, 0], dtype=np.int64)
        self.sweep_bytes = self.first_bytes + np.concatenate([[0], self.output_bytes[:-1]])
        #: The first unit from s on that runs once; one past the end if there is none.
        self.next_once = [self.num_units] * (self.num_units + 1)
        for index in reversed(range(len(units))):
            self.next_once[index] = index if units[index].runs_once else self.next_once[index + 1]
        first = [self._options(problem, index) for index in range(len(units))]
        further = [
            [
                replace(costs, forward_s=costs.forward_s + unit.options[costs.index].again_s)
                for costs in options
            ]
            for unit, options in zip(units, first, strict=True)
        ]
        end_bytes = raised_bytes + units[-1].gradient_bytes
        end = OptionCosts(0, 0.0, 0.0, 0, 0, backward_bytes=end_bytes, is_direct=True)
        self.first_options, self.further_options = Options([*first, [end]]), Options([*further, [end]])
        #: Of each unit, whether an option frees its input.
        self.frees = [any(option.freed_bytes for option in options) for options in self.first_options.of]
        self._freeing = [
            Options([[option.freeing() for option in unit] for unit in options.of])
            if any(self.frees)
            else options
            for options in (self.first_options, self.further_options)
        ]
        self.fastest_is_least = self.first_options.is_fastest_least(
            self.plain_s
        ) and self.further_options.is_fastest_least(self.plain_s)

    def options(self, last: int, *, is_held: bool) -> Options:
        """The options of a part, by its last unit and by its input: see both notes above."""
        is_further = last < self.num_units - 1
        if not is_held:
            return self._freeing[is_further]
        return self.further_options if is_further else self.first_options

    def _options(self, problem: Problem, index: int) -> list[OptionCosts]:
        unit = problem.units[index]
        source_bytes = problem.units[index - 1].gradient_bytes if index else problem.input_gradient_bytes
        after_bytes = int(self.after_bytes[index])
        # What a backward leaves is there when the next action starts, and counted in what that one needs.
        left_bytes = source_bytes + unit.lasting_bytes if index == 0 else 0

        def costs(position: int, option: Option) -> OptionCosts:
            read_bytes = unit.gradient_bytes + option.held_bytes + option.holds_output * unit.output_bytes
            run_bytes = max(option.replay_transient_bytes, source_bytes + option.backward_transient_bytes)
            is_last = index == problem.num_units - 1
            output_bytes = unit.output_bytes if option.holds_output or not is_last else 0
            return OptionCosts(
                index=position,
                forward_s=option.forward_s,
                backward_s=option.extra_s + option.backward_s,
                kept_bytes=output_bytes + option.held_bytes,
                forward_bytes=unit.output_bytes + option.held_bytes + option.forward_transient_bytes,
                backward_bytes=after_bytes + max(read_bytes + run_bytes, left_bytes),
                is_direct=not (option.needs_forward or unit.runs_once),
                holds_output=option.holds_output,
                freed_bytes=option.freed_input_bytes,
            )

        found = [costs(position, option) for position, option in enumerate(unit.options)]
        # A forward that frees the input has to run, though the backward could do without.
        freeing = [
            replace(option, is_direct=False) for option in found if option.is_direct and option.freed_bytes
        ]
        return [
            *(replace(option, freed_bytes=0) if option.is_direct else option for option in found),
            *freeing,
        ]

    def is_never(self, first: int, last: int) -> bool:
        """Whether a part can never be run: see NOTE [ Units that run once ] in ``chain_floors``."""
        return last < self.num_units - 1 and self.next_once[first] <= last

    def num_cuts(self, first: int, last: int) -> int:
        """How many cuts of a part have a left part that can be run: those up to the next unit that runs once."""
        return min(last, self.next_once[first]) - first

    def sweep_needs(self, first: int) -> Ints:
        """``[i]``: bytes beyond ``before_bytes`` to run ``first`` … ``first + i`` and keep nothing."""
        needs = self.sweep_bytes[first:].copy()
        needs[0] = self.first_bytes[first]
        return np.maximum.accumulate(needs)

    def common_divisor(self) -> int:
        """The largest number of bytes that divides every size the recurrences read."""
        sizes = [*self.output_bytes, *self.before_bytes, *self.first_bytes, *self.sweep_bytes]
        for options in self.first_options.of:
            for option in options:
                sizes += [option.kept_bytes, option.forward_bytes, option.backward_bytes, option.freed_bytes]
        return math.gcd(*map(int, sizes))
