"""One checkpointed call between its forward and the end of its backward.

NOTE [ How a frame works ]

1. In the forward, every tensor that autograd saves goes through `Frame.pack`, which notes its kind and lets
   go of it. What autograd keeps instead is the *record*, a small tuple that the frame's list also holds.
2. The first `Frame.unpack` of a backward replays the function. Its saved tensors arrive in the same order;
   the ones that are still wanted are set aside in ``values``.
3. A record is wanted while someone besides the list refers to it, which its reference count tells. Parts
   of the graph that were dropped (an unused output) are neither computed nor held, and the replay stops as
   soon as nothing more is wanted. No weak references are needed for that.
4. Every value is handed out once and forgotten. One that is read a second time in the same backward costs a
   second replay, after which values stay until that backward ends.
5. Each backward (autograd's graph task) replays for itself; what it leaves over is dropped when it ends.
6. Leaves that need a gradient (parameters) are held as they are: the graph holds them anyway. Their version
   counters tell whether an optimizer stepped in between.
7. No reference cycles: nothing that the forward's graph keeps refers to a tensor with a history, and a frame
   refers to no graph. Tensors set aside do have the replay's history (detaching each would cost more than all
   else here), so that graph's hooks forget them when the replay ends. Reference counting frees everything.
8. Autograd ties what it unpacks to the history that it remembers itself, not to the replay's.
9. An inner frame's arguments go through the outer frame's hooks (see `Arguments`), so nesting needs no rule
   of its own. Locks are taken from the inside out only.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from recoup.checkpointing import mismatch
from recoup.checkpointing.arguments import Arguments
from recoup.checkpointing.digest import digest
from recoup.checkpointing.environment import Environment
from recoup.checkpointing.mismatch import Record
from recoup.checkpointing.replay import replay
from recoup.checkpointing.state import FunctionState

if TYPE_CHECKING:
    from recoup.checkpointing.api import Checkpoint

__all__ = ["Frame"]

_current_task: Callable[[], int] = torch._C._current_graph_task_id
_queue_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
_NO_TASK = -1


class _Leaf(NamedTuple):
    tensor: Tensor
    version: int


class _Lasting(dict[int, Tensor]):
    """Values that may be read any number of times."""

    def pop(self, position: int, default: Any = None) -> Any:
        return self.get(position, default)


class Frame:
    """What is left of a checkpointed call: the function, its arguments, its surroundings, and records."""

    __slots__ = (
        "__weakref__", "_arguments", "_digests", "_environment", "_lock", "_options", "_records",
        "_replay_context", "_settled", "_state", "_task", "_values", "_versions", "fn",
    )  # fmt: skip

    def __init__(
        self,
        options: Checkpoint,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        replay_context: AbstractContextManager[Any] | None,
    ) -> None:
        self.fn = fn
        self._options = options
        self._replay_context = replay_context
        self._arguments = Arguments(args, kwargs)
        state = FunctionState(fn, self._arguments.others)
        self._environment = Environment(state.generators, preserve_rng=options.preserve_rng)
        self._state = None if state.is_empty() else state
        if self._state is not None:
            self._state.note(preserve_buffers=options.preserve_buffers)
        self._records: list[Record] = []
        self._digests: list[Tensor | None] = []
        self._values: dict[int, Tensor] = {}
        self._versions: dict[int, int] = {}
        self._task = _NO_TASK
        self._settled = False
        self._lock = threading.RLock()

    @property
    def num_tensors(self) -> int:
        """How many tensors the call was given."""
        return len(self._arguments)

    def settle(self) -> None:
        """Ends the forward: from here on only what the replay needs is held."""
        self._arguments.settle()
        self._environment.settle()
        if self._state is not None:
            self._state.settle()
        self._settled = True

    def pack(self, tensor: Tensor) -> Record | _Leaf:
        """Autograd saves a tensor in the forward: note its kind, let go of it."""
        records = self._records
        record = (len(records), tensor.shape, tensor.dtype, tensor.device)
        records.append(record)
        if tensor.is_leaf and tensor.requires_grad:
            return _Leaf(tensor, tensor._version)
        return record

    def pack_with_digest(self, tensor: Tensor) -> Record | _Leaf:
        """As `pack`, and note the content too."""
        self._digests.append(digest(tensor))
        return self.pack(tensor)

    def unpack(self, packed: Record | _Leaf) -> Tensor:
        """Autograd needs a saved tensor back."""
        if type(packed) is _Leaf:
            return self._unpack_leaf(packed)
        position = packed[0]
        # No lock for what is there: taking an entry out of a dictionary is atomic.
        tensor = self._values.pop(position, None)
        if tensor is None:
            tensor = self._unpack_slowly(position)
        if tensor._version and tensor._version != self._versions.get(position, 0):
            raise mismatch.changed_saved(self.fn, f"saved tensor {position + 1} of {len(self._records)}")
        return tensor

    def _unpack_leaf(self, leaf: _Leaf) -> Tensor:
        if leaf.tensor._version != leaf.version:
            self._refuse_stale()
            raise mismatch.changed_saved(self.fn, f"a leaf of shape {list(leaf.tensor.shape)}")
        return leaf.tensor

    def _unpack_slowly(self, position: int) -> Tensor:
        task = _current_task()
        with self._lock:
            # Another thread of this backward may have replayed while this one waited.
            if position not in self._values:
                self._values = {}
                self._values, self._versions = self._replay()
                if task == _NO_TASK:  # read outside of a backward
                    values, self._values = self._values, {}
                    return values[position]
                if task == self._task:  # read a second time
                    self._values = _Lasting(self._values)
                else:
                    self._task = task
                    # Weakly: the callback lives until the backward ends, the frame should not.
                    _queue_callback(partial(_forget, weakref.ref(self)))
            return self._values.pop(position)

    def forget(self) -> None:
        """Drops what the last replay left over."""
        self._values, self._versions = {}, {}
        self._task = _NO_TASK

    def _replay(self) -> tuple[dict[int, Tensor], dict[int, int]]:
        self._refuse_stale()
        args, kwargs = self._arguments.rebuild()
        if self._replay_context is None and self._state is None and not self._environment.differs():
            return self._run_again(args, kwargs)
        with ExitStack() as stack:
            if self._state is not None:
                self._state.enter(stack)
            self._environment.enter(stack)
            if self._replay_context is not None:
                stack.enter_context(self._replay_context)
            return self._run_again(args, kwargs)

    def _run_again(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[dict[int, Tensor], dict[int, int]]:
        return replay(
            self.fn,
            args,
            kwargs,
            options=self._options,
            records=self._records,
            digests=self._digests,
            complete=self._settled,
        )

    def _refuse_stale(self) -> None:
        slot = self._arguments.first_stale()
        if slot is not None:
            path = self._arguments.path(slot, mismatch.parameter_names(self.fn))
            raise mismatch.changed_argument(self.fn, path, by_function=slot in self._arguments.changed)
        name = None if self._state is None else self._state.first_stale()
        if name is not None:
            raise mismatch.changed_state(self.fn, name)

    def __repr__(self) -> str:
        tensors = ", ".join(self._arguments.describe())
        return (
            f"<checkpoint of {mismatch.describe_function(self.fn)}: holds [{tensors}],"
            f" {len(self._records)} saved tensors to replay, {self._environment.describe()}>"
        )


def _forget(reference: weakref.ref[Frame]) -> None:
    frame = reference()
    if frame is not None:
        frame.forget()
