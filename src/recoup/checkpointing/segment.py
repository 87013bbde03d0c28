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
7. Spans in spans: an inner span's arguments go through the hooks of the outer call around each of its calls. The
   replay of the outer span must make them again in the same order, so its inner spans are made anew by ``begin``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from torch import Tensor

from recoup.checkpointing.feeding import FedArguments, Flow
from recoup.checkpointing.frame import Frame, Leaf
from recoup.checkpointing.mismatch import Record
from recoup.checkpointing.replay import Manner
from recoup.checkpointing.replayable import SEEKING, Replayable, Sought

if TYPE_CHECKING:
    from recoup.checkpointing.api import Checkpoint

__all__ = ["Begin", "Segment"]

Begin: TypeAlias = Callable[[], Callable[..., Any]]
_Key: TypeAlias = tuple[int, int]
"""The index of a call and a position among what it saved."""


class _Call(NamedTuple):
    frame: Frame
    arguments: FedArguments


class Segment(Replayable):
    """What is left of the calls of a span."""

    __slots__ = ("_begin", "_calls")

    def __init__(self, options: Checkpoint, begin: Begin) -> None:
        super().__init__(options)
        self._begin = begin
        self._calls: list[_Call] = []

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
        if isinstance(packed, Leaf):
            if SEEKING.active:
                raise Sought(self)
            return self._calls[index].frame.unpack(packed)
        key = index, packed[0]
        tensor = self._values.pop(key, None)
        if tensor is None:
            tensor = self._fetch(key)
        if tensor._version and tensor._version != self._versions.get(key, 0):
            raise self._calls[index].frame.refuse_saved(packed[0])
        return tensor

    def _run_again(self, *, carefully: bool) -> tuple[dict[_Key, Tensor], dict[_Key, int]]:
        values: dict[_Key, Tensor] = {}
        versions: dict[_Key, int] = {}
        calls = self._calls_to_replay()
        flow = Flow((call.arguments for call in calls), self._options.check)
        through = self._begin()
        for index, (frame, arguments) in enumerate(calls):
            frame.refuse_stale()
            args, kwargs = arguments.rebuild_from(flow.give)
            is_last = index == len(calls) - 1
            manner = Manner(carefully, to_end=not is_last, through=through)
            made, made_versions, output = frame.run_as_then(args, kwargs, manner)
            values.update(((index, position), tensor) for position, tensor in made.items())
            versions.update(((index, position), version) for position, version in made_versions.items())
            if not is_last:
                flow.put(index, frame.fn, output)
            # Nothing but its readers may keep an output while the next call runs.
            del args, kwargs, made, output
        return values, versions

    def _calls_to_replay(self) -> list[_Call]:
        """The calls up to the last one from which something is wanted."""
        last = len(self._calls) - 1
        while not self._calls[last].frame.is_wanted():
            last -= 1
        return self._calls[: last + 1]

    def __repr__(self) -> str:
        num_calls = len(self._calls)
        calls = "".join(f"\n  {call.frame!r}" for call in self._calls)
        return f"<span of {num_calls} call{'s' * (num_calls != 1)}:{calls}>"
