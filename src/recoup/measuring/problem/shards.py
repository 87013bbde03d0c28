"""Parameters that are gathered when they are needed (FSDP2): their bytes in a planning problem.

NOTE [ Gathered parameters ]
    1. A group of parameters is gathered as a whole. One inside a unit is there while that unit runs; any other one,
       such as the root's, from the beginning of the step to its end.
    2. A forward begins with a gather: shards are copied, to the device or to another dtype, and gathered in a buffer.
       Parameters are copied out of it beside the buffer of the gather before, which is freed then. The own
       buffer lives until the next gather has ended.
    3. A backward begins by copying parameters out of a buffer that was gathered ahead, during the backward of the group
       after it. Then the group before it is gathered ahead, and so are, in forwards too, the groups that
       the user has named. The buffer in which gradients are reduced lives until the next group's gradients are reduced.
    4. When a unit's backward ends, all that it held is freed, and its parameters. Its gradients are copied into that
       buffer and freed, but for the last one, and then its share is made, perhaps in two dtypes.
    5. A group that stays gathered between forward and backward is a value with this lifetime. One that does not is a
       value from its first replay in a segment to its backward: it is not gathered twice.
    6. With replicas (hybrid sharding), the buffer in which their shares are summed up stays until the backward ends.
    7. Shards in host memory are copied to the device, gathered there, and the copies freed. The share of the gradients
       is made on the device, and does not stay there.
    8. A group of modules in several positions, as of ``fully_shard([norm, head])``, is gathered for the first of them.
       It stays until the last has run, or until the backward of the first; gradients that others make wait for that.
       Any group outside units is taken for the root's, whose gradients stay in full until the backward ends.
    9. Solvers cannot tell which units a plan replays in a row, and would count all of them (``additive_numbers``):
       there is a problem without such segments, which is exact, and one with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from recoup.measuring.problem.lifetimes import SUMMED
from recoup.measuring.problem.positions import Position
from recoup.model.accumulation import UNREDUCED, Accumulates
from recoup.model.sharded import ShardGroup
from recoup.planning import Option, Problem, Unit
from recoup.planning.lifetimes import Lifetime, Phase, Use
from recoup.tensors import num_bytes_of

__all__ = ["with_shards"]

_NAME, _WAITING = "gathered parameters", "gradients to be reduced"


@dataclass(frozen=True)
class _Gathered:
    """The groups of one position, in bytes."""

    parameters: int = 0
    staying: int = 0
    buffer: int = 0
    full: int = 0
    gradients: int = 0
    reduced: int = 0
    sharing: int = 0
    left: int = 0
    copied: int = 0
    waiting: int = 0

    @property
    def reducing(self) -> int:
        """Beside gradients that wait."""
        return self.reduced + max(0 if self.waiting else self.gradients, self.sharing - self.waiting)


def with_shards(
    problem: Problem,
    positions: Sequence[Position],
    groups: Sequence[ShardGroup],
    *,
    resident_bytes: int,
    accumulates: Accumulates,
    in_segments: bool,
    loss_is_outside: bool,
) -> Problem:
    """The problem of one rank, by NOTE [ Gathered parameters ].

    Args:
        problem: of the step with all parameters there, in full.
        positions: of the step.
        groups: of parameters.
        resident_bytes: that are there for the whole step: of parameters, this rank's shards.
        accumulates: whether this rank's share of the gradients is there when a step begins.
        in_segments: whether units with parameters of their own may be replayed together.
        loss_is_outside: whether the model's output is what the last position begins with.
    """
    row = _Row(problem, positions, groups, accumulates, loss_is_outside)
    units = [
        row.unit(unit, index, runs_once=index in row.once or (bool(row.begins[index]) and not in_segments))
        for index, unit in enumerate(problem.units)
    ]
    values = [*map(row.in_full, problem.other_values), *row.values()]
    return Problem(units, resident_bytes=resident_bytes, links=problem.links, values=values)


class _Waits(NamedTuple):
    """Gradients that wait for the position with which their group is reduced.

    Attributes:
        made: by which position.
        until: which position.
        full: bytes, as the position that makes them counts them.
        gradients: bytes that they take.
    """

    made: int
    until: int
    full: int
    gradients: int


def _waiting(positions: Sequence[Position], group: ShardGroup, until: int) -> Iterator[_Waits]:
    wanted = {id(parameter) for parameter in group.parameters if parameter.requires_grad}
    full_bytes = sum(num_bytes_of(parameter) for parameter in group.parameters if parameter.requires_grad)
    for index, position in reversed(list(enumerate(positions))):
        made = {one: size for one, size in position.parameters.items() if one in wanted}
        wanted -= made.keys()
        if made and index != until:
            size = sum(made.values())
            yield _Waits(index, until, size, size * group.gradient_bytes // full_bytes)


def _sum(groups: Iterable[ShardGroup], *, accumulates: Accumulates) -> _Gathered:
    found, is_unreduced = list(groups), accumulates == UNREDUCED
    return _Gathered(
        sum(group.gathered_bytes for group in found),
        sum(group.gathered_bytes for group in found if group.stays),
        sum(group.buffer_bytes for group in found),
        sum(num_bytes_of(p) for group in found for p in group.parameters if p.requires_grad),
        sum(group.gradient_bytes for group in found if not (is_unreduced and group.adds_in_place)),
        sum(group.reduced_bytes for group in found),
        sum(group.made_bytes(is_unreduced=is_unreduced) for group in found),
        sum(group.left_bytes(accumulates=bool(accumulates) and not is_unreduced) for group in found),
        sum(group.copied_bytes for group in found),
        sum(group.waiting_bytes for group in found) if is_unreduced else 0,
    )


class _Row:
    """The positions of a step with their groups.

    Attributes:
        begins: by position, the numbers of the groups that are gathered for it.
        once: positions that share a group with others, so that they cannot be replayed before their backwards.
    """

    def __init__(
        self,
        problem: Problem,
        positions: Sequence[Position],
        groups: Sequence[ShardGroup],
        accumulates: Accumulates,
        loss_is_outside: bool,
    ) -> None:
        #: From which position on, in the backward, the root gathers others ahead: with the model's output.
        self._root_end = len(positions) - 2 * loss_is_outside
        self._groups, self._is_unreduced = groups, accumulates == UNREDUCED
        modules = [set(position.seen.module.modules()) if position.seen else set() for position in positions]
        self.begins: list[list[int]] = [
            [number for number, group in enumerate(groups) if inside.issuperset(group.modules)]
            for inside in modules
        ]
        self._ends = [list(own) for own in self.begins]
        self._place = {number: index for index, own in enumerate(self.begins) for number in own}
        self._end = dict(self._place)
        self._waits: list[_Waits] = []
        self._spans: list[tuple[int, int, int]] = []
        self.once: set[int] = set()
        for number, group in enumerate(groups):
            found = [index for index, inside in enumerate(modules) if not inside.isdisjoint(group.modules)]
            is_inside = set(group.modules) <= set().union(*modules)
            if number not in self._place and is_inside:
                self._place[number], self._end[number] = found[0], found[-1]
                if not group.stays:
                    self._spans.append((found[0], found[-1], group.gathered_bytes))
                    self.once.update(range(found[0], found[-1] + 1))
                self.begins[found[0]].append(number)
                self._ends[found[-1]].append(number)
                if not (self._is_unreduced and group.adds_in_place):
                    self._waits += _waiting(positions, group, found[0])
        self._found, self._gathers = (
            [_sum((groups[number] for number in own), accumulates=accumulates) for own in numbers]
            for numbers in (self.begins, self._ends)
        )
        others = (group for number, group in enumerate(groups) if number not in self._place)
        self._outer = _sum(others, accumulates=accumulates)
        self._passing = [_Passing.of(problem, index) for index in range(problem.num_units)]

    def values(self) -> list[Lifetime]:
        """Parameters that are gathered for longer than one phase."""
        values = (
            [Lifetime(_NAME, self._outer.parameters, made=None, stays=True)] if self._outer.parameters else []
        )
        for index, own in enumerate(self._found):
            read = (Use(Phase.BACKWARD, index),)
            for phase, size in (Phase.FIRST, own.staying), (Phase.REPLAY, own.parameters - own.staying):
                if size:
                    values.append(Lifetime(_NAME, size, made=Use(phase, index), read=read, in_scratch=True))
        for first, last, size in self._spans:
            for phase, begin, end in (Phase.FIRST, first, last), (Phase.BACKWARD, last, first):
                read = (Use(phase, end),)
                values.append(Lifetime(_NAME, size, made=Use(phase, begin), read=read, in_scratch=True))
        for one in self._waits:
            made, read = Use(Phase.BACKWARD, one.made), (Use(Phase.BACKWARD, one.until),)
            values.append(Lifetime(_WAITING, one.gradients, made=made, read=read, in_scratch=True))
        return values

    def in_full(self, value: Lifetime) -> Lifetime:
        """A value; gradients that are summed up before they are added to others have the size of a share until here."""
        if value.name != SUMMED:
            return value
        whole = _sum(self._groups, accumulates=False)
        return replace(value, num_bytes=value.num_bytes * whole.gradients // whole.full)

    def unit(self, unit: Unit, index: int, *, runs_once: bool) -> Unit:
        """A unit with the bytes of its groups, and of those that are there while it runs."""
        own, outer = self._found[index], self._outer
        share = outer.gradients / outer.full if outer.full else 1.0
        full_bytes = own.full + sum(
            (one.made == index) * one.full - (one.until == index) * one.full for one in self._waits
        )
        outer_bytes = max(0, round(share * (unit.parameter_gradient_bytes - full_bytes)))
        options = [
            replace(
                option,
                scratch=option.scratch._replace(
                    forward=max(0, self._forward(index, option)),
                    backward=max(0, self._backward(index, option, outer_bytes)),
                ),
            )
            for option in unit.options
        ]
        return replace(
            unit,
            options=tuple(options),
            parameter_gradient_bytes=(0 if own.waiting else own.left) + outer_bytes,
            runs_once=unit.runs_once or runs_once,
        )

    def _forward(self, index: int, option: Option) -> int:
        own = self._found[index]
        last_bytes = (self._before(index) or self._outer).buffer  # of the gather before
        ahead_bytes, ahead_copied_bytes = self._ahead_in_forward(index, by=index)
        running_bytes = option.scratch.forward + own.parameters + ahead_bytes
        if not own.parameters:
            is_tail = index == len(self._found) - 1
            return running_bytes + (0 if is_tail else last_bytes)
        # One rank alone copies a parameter at a time, into what is gathered.
        copying_bytes = own.copied + (last_bytes + own.buffer if own.buffer else own.parameters)
        gathering_bytes = max(copying_bytes, own.parameters + own.buffer + last_bytes)
        gathering_bytes += self._ahead_in_forward(index, by=index - 1)[0]
        beginning_bytes = max(gathering_bytes, own.parameters + own.buffer + ahead_bytes + ahead_copied_bytes)
        # Nothing is made yet that the unit's forward makes.
        made_bytes = option.held_bytes + self._passing[index].made
        return max(running_bytes + own.buffer, beginning_bytes - made_bytes)

    def _backward(self, index: int, option: Option, outer_bytes: int) -> int:
        own, outer, passing = self._found[index], self._outer, self._passing[index]
        later = self._found[index + 1 :]
        # Gradients that waited are gone when the last micro-batch has reduced them, and there in those before it.
        freed_bytes = sum(one.waiting - one.left for one in later) if self._is_unreduced else 0
        reduced_bytes = max(0, next((one.reduced for one in later if one.parameters), 0) - freed_bytes)
        ahead_bytes, copied_bytes = self._ahead_in_backward(index)
        shared_bytes = own.parameters + sum(size for _, last, size in self._spans if last == index)
        running_bytes = shared_bytes + ahead_bytes + reduced_bytes
        running_bytes += sum(one.gradients for one in self._waits if one.until == index)
        gathered_bytes = passing.output_gradients + running_bytes + copied_bytes
        gathers = self._gathers[index]
        if gathers.parameters > gathers.staying:
            later_bytes, _ = self._ahead_in_backward(index + 1)  # the own buffer among them
            copying_bytes = shared_bytes + max(later_bytes, gathers.copied) + reduced_bytes
            gathered_bytes = max(gathered_bytes, passing.output_gradients + copying_bytes)
        ending_bytes = own.reducing - freed_bytes + ahead_bytes
        if index == 0:
            reducing_bytes = outer.reducing - outer.gradients - outer.parameters
            left_bytes = own.left - own.waiting - freed_bytes
            ending_bytes = max(ending_bytes, reducing_bytes + left_bytes + outer_bytes)
        # What the unit held is freed by then.
        ending_bytes += passing.input_gradients - option.held_bytes - passing.read
        return max(option.scratch.backward + running_bytes, gathered_bytes, ending_bytes)

    def _before(self, index: int) -> _Gathered | None:
        return next((one for one in reversed(self._found[:index]) if one.parameters), None)

    def _ahead_in_forward(self, index: int, *, by: int) -> tuple[int, int]:
        """Bytes of what is gathered for positions after one, by positions up to another; of copies for that."""
        sources = [group for number, group in enumerate(self._groups) if self._place.get(number, -1) <= by]
        targets = {number for group in sources for number in group.ahead_in_forward}
        return _ahead(self._groups[one] for one in targets if self._place.get(one, -1) > index)

    def _ahead_in_backward(self, index: int) -> tuple[int, int]:
        """The same for positions before one, while its backward runs."""
        end = len(self._found)
        targets: set[int] = set()
        for number, group in enumerate(self._groups):
            place = self._end.get(number, self._root_end)
            if place >= index and group.ahead_in_backward is not None:
                targets.update(group.ahead_in_backward)
            elif place >= index:
                earlier = (own for own in reversed(self._ends[:place]) if own)
                targets.update(next(earlier, []))
        return _ahead(
            self._groups[one]
            for one in targets
            if self._end.get(one, end) < index and not self._groups[one].stays
        )


def _ahead(groups: Iterable[ShardGroup]) -> tuple[int, int]:
    found = list(groups)
    copied_bytes = max((group.copied_bytes for group in found), default=0)
    return sum(group.buffer_bytes for group in found), copied_bytes


class _Passing(NamedTuple):
    """Bytes of the values that a unit makes and reads.

    Attributes:
        made: by its forward.
        read: by its backward alone, which frees them on its way.
        input_gradients: made by its backward.
        output_gradients: read by its backward.
    """

    made: int
    read: int
    input_gradients: int
    output_gradients: int

    @classmethod
    def of(cls, problem: Problem, unit: int) -> _Passing:
        """Those of a problem's unit."""
        made = read = input_gradients = output_gradients = 0
        for value in problem.other_values:
            makes = value.made is not None and value.made.unit == unit
            readers = {use.unit for use in value.read if use.phase is Phase.BACKWARD}
            if value.made is not None and value.made.phase is Phase.BACKWARD:
                input_gradients += value.num_bytes if makes else 0
                output_gradients += value.num_bytes if unit in readers else 0
            else:
                made += value.num_bytes if makes and not value.in_scratch else 0
                read += value.num_bytes if readers == {unit} and not value.stays else 0
        return cls(made, read, input_gradients, output_gradients)
