"""Values with lifetimes: everything that takes bytes for longer than one phase of a step.

A phase is the forward, a replay or the backward of one unit. An output, a skip, a saved tensor, a gradient, an argument
that a segment holds, an output that the caller holds: each is bytes, the phase that makes it and the phases that read
it. ``simulate`` allocates a value when its maker has run and frees it after its last reader *in this schedule*. A new
case is a new reader, never a new field.

What actions keep, drop and move by name (a unit's own output and held bytes) is described by numbers of the unit and of
its options: NOTE [ The memory model ] in ``recoup.planning.problem``.

NOTE [ Instances ]
    1. A unit that runs again makes its values again. Each time is an instance of its own.
    2. A phase reads the instance that was made last before it. An instance without readers lives only while its
       maker runs.
    3. What stays until the end of the step is the first instance.
    4. A backward without a forward of its own replays from what the unit's forwards read. If the unit was swept over in
       a row, a replay of that row makes what stays a second time, beside the backward's scratch.
    5. An instance that two forwards of one unit read is held for the unit's replay, and until its backward has run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise

from recoup.errors import ProblemError
from recoup.planning.actions import Backward, Forward, Keep
from recoup.planning.checks import check_bytes, check_name
from recoup.planning.schedule import Schedule

__all__ = ["SWEPT", "Instances", "Lifetime", "Phase", "Use", "merged"]

SWEPT = -1
"""In the place of an option's index: a forward that keeps nothing, or only its input."""


class Phase(Enum):
    """When a unit runs."""

    FIRST = "first forward"
    FORWARD = "forward"
    REPLAY = "replay"
    BACKWARD = "backward"
    SEGMENT = "backward of its segment"


@dataclass(frozen=True, slots=True)
class Use:
    """A phase of one unit, which makes or reads a value.

    Args:
        phase: every forward, only the first or the second one, or the backward; or, of a unit that was swept over in a
            segment, the backward of that segment's first unit, with which the segment ends.
        unit: index of the unit.
        options: those under which it uses the value (`SWEPT`: a forward that keeps nothing); empty for all.
    """

    phase: Phase
    unit: int
    options: tuple[int, ...] = ()

    def with_options(self, kept: Sequence[Sequence[int]]) -> Use | None:
        """The same where a unit has only some of its options; ``None`` if it is under none of these."""
        if not self.options:
            return self
        numbers = {SWEPT: SWEPT} | {old: new for new, old in enumerate(kept[self.unit])}
        options = tuple(numbers[option] for option in self.options if option in numbers)
        if set(options) >= set(range(len(kept[self.unit]))) and SWEPT not in options:
            return replace(self, options=())
        return replace(self, options=options) if options else None

    def holds_for(self, option: int) -> bool:
        """Whether it uses the value under an option."""
        return not self.options or option in self.options


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A value: its bytes, the phase that makes it, and the phases that read it.

    Args:
        name: for people; several values may share one.
        num_bytes: that it takes from the end of its maker to the end of its last reader.
        made: by which phase; ``None`` if it is there when the step begins.
        read: the phases that read it.
        stays: whether it lives until the end of the step.
        in_scratch: whether the scratch of its maker, and of the backward that frees it, counts it already.

    >>> skip = Lifetime("skip", 8, made=Use(Phase.FORWARD, 0), read=[Use(Phase.FORWARD, 2), Use(Phase.BACKWARD, 2)])
    >>> skip.num_bytes
    8
    """

    name: str
    num_bytes: int
    made: Use | None = field(kw_only=True)
    read: tuple[Use, ...] = field(default=(), kw_only=True)
    stays: bool = field(default=False, kw_only=True)
    in_scratch: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_name("A value", self.name)
        check_bytes(f"Value {self.name!r}", num_bytes=self.num_bytes)
        object.__setattr__(self, "read", tuple(self.read))

    @property
    def uses(self) -> Iterator[Use]:
        """Its maker and its readers."""
        return iter((self.made, *self.read) if self.made else self.read)

    def with_options(self, kept: Sequence[Sequence[int]]) -> Lifetime | None:
        """The same where units have only some of their options; ``None`` if none of these makes it."""
        made = self.made.with_options(kept) if self.made else None
        if self.made and not made:
            return None
        read = (use.with_options(kept) for use in self.read)
        return replace(self, made=made, read=tuple(use for use in read if use is not None))

    def check(self, num_units: int) -> None:
        """Refuses units that do not exist.

        Raises:
            ProblemError: it names one.
        """
        for use in self.uses:
            if not 0 <= use.unit < num_units:
                raise ProblemError(
                    f"Value {self.name!r}: there is no unit {use.unit}; the problem has units 0 to {num_units - 1}."
                )


def merged(values: Iterable[Lifetime]) -> tuple[Lifetime, ...]:
    """The same with one value in the place of several that live alike and have one name."""
    found: dict[Lifetime, int] = defaultdict(int)
    for value in values:
        found[replace(value, num_bytes=0)] += value.num_bytes
    return tuple(replace(value, num_bytes=num_bytes) for value, num_bytes in found.items() if num_bytes)


class _Runs:
    """When the units of a schedule run, and under which options."""

    def __init__(self, schedule: Schedule) -> None:
        self.forwards: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.backwards: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.backward_actions: set[int] = set()
        self.swept_in_a_row: set[int] = set()
        self.segment_of: dict[int, int] = {}
        """By unit that is swept over, the first unit of the outermost segment that it is in."""
        for index, action in enumerate(schedule):
            match action:
                case Forward():
                    option = SWEPT if action.option is None else action.option
                    self.forwards[action.unit].append((index, option))
                    is_swept = action.keep is Keep.NOTHING and action.unit > 0
                    (self.swept_in_a_row.add if is_swept else self.swept_in_a_row.discard)(action.unit)
                    if option == SWEPT:
                        first = self.segment_of.get(action.unit - 1, action.unit) if is_swept else action.unit
                        self.segment_of.setdefault(action.unit, first)
                case Backward():
                    self.backward_actions.add(index)
                    self.backwards[action.unit].append((index, action.option))

    def rerun_in(self, use: Use) -> list[int]:
        """The backwards before which a replay makes what a forward makes, though no action says so."""
        is_swept = use.phase is Phase.FORWARD and not use.options and use.unit in self.swept_in_a_row
        return [index for index, _ in self.backwards[use.unit]] if is_swept else []

    def reading(self, use: Use) -> list[int]:
        """The actions that read what a use reads."""
        found, forwards = self.of(use), self.forwards[use.unit]
        if use.phase is Phase.FORWARD and forwards and forwards[-1][1] == SWEPT:
            found += [index for index, _ in self.backwards[use.unit]]
        return found

    def is_replayed(self, unit: int) -> bool:
        """Whether a unit's forward runs more than once."""
        return len(self.forwards[unit]) > 1

    def held_until(self, unit: int, start: int, end: int) -> int:
        """The backward of a unit whose forward runs twice between two actions; -1 if it does not."""
        num_runs = sum(start < index <= end for index, _ in self.forwards[unit])
        return self.backwards[unit][-1][0] if num_runs > 1 and self.backwards[unit] else -1

    def of(self, use: Use) -> list[int]:
        """The actions that are a use."""
        if use.phase is Phase.SEGMENT:
            return self._segment_ends(use)
        runs = self.backwards[use.unit] if use.phase is Phase.BACKWARD else self.forwards[use.unit]
        runs = {Phase.FIRST: runs[:1], Phase.REPLAY: runs[1:2]}.get(use.phase, runs)
        return [index for index, option in runs if use.holds_for(option)]

    def _segment_ends(self, use: Use) -> list[int]:
        """The last backward of the segment in which a unit was swept over, if its own is under the right option."""
        is_used = any(use.holds_for(option) for _, option in self.backwards[use.unit])
        first = self.segment_of.get(use.unit)
        return [index for index, _ in self.backwards[first]] if is_used and first is not None else []


class Instances:
    """The instances of all values over a schedule, by the actions that allocate and free them.

    Attributes:
        made_bytes: by action, what it makes beyond its scratch, whether or not that outlives it.
        kept_bytes: by action, what it makes that outlives it.
        taken_bytes: by action, what it frees as it begins: its scratch counts that.
        freed_bytes: by action, what it frees as it ends.
        initial_bytes: what is there when the step begins.
    """

    def __init__(self, values: Iterable[Lifetime], schedule: Schedule) -> None:
        self._runs, self._end = _Runs(schedule), len(schedule)
        self.made_bytes: dict[int, int] = defaultdict(int)
        self.kept_bytes: dict[int, int] = defaultdict(int)
        self.taken_bytes: dict[int, int] = defaultdict(int)
        self.freed_bytes: dict[int, int] = defaultdict(int)
        self.initial_bytes = 0
        for value in values:
            self._add(value)

    def _add(self, value: Lifetime) -> None:
        made = [-1] if value.made is None else self._runs.of(value.made)
        if value.made is not None and not value.in_scratch:
            rerun = self._runs.rerun_in(value.made) if value.stays else []
            for index in (*made, *rerun):
                self.made_bytes[index] += value.num_bytes
        reads = sorted({index for use in value.read for index in self._runs.reading(use)})
        replayed = [
            use.unit for use in value.read if use.phase is Phase.FORWARD and self._runs.is_replayed(use.unit)
        ]
        for instance, (start, end) in enumerate(pairwise([*made, self._end])):
            if value.stays and instance == 0:
                self._allocate(value, start)
                continue
            last = _last_read(reads, start, end)
            if last is not None:
                last = max([last, *(self._runs.held_until(unit, start, end) for unit in replayed)])
                self._allocate(value, start)
                is_taken = value.in_scratch and last in self._runs.backward_actions
                (self.taken_bytes if is_taken else self.freed_bytes)[last] += value.num_bytes

    def _allocate(self, value: Lifetime, start: int) -> None:
        if start < 0:
            self.initial_bytes += value.num_bytes
        else:
            self.kept_bytes[start] += value.num_bytes


def _last_read(reads: Sequence[int], start: int, end: int) -> int | None:
    """The last read after ``start`` and at most at ``end``, of sorted ones."""
    position = bisect_left(reads, end + 1)
    return reads[position - 1] if position and reads[position - 1] > start else None
