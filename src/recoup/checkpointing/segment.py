"""The calls of one checkpoint, or of one span, between their forward and the end of their backward.

NOTE [ How a segment works ]

1. Every call has a `Frame`: its own function, arguments, state, environment and records. But the graph refers to the
   `Segment`, which has the frames, and replays them one after the other. A checkpoint is a segment of one call.
2. A tensor that one call returns and a later one is given is *fed*: known by a weak reference in the forward, not
   held, and taken from the replay of the call that returned it. It must be the same object, not changed in place
   meanwhile; anything else is held, as it was when the call began.
3. A replay runs every call up to the last one from which something is wanted. Those before it run to their ends,
   since their outputs are needed; in the last one it stops early. Each call numbers its saved tensors on from its own
   first, so that a call that saves too much or too little does not shift the others.
4. Arguments are looked at, and asked of hooks around the segment, when their call is about to run.
5. No reference cycles: frames do not refer to the segment, arguments in a span are held without history, and outputs
   wait in the replay only. A *function* that captures what an earlier call of its span returned does make a cycle,
   until the backward: that belongs among the arguments.
6. A call that raises ends its segment. Its frame stays, for what it left in the graph.
7. Groups: a replay runs the calls of a group for their outputs alone, and leaves behind what they are given, a
   *start*. From there the group is replayed when the backward gets to it, with the groups inside it treated likewise.
   A group that ends a replay does not run at all before that. However deep groups lie in each other, a call has one
   frame, and each of its runs costs the same.
8. A start is dropped when its replay begins. If what is wanted lies before all starts (a second backward, a value read
   twice), the replay begins at the first call. A group whose calls change in place what they are given from before
   it has no start: its calls are replayed as if they were in none. Changes that no version counter shows are safe in
   small tensors without gradients, such as statistics, of which a start has a copy.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from sys import maxsize
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from recoup.checkpointing import process_lock
from recoup.checkpointing.arguments import Arguments
from recoup.checkpointing.describe import SEEKING, Sought
from recoup.checkpointing.feeding import FedArguments, Feed, Flow, Place
from recoup.checkpointing.frame import Frame, Leaf
from recoup.checkpointing.groups import Group
from recoup.checkpointing.mismatch import Record
from recoup.checkpointing.replay import AS_FAR_AS_NEEDED, OUTPUTS_ONLY, TO_END, Manner
from recoup.errors import ReplayMismatchError
from recoup.tensors import versions_of
from recoup.torch_private import (
    current_graph_task,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    queue_callback,
)

if TYPE_CHECKING:
    from recoup.checkpointing.api import Checkpoint

__all__ = ["Segment"]

_NO_TASK = -1
_ALL = Group(0, maxsize)


@dataclass(slots=True)
class _Start:
    """Where a replay of some calls begins: their group, and what is given to them from before it."""

    group: Group
    fed: dict[Place, Tensor]
    outside: dict[int, Any] = field(default_factory=dict)
    """Arguments from outside the segment, by call, that an earlier replay asked of hooks around it."""
    versions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.versions = versions_of(list(self.fed.values()))

    def is_stale(self) -> bool:
        return versions_of(list(self.fed.values())) != self.versions


class _Made(NamedTuple):
    """What replays have made, by position in the segment."""

    values: dict[int, Tensor]
    versions: dict[int, int]

    def add(self, first: int, values: dict[int, Tensor], versions: dict[int, int]) -> None:
        """Adds what a call made, numbered on from the call's first."""
        self.values.update((first + position, tensor) for position, tensor in values.items())
        self.versions.update((first + position, version) for position, version in versions.items())


class _Lasting(dict[int, Tensor]):
    """Values that may be read any number of times."""

    def pop(self, key: int, default: Any = None) -> Any:
        return self.get(key, default)


class Segment:
    """What is left of some calls: it hands out each value of a replay once, and drops the others with the backward."""

    __slots__ = (
        "__weakref__", "_frames", "_lock", "_options", "_starts", "_task", "_values", "_versions", "_whole",
    )  # fmt: skip

    def __init__(self, options: Checkpoint, groups: tuple[Group, ...] = ()) -> None:
        self._options = options
        self._frames: list[Frame] = []
        self._whole = Group(0, maxsize, groups) if groups else _ALL
        self._starts: list[_Start] = []
        self._values: dict[int, Tensor] = {}
        self._versions: dict[int, int] = {}
        self._task = _NO_TASK
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._frames)

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        find: Callable[[Tensor], Feed | None] | None = None,
        contexts: tuple[AbstractContextManager[Any] | None, AbstractContextManager[Any] | None] = (
            None,
            None,
        ),
    ) -> Any:
        """Runs the next call, drops what it saves, and holds what its replay needs.

        In a span ``find`` says which earlier call has returned a tensor; ``contexts`` are for forward and replays.
        """
        taken = process_lock.acquire()
        try:
            arguments = Arguments(args, kwargs) if find is None else FedArguments(args, kwargs, find)
            first = self._frames[-1].first + len(self._frames[-1].records) if self._frames else 0
            frame = Frame(self._options, fn, arguments, first, contexts[1])
            self._frames.append(frame)
            push_saved_tensor_hooks(frame.pack, self.unpack)
            try:
                if contexts[0] is None:
                    output = frame.run_first(args, kwargs)
                else:
                    with contexts[0]:
                        output = frame.run_first(args, kwargs)
            finally:
                pop_saved_tensor_hooks()
            frame.settle(output)
        finally:
            if taken:
                process_lock.release()
        return output

    def is_idle(self) -> bool:
        """Whether the latest call was given no tensor and saved none."""
        return not self._frames[-1].arguments and not self._frames[-1].records

    def unpack(self, packed: Record | Leaf) -> Tensor:
        """Autograd needs a saved tensor back."""
        if isinstance(packed, Leaf):
            return self._unpack_leaf(packed)
        position = packed[0]
        # No lock for what is there: taking an entry out of a dictionary is atomic.
        tensor = self._values.pop(position, None)
        if tensor is None:
            tensor = self._fetch(position)
        if tensor._version and tensor._version != self._versions.get(position, 0):
            raise self._frame_of(position).refuse_saved(position)
        return tensor

    def _unpack_leaf(self, leaf: Leaf) -> Tensor:
        if SEEKING.active:
            raise Sought(self)
        self._note_read(leaf.position)
        if leaf.tensor._version != leaf.version:
            raise self._frame_of(leaf.position).refuse_watched(leaf.owner)
        return leaf.tensor

    def _frame_of(self, position: int) -> Frame:
        return self._frames[self._index_of(position)]

    def _index_of(self, position: int) -> int:
        """Which call saved a tensor."""
        index = len(self._frames) - 1
        while self._frames[index].first > position:
            index -= 1
        return index

    def _note_read(self, position: int) -> None:
        """What a call saved is read; before the call has ended, that is for a backward inside."""
        frame = self._frames[-1]
        if not frame.is_settled and position >= frame.first:
            frame.runs_backward = True

    def _fetch(self, position: int) -> Tensor:
        """Gives a value that has not been made yet, or was handed out before."""
        if SEEKING.active:
            raise Sought(self)
        self._note_read(position)
        task = current_graph_task()
        with self._lock:
            # Another thread of this backward may have replayed while this one waited.
            tensor: Tensor | None = self._values.pop(position, None)
            if tensor is not None:
                return tensor
            in_backward = task != _NO_TASK
            is_new = not in_backward or task != self._task
            if is_new or not self._is_ahead(position):
                self._drop()
                if not is_new:  # read a second time
                    self._values = _Lasting()
            try:
                values, versions = self._make(position, locating=False)
            except ReplayMismatchError as error:
                raise self._locate(position, error) from None
            except BaseException:
                self._drop()
                raise
            if not in_backward:
                self._drop()
                return values[position]
            # Taken before the others are there for all to see.
            tensor = values[position] if type(self._values) is _Lasting else values.pop(position)
            if not is_new:
                self._versions.update(versions)
                self._values.update(values)
            else:
                self._versions, self._task, self._values = versions, task, values
                if values or self._starts:
                    # Weakly: the callback lives until the backward ends, the segment should not.
                    queue_callback(partial(_end_backward, weakref.ref(self), task))
            return tensor

    def _is_ahead(self, position: int) -> bool:
        """Whether the replay of this backward has yet to get to a value, from where it left off."""
        return bool(self._starts) and any(self._index_of(position) in start.group for start in self._starts)

    def _drop(self) -> None:
        """Drops all that replays have left."""
        self._values, self._versions, self._starts = {}, {}, []

    def end_backward(self, task: int) -> None:
        """Drops what a backward that has ended did not read."""
        with self._lock:
            if self._task == task:
                self._drop()
                self._task = _NO_TASK

    def _locate(self, position: int, error: ReplayMismatchError) -> ReplayMismatchError:
        """Replays once more, comparing every tensor while the operation that saves it runs: that can say where."""
        self._drop()
        # The only call of a segment that was compared so has said all that there is.
        if self._options.check == "none" or (self._options.check == "values" and len(self._frames) == 1):
            return error
        try:
            self._make(position, locating=True)
        except ReplayMismatchError as located:
            return located
        except Exception:
            return error
        finally:
            self._drop()
        return error

    def _make(self, position: int, *, locating: bool) -> tuple[dict[int, Tensor], dict[int, int]]:
        """Replays until a wanted value is there; to locate a mismatch, all calls are compared as they run."""
        if len(self._frames) == 1:  # nothing flows
            frame = self._frames[0]
            frame.refuse_stale()
            args, kwargs = frame.arguments.put_together(frame.arguments.rebuild(), None)
            values, versions, _ = frame.run_as_then(args, kwargs, self._manner(locating))
            return values, versions
        made = _Made({}, {})
        while position not in made.values:
            self._replay_from(self._take_start(self._index_of(position)), made, locating=locating)
        return made

    def _manner(self, locating: bool, *, to_end: bool = False) -> Manner:
        if locating or self._options.check == "values":
            return Manner(carefully=True, to_end=to_end)
        return TO_END if to_end else AS_FAR_AS_NEEDED

    def _take_start(self, index: int) -> _Start:
        """The start of the smallest part that a replay has reached and that has this call in it."""
        for position, start in enumerate(self._starts):
            if index in start.group:
                del self._starts[position]
                if not start.is_stale():
                    return start
                self._whole = _ALL
                break
        self._starts.clear()
        return _Start(self._whole, {})

    def _replay_from(self, start: _Start, made: _Made, *, locating: bool) -> None:
        """Replays the calls of a part; those of groups inside it for their outputs only."""
        first, end = start.group.first, self._end_of_wanted(start.group)
        flow = Flow((frame.arguments for frame in self._frames[first:end]), self._options.check, start.fed)
        start.fed = {}  # from here on the flow drops each tensor with its last reader
        # To say which call differs, each is compared: none is run for its outputs only.
        groups = {} if locating else {group.first: group for group in self._with_starts(start.group.groups)}
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
                outside = self._replay_call(index, start, flow, made, OUTPUTS_ONLY)
                if left is not None:
                    left.outside[index] = outside
            index = group.last + 1

    def _replay_call(self, index: int, start: _Start, flow: Flow, made: _Made, manner: Manner) -> Any:
        """Replays one call; returns what it was given from outside the segment."""
        frame = self._frames[index]
        frame.refuse_stale()
        outside = start.outside.pop(index, None)
        if outside is None:
            outside = frame.arguments.rebuild()
        args, kwargs = frame.arguments.put_together(outside, flow.give)
        values, versions, output = frame.run_as_then(args, kwargs, manner)
        made.add(frame.first, values, versions)
        if manner.to_end:
            flow.put(index, frame.fn, output)
        # Nothing but its readers keeps an output while the next call runs: this returns none of it.
        return outside

    def _with_starts(self, groups: Iterable[Group]) -> Iterator[Group]:
        """The groups that can be replayed from their starts: not those whose calls change these in place."""
        for group in groups:
            frames = self._frames[group.first : group.last + 1]
            changed = {place for frame in frames for place in frame.arguments.changed_feeds}
            if any(place[0] < group.first for place in changed):
                yield from self._with_starts(group.groups)
            else:
                yield group

    def _leave_start(self, group: Group, around: _Start, flow: Flow) -> _Start | None:
        """Notes what the wanted calls of a group are given from before it, as far as this replay has it."""
        wanted = self._frames[group.first : self._end_of_wanted(group)]
        if not wanted:
            return None
        feeds = (feed for frame in wanted for feed in frame.arguments.feeds.values())
        places = {(feed.call, feed.place) for feed in feeds if feed.call < group.first}
        outside = {index: given for index, given in around.outside.items() if index in group}
        start = _Start(group, {place: flow.look_at(place) for place in places}, outside)
        self._starts.append(start)
        return start

    def _end_of_wanted(self, group: Group) -> int:
        """One past the last call of a group from which something is wanted."""
        end = min(group.last + 1, len(self._frames))
        while end > group.first and not self._frames[end - 1].is_wanted():
            end -= 1
        return end

    def __repr__(self) -> str:
        if len(self._frames) == 1:
            return repr(self._frames[0])
        calls = "".join(f"\n  {frame!r}" for frame in self._frames)
        return f"<span of {len(self._frames)} calls:{calls}>"


def _end_backward(reference: weakref.ref[Segment], task: int) -> None:
    segment = reference()
    if segment is not None:
        segment.end_backward(task)
