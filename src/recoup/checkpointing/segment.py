"""The calls of one span between their forward and the end of their backward.

NOTE [ How a span works ]

1. Every call of the span has a `Frame`: its own function, arguments, state, surroundings and records. But the
   graph refers to the `Segment`, which has the frames, and replays them one after the other.
2. A tensor that one call returns and a later one is given is *fed*: known by a weak reference in the forward, not
   held, and taken from the replay of the call that returned it. It must be the same object, not changed in place
   meanwhile; anything else is held, as it was when the call began.
3. A replay runs every call up to the last one from which something is wanted. Those before it run to their ends,
   since their outputs are needed; in the last one it stops early. Numbering starts anew with each call, so that a
   call that saves too much or too little does not shift the others.
4. Arguments are looked at, and asked of hooks around the span, when their call is about to run.
5. No reference cycles: frames do not refer to the segment, arguments are held without history, and outputs wait
   in the replay only. A *function* that captures what an earlier call of its span returned does make a cycle,
   until the backward: that belongs among the arguments.
6. A call that raises ends its segment. Its frame stays, for what it left in the graph.
7. Groups: a replay runs the calls of a group for their outputs alone, and leaves behind what they are given, a
   *start*. From there the group is replayed when the backward gets to it, with the groups inside it treated likewise.
   A group that ends a replay does not run at all before that. However deep groups lie in each other, a call has one
   frame, and each of its runs costs the same.
8. A start goes when its replay begins. If what is wanted lies before all starts (a second backward, a value read
   twice), the replay begins at the first call. A group whose calls change in place what they are given from before
   it has no start: its calls are replayed as if they were in none. Changes that no version counter shows are safe in
   small tensors without gradients, such as statistics, of which a start has a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from sys import maxsize
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from torch import Tensor

from recoup.checkpointing.feeding import FedArguments, Flow, Place
from recoup.checkpointing.frame import Frame, Leaf
from recoup.checkpointing.groups import Group
from recoup.checkpointing.mismatch import Record
from recoup.checkpointing.replay import FORGETFUL, Manner
from recoup.checkpointing.replayable import SEEKING, Replayable, Sought
from recoup.tensors import versions_of

if TYPE_CHECKING:
    from recoup.checkpointing.api import Checkpoint

__all__ = ["Segment"]

_Key: TypeAlias = tuple[int, int]
"""The index of a call and a position among what it saved."""


class _Call(NamedTuple):
    frame: Frame
    arguments: FedArguments


@dataclass(slots=True)
class _Start:
    """Where a replay of some calls begins: their group, and what is given to them from before it."""

    group: Group
    fed: dict[Place, Tensor]
    outside: dict[int, Sequence[Tensor]] = field(default_factory=dict)
    """Arguments from outside the span, by call, that an earlier replay asked of hooks around the span."""
    versions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.versions = versions_of(list(self.fed.values()))

    def is_stale(self) -> bool:
        return versions_of(list(self.fed.values())) != self.versions


class _Made(NamedTuple):
    """What replays have set aside."""

    values: dict[_Key, Tensor]
    versions: dict[_Key, int]


class Segment(Replayable):
    """What is left of the calls of a span."""

    __slots__ = ("_calls", "_starts", "_whole")

    def __init__(self, options: Checkpoint, groups: tuple[Group, ...] = ()) -> None:
        super().__init__(options)
        self._calls: list[_Call] = []
        self._whole = Group(0, maxsize, groups)
        self._starts: list[_Start] = []

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, fn: Callable[..., Any], arguments: FedArguments) -> Frame:
        """Begins a call."""
        frame = Frame(self._options, fn, arguments)
        self._calls.append(_Call(frame, arguments))
        return frame

    def unpack_hook(self) -> Callable[[Record | Leaf], Tensor]:
        """What autograd calls when it needs back what the latest call saved."""
        return partial(self._unpack, len(self._calls) - 1)

    def _unpack(self, index: int, packed: Record | Leaf) -> Tensor:
        frame = self._calls[index].frame
        frame.note_read()
        if isinstance(packed, Leaf):
            if SEEKING.active:
                raise Sought(self)
            return frame.unpack(packed)
        key = index, packed[0]
        tensor = self._values.pop(key, None)
        if tensor is None:
            tensor = self._fetch(key)
        if tensor._version and tensor._version != self._versions.get(key, 0):
            raise frame.refuse_saved(packed[0])
        return tensor

    def _is_ahead(self, key: _Key) -> bool:
        return any(key[0] in start.group for start in self._starts)

    def _has_left(self) -> bool:
        return bool(self._values or self._starts)

    def _needs_locating(self) -> bool:
        return self._options.check != "none"

    def _drop(self) -> None:
        super()._drop()
        self._starts = []

    def _make(self, key: _Key, *, locating: bool) -> tuple[dict[_Key, Tensor], dict[_Key, int]]:
        made = _Made({}, {})
        while key not in made.values:
            self._replay_from(self._take_start(key[0]), made, locating=locating)
        return made

    def _take_start(self, index: int) -> _Start:
        """The start of the smallest part that a replay has reached and that has this call in it."""
        for position, start in enumerate(self._starts):
            if index in start.group:
                del self._starts[position]
                if not start.is_stale():
                    return start
                self._whole = Group(0, maxsize)
                break
        self._starts.clear()
        return _Start(self._whole, {})

    def _replay_from(self, start: _Start, made: _Made, *, locating: bool) -> None:
        """Replays the calls of a part; those of groups inside it for their outputs only."""
        first, end = start.group.first, self._end_of_wanted(start.group)
        flow = Flow((call.arguments for call in self._calls[first:end]), self._options.check, start.fed)
        start.fed = {}  # from here on it is the flow that lets go of each tensor with its last reader
        # To say which call went astray, each is compared: none is run for its outputs only.
        inner = () if locating else self._with_starts(start.group.groups)
        groups = {group.first: group for group in inner}
        index = first
        while index < end:
            group = groups.get(index)
            if group is None:
                self._replay_call(index, start, flow, made, self._manner(locating, to_end=index < end - 1))
                index += 1
                continue
            left = self._leave_start(group, start, flow)
            if end <= group.last + 1:
                return  # nothing after it needs its outputs
            for index in range(group.first, group.last + 1):
                outside = self._replay_call(index, start, flow, made, FORGETFUL)
                if left is not None:
                    left.outside[index] = outside
            index = group.last + 1

    def _replay_call(
        self, index: int, start: _Start, flow: Flow, made: _Made, manner: Manner
    ) -> Sequence[Tensor]:
        """Replays one call; returns what it was given from outside the span."""
        frame, arguments = self._calls[index]
        frame.refuse_stale()
        outside = start.outside.pop(index, None)
        if outside is None:
            outside, _ = arguments.rebuild()
        args, kwargs = arguments.put_together(outside, flow.give)
        values, versions, output = frame.run_as_then(args, kwargs, manner)
        made.values.update(((index, position), tensor) for position, tensor in values.items())
        made.versions.update(((index, position), version) for position, version in versions.items())
        if manner.to_end:
            flow.put(index, frame.fn, output)
        # Nothing but its readers keeps an output while the next call runs: this returns none of it.
        return outside

    def _with_starts(self, groups: Iterable[Group]) -> Iterator[Group]:
        """The groups that can be replayed from their starts: not those whose calls change these in place."""
        for group in groups:
            changed = {place for call in self._calls_of(group) for place in call.arguments.changed_feeds}
            if any(place[0] < group.first for place in changed):
                yield from self._with_starts(group.groups)
            else:
                yield group

    def _leave_start(self, group: Group, around: _Start, flow: Flow) -> _Start | None:
        """Notes what the wanted calls of a group are given from before it, as far as this replay has it."""
        wanted = self._calls[group.first : self._end_of_wanted(group)]
        if not wanted:
            return None
        feeds = (feed for call in wanted for feed in call.arguments.feeds.values())
        places = {(feed.call, feed.place) for feed in feeds if feed.call < group.first}
        outside = {index: given for index, given in around.outside.items() if index in group}
        start = _Start(group, {place: flow.look_at(place) for place in places}, outside)
        self._starts.append(start)
        return start

    def _calls_of(self, group: Group) -> list[_Call]:
        return self._calls[group.first : group.last + 1]

    def _end_of_wanted(self, group: Group) -> int:
        """One past the last call of a group from which something is wanted."""
        end = min(group.last + 1, len(self._calls))
        while end > group.first and not self._calls[end - 1].frame.is_wanted():
            end -= 1
        return end

    def __repr__(self) -> str:
        num_calls = len(self._calls)
        calls = "".join(f"\n  {call.frame!r}" for call in self._calls)
        return f"<span of {num_calls} call{'s' * (num_calls != 1)}:{calls}>"
