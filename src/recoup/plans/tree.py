"""A schedule as nested segments: what an eager model can run.

A persistent schedule of a chain is a list of items: a unit under one of its options, or a segment, whose units run
forward and keep only the segment's input. A segment's replay is such a list again, of the same units.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from recoup.errors import ScheduleError
from recoup.planning import Action, Backward, Forward, Keep, Schedule

__all__ = ["Item", "Leaf", "Segment", "leaves_of", "tree_of"]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A unit that runs under one of its options."""

    unit: int
    option: int

    @property
    def first(self) -> int:
        """The unit."""
        return self.unit

    @property
    def last(self) -> int:
        """The unit."""
        return self.unit


@dataclass(frozen=True, slots=True)
class Segment:
    """Units ``first`` to ``last``, forgotten together; ``items`` is how their replay runs."""

    first: int
    last: int
    items: tuple[Item, ...]


Item: TypeAlias = Leaf | Segment


def leaves_of(items: Iterable[Item]) -> Iterator[Leaf]:
    """The units of some items, each under the option that it has in its backward."""
    for item in items:
        if isinstance(item, Leaf):
            yield item
        else:
            yield from leaves_of(item.items)


def tree_of(schedule: Schedule, num_units: int) -> tuple[Item, ...]:
    """The nested segments that a schedule consists of.

    Raises:
        ScheduleError: it is no persistent schedule of forwards and backwards.

    >>> from recoup.planning import Backward, Forward, Keep, Schedule
    >>> keep = lambda unit: Forward(unit, keep=Keep.OPTION, option=0)
    >>> actions = [Forward(0), Forward(1), keep(2), Backward(2, option=0)]
    >>> actions += [keep(0), keep(1), Backward(1, option=0), Backward(0, option=0)]
    >>> tree_of(Schedule(actions), 3)
    (Segment(first=0, last=1, items=(Leaf(unit=0, option=0), Leaf(unit=1, option=0))), Leaf(unit=2, option=0))
    """
    reader = _Reader(schedule.actions)
    items = reader.read(0, num_units - 1)
    if reader.position < len(schedule):
        raise reader.error()
    return items


class _Reader:
    """Reads a schedule's actions one by one."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self.actions, self.position = actions, 0

    def error(self) -> ScheduleError:
        position = self.position
        action = self.actions[position] if position < len(self.actions) else "the end"
        return ScheduleError(
            f"Action {position} ({action}): an eager model runs persistent schedules of forwards and backwards only."
        )

    def peek(self) -> Action | None:
        return self.actions[self.position] if self.position < len(self.actions) else None

    def read(self, first: int, last: int) -> tuple[Item, ...]:
        """Units ``first`` to ``last``: their forwards, then their backwards."""
        spans: list[tuple[int, int] | None] = []
        unit = first
        while unit <= last:
            action = self.peek()
            if isinstance(action, Backward) and unit == last and action.unit == last:
                # A unit that ends a part and needs only its input has no forward of its own.
                spans.append(None)
                unit += 1
                break
            if not isinstance(action, Forward) or action.unit != unit:
                raise self.error()
            self.position += 1
            if action.keep is Keep.OPTION:
                spans.append(None)
                unit += 1
                continue
            end = self._swept_to(unit, last)
            spans.append((unit, end))
            unit = end + 1
        items: list[Item] = []
        for span in reversed(spans):
            unit -= 1 if span is None else span[1] - span[0] + 1
            items.append(self._leaf(unit) if span is None else self._segment(*span))
        return tuple(reversed(items))

    def _swept_to(self, unit: int, last: int) -> int:
        end = unit
        while end < last:
            action = self.peek()
            is_next = isinstance(action, Forward) and action.unit == end + 1 and action.keep is Keep.NOTHING
            if not is_next:
                break
            self.position += 1
            end += 1
        return end

    def _leaf(self, unit: int) -> Leaf:
        action = self.peek()
        if not isinstance(action, Backward) or action.unit != unit:
            raise self.error()
        self.position += 1
        return Leaf(unit, action.option)

    def _segment(self, first: int, last: int) -> Item:
        start = self.position
        items = self.read(first, last)
        if first == last and isinstance(self.actions[start], Backward):
            # Kept only its input, and its option replays from there: the option alone says it all.
            return items[0]
        return Segment(first, last, items)
