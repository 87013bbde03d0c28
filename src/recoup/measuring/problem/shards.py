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
    9. With an integer for ``reshard_after_forward`` a forward ends by copying its share among fewer ranks out of each
       gathered parameter, which is freed then. That larger shard is a value until the backward has gathered it. A root
       that is freed after its forward is not there while a loss outside of it is computed.
    10. A group that lasts (``set_reshard_after_backward(False)``) is gathered by the first micro-batch, and is there
       when all others begin. What is larger counts: the first one's buffers, or the parameters that are there already.
    11. Shards along another dimension than the first are copied once more when they are gathered, all at once, and so
       are their gradients before they are reduced, one after the other.
    12. The last buffers in which gradients are reduced are held, one of them unless the user says more.
    13. Solvers cannot tell which units a plan replays in a row, and would count all of them (``additive_numbers``):
       there is a problem without such segments, which is exact, and one with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from recoup.measuring.problem.gathered import Passing, gathered_by
from recoup.measuring.problem.lifetimes import SUMMED
from recoup.measuring.problem.positions import Position
from recoup.model.accumulation import UNREDUCED, Accumulates
from recoup.model.sharded import ShardGroup
from recoup.planning import Option, Problem, Unit
from recoup.planning.lifetimes import Lifetime, Phase, Use
from recoup.tensors import num_bytes_of

__all__ = ["with_shards"]

_NAME, _SHARDS, _WAITING = "gathered parameters", "larger shards of parameters", "gradients to be reduced"


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


class _Span(NamedTuple):
    """A group that is gathered from one position to another.

    Attributes:
        first: of its positions.
        last: of them.
        num_bytes: of its parameters.
        lasts: whether it stays gathered after its backward.
    """

    first: int
    last: int
    num_bytes: int
    lasts: bool


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
        self._root_last = max(0, min(self._root_end, len(positions) - 1))
        self._loss_is_outside = loss_is_outside and len(positions) > 1
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
        self._spans: list[_Span] = []
        self.once: set[int] = set()
        for number, group in enumerate(groups):
            found = [index for index, inside in enumerate(modules) if not inside.isdisjoint(group.modules)]
            is_inside = set(group.modules) <= set().union(*modules)
            if number not in self._place and is_inside:
                self._place[number], self._end[number] = found[0], found[-1]
                if not group.stays:
                    self._spans.append(_Span(found[0], found[-1], group.gathered_bytes, group.lasts))
                    self.once.update(range(found[0], found[-1] + 1))
                self.begins[found[0]].append(number)
                self._ends[found[-1]].append(number)
                if not (self._is_unreduced and group.adds_in_place):
                    self._waits += _waiting(positions, group, found[0])
        self._found, self._gathers = (
            [gathered_by((groups[number] for number in own), accumulates=accumulates) for own in numbers]
            for numbers in (self.begins, self._ends)
        )
        others = [group for number, group in enumerate(groups) if number not in self._place]
        self._outer = gathered_by(others, accumulates=accumulates)
        #: What is gathered in the forwards of a micro-batch after the first: by position, and outside of them.
        self._again = (
            [
                gathered_by(
                    (groups[number] for number in own if not groups[number].lasts), accumulates=accumulates
                )
                for own in self.begins
            ],
            gathered_by((group for group in others if not group.lasts), accumulates=accumulates),
        )
        #: What the root gathers again for its backward.
        self._root_again = gathered_by(
            (group for group in others if not group.stays), accumulates=accumulates
        )
        self._num_buffers = max((group.num_buffers for group in groups), default=1)
        self._passing = [Passing.of(problem, index) for index in range(problem.num_units)]

    def values(self) -> list[Lifetime]:
        """Parameters that are gathered for longer than one phase."""
        values, root, last = [], self._root_again, self._root_last
        root_bytes = root.parameters if self._loss_is_outside else 0
        if size := self._outer.parameters - root_bytes:
            values.append(Lifetime(_NAME, size, made=None, stays=True))
        if root_bytes:
            made = Use(Phase.BACKWARD, last + 1)
            values.append(Lifetime(_NAME, root_bytes, made=None, read=(Use(Phase.FIRST, last),)))
            values.append(Lifetime(_NAME, root_bytes, made=made, stays=True, in_scratch=True))
        if root.resharded:
            made, read = Use(Phase.FIRST, last), (Use(Phase.BACKWARD, last),)
            values.append(Lifetime(_SHARDS, root.resharded, made=made, read=read, in_scratch=True))
        for index, own in enumerate(self._found):
            read = (Use(Phase.BACKWARD, index),)
            replayed_bytes = own.parameters - own.staying - own.resharded
            for phase, size in (Phase.FIRST, own.staying - own.always), (Phase.REPLAY, replayed_bytes):
                if size:
                    values.append(Lifetime(_NAME, size, made=Use(phase, index), read=read, in_scratch=True))
            if own.always:
                values.append(Lifetime(_NAME, own.always, made=None, stays=True))
        for index, own in enumerate(self._gathers):
            backward = Use(Phase.BACKWARD, index)
            if own.resharded:
                made = Use(Phase.FIRST, index)
                values.append(Lifetime(_SHARDS, own.resharded, made=made, read=(backward,), in_scratch=True))
            if size := own.lasting - own.always:
                values.append(Lifetime(_NAME, size, made=None, read=(Use(Phase.FIRST, index),)))
                values.append(Lifetime(_NAME, size, made=backward, stays=True, in_scratch=True))
        for span in self._spans:
            for phase, begin, end in (
                (Phase.FIRST, span.first, span.last),
                (Phase.BACKWARD, span.last, span.first),
            ):
                made, read = Use(phase, begin), (Use(phase, end),)
                if not span.lasts:
                    values.append(Lifetime(_NAME, span.num_bytes, made=made, read=read, in_scratch=True))
        for one in self._waits:
            made, read = Use(Phase.BACKWARD, one.made), (Use(Phase.BACKWARD, one.until),)
            values.append(Lifetime(_WAITING, one.gradients, made=made, read=read, in_scratch=True))
        return values

    def in_full(self, value: Lifetime) -> Lifetime:
        """A value; gradients that are summed up before they are added to others have the size of a share until here."""
        if value.name != SUMMED:
            return value
        whole = gathered_by(self._groups, accumulates=False)
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
        # Parameters that stay after a backward are there for the forwards of the next: no gather in these.
        later_bytes = sum(
            group.gathered_bytes
            for number, group in enumerate(self._groups)
            if group.lasts and self._place.get(number, -1) >= index
        )
        first_bytes = self._gathering(index, option) - later_bytes
        return max(first_bytes, self._gathering(index, option, is_again=True)) if later_bytes else first_bytes

    def _gathering(self, index: int, option: Option, *, is_again: bool = False) -> int:
        """Of a forward that gathers parameters, or again those that do not last."""
        found, outer = self._again if is_again else (self._found, self._outer)
        own, resharding_bytes = found[index], self._gathers[index].resharding
        last_bytes = next((one for one in reversed(found[:index]) if one.parameters), outer).buffer
        ahead_bytes, ahead_copied_bytes = self._ahead_in_forward(index, by=index, is_again=is_again)
        running_bytes = option.scratch.forward + own.parameters + ahead_bytes
        # Nothing is made yet that the unit's forward makes.
        made_bytes = option.held_bytes + self._passing[index].made
        root_first_bytes = outer.buffer + outer.reordered - made_bytes if index == 0 else 0
        root_last_bytes = self._root_again.resharding if index == self._root_last else 0
        if not own.parameters:
            is_tail = index == len(found) - 1
            ending_bytes = max(root_last_bytes, resharding_bytes) + last_bytes
            return max(running_bytes + (0 if is_tail else last_bytes), ending_bytes, root_first_bytes)
        # One rank alone copies a parameter at a time, into what is gathered.
        copying_bytes = own.copied + (last_bytes + own.buffer if own.buffer else own.parameters)
        gathering_bytes = max(copying_bytes, own.parameters + own.buffer + last_bytes + own.reordered)
        gathering_bytes += self._ahead_in_forward(index, by=index - 1, is_again=is_again)[0]
        beginning_bytes = max(gathering_bytes, own.parameters + own.buffer + ahead_bytes + ahead_copied_bytes)
        ending_bytes = max(root_last_bytes, own.parameters + resharding_bytes) + own.buffer + ahead_bytes
        return max(running_bytes + own.buffer, beginning_bytes - made_bytes, ending_bytes, root_first_bytes)

    def _backward(self, index: int, option: Option, outer_bytes: int) -> int:
        own, outer, passing = self._found[index], self._outer, self._passing[index]
        later = self._found[index + 1 :]
        # Gradients that waited are gone when the last micro-batch has reduced them, and there in those before it.
        freed_bytes = sum(one.waiting - one.left for one in later) if self._is_unreduced else 0
        buffers = self._buffers_after(index)
        reduced_bytes = max(0, sum(buffers) - freed_bytes)
        ahead_bytes, copied_bytes = self._ahead_in_backward(index)
        shared_bytes = own.parameters - own.always
        shared_bytes += sum(span.num_bytes for span in self._spans if span.last == index)
        shared_bytes -= sum(span.num_bytes for span in self._spans if span.first == index and span.lasts)
        running_bytes = shared_bytes + ahead_bytes + reduced_bytes
        running_bytes += sum(one.gradients for one in self._waits if one.until == index)
        gathered_bytes = passing.output_gradients + running_bytes + copied_bytes
        gathers = self._gathers[index]
        if gathers.parameters > gathers.staying:
            own_numbers = [number for number in self._ends[index] if not self._groups[number].stays]
            later_bytes, _ = self._ahead_in_backward(index + 1, others=own_numbers)
            copying_bytes = shared_bytes + max(later_bytes, gathers.copied_again) + reduced_bytes
            copying_bytes += gathers.resharded + gathers.reordered
            gathered_bytes = max(gathered_bytes, passing.output_gradients + copying_bytes)
        if index == self._root_last:
            root = self._root_again
            # Groups that end with the root's output are gathered before the root.
            root_bytes = shared_bytes + (ahead_bytes if self._ends[index] else 0)
            root_bytes += root.buffer + root.resharded
            root_bytes += max(root.copied_again - root.parameters, root.reordered)
            gathered_bytes = max(gathered_bytes, passing.output_gradients + root_bytes)
        held = self._held_buffers(buffers)
        ending_bytes = own.reducing - freed_bytes + ahead_bytes + sum(held) + gathers.lasting - gathers.always
        if index == 0:
            reducing_bytes = outer.reducing - outer.gradients - (outer.parameters - outer.lasting)
            left_bytes = own.left - own.waiting - freed_bytes + sum(self._held_buffers([*held, own.reduced]))
            left_bytes += gathers.lasting - gathers.always
            ending_bytes = max(ending_bytes, reducing_bytes + left_bytes + outer_bytes)
        # What the unit held is freed by then.
        ending_bytes += passing.input_gradients - option.held_bytes - passing.read
        return max(option.scratch.backward + running_bytes, gathered_bytes, ending_bytes)

    def _buffers_after(self, index: int) -> list[int]:
        """Bytes of the buffers in which later positions are reduced, while the backward of one runs."""
        buffers: list[int] = []
        for one in reversed(self._found[index + 1 :]):
            if one.parameters:
                buffers = [*self._held_buffers(buffers), one.reduced]
        return buffers

    def _held_buffers(self, buffers: Sequence[int]) -> list[int]:
        """Those that are not freed when the next one is about to be made."""
        found = [size for size in buffers if size]
        return found[len(found) - min(len(found), self._num_buffers - 1) :]

    def _ahead_in_forward(self, index: int, *, by: int, is_again: bool) -> tuple[int, int]:
        """Bytes of what is gathered for positions after one, by positions up to another; of copies for that."""
        sources = [group for number, group in enumerate(self._groups) if self._place.get(number, -1) <= by]
        targets = {number for group in sources for number in group.ahead_in_forward}
        found = [self._groups[one] for one in targets if self._place.get(one, -1) > index]
        found = [group for group in found if not (is_again and group.lasts)]
        return sum(group.buffer_bytes for group in found), max((one.copied_bytes for one in found), default=0)

    def _ahead_in_backward(self, index: int, others: Iterable[int] = ()) -> tuple[int, int]:
        """The same for positions before one, while its backward runs; and of other groups before it."""
        end = len(self._found)
        targets = set(others)
        for number, group in enumerate(self._groups):
            place = self._end.get(number, self._root_end)
            if place >= index and group.ahead_in_backward is not None:
                targets.update(group.ahead_in_backward)
            elif place >= index:
                earlier = (own for own in reversed(self._ends[:place]) if own)
                targets.update(next(earlier, []))
        found = [
            self._groups[one]
            for one in targets
            if self._end.get(one, end) < index and not self._groups[one].stays
        ]
        copied_bytes = max((group.copied_again_bytes for group in found), default=0)
        return sum(group.buffer_bytes for group in found), copied_bytes
