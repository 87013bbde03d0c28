"""One checkpointed call between its forward and the end of its backward.

NOTE [ How a frame works ]

1. In the forward, every tensor that autograd saves goes through `Frame._pack`, which notes its kind and lets
   go of it. What autograd keeps instead is the *record*, a small tuple that the frame's list also holds.
2. The first `Frame.unpack` of a backward replays the function. Its saved tensors arrive in the same order;
   the ones that are still wanted are set aside in ``values``.
3. A record is wanted while someone besides the list refers to it, which its reference count tells. Parts
   of the graph that were dropped (an unused output) are neither computed nor held, and the replay stops as
   soon as nothing more is wanted. No weak references are needed for that.
4. Every value is handed out once and forgotten. One that is read a second time in the same backward costs a
   second replay, after which values stay until that backward ends.
5. Each backward (autograd's graph task) replays for itself; what it leaves over is dropped when it ends.
6. Leaves that need a gradient (parameters), and views of them, are held as they are: the graph holds them anyway.
   Their version counters tell whether an optimizer stepped in between. The replay must save the same ones.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recoup.checkpointing import mismatch
from recoup.checkpointing.arguments import Arguments
from recoup.checkpointing.digest import digest
from recoup.checkpointing.environment import Environment
from recoup.checkpointing.guard import StaleGuard
from recoup.checkpointing.mismatch import Record, kind_of
from recoup.checkpointing.reach import Reach
from recoup.checkpointing.replay import is_replaying, replay
from recoup.checkpointing.state import FunctionState
from recoup.errors import InputChangedError, ReplayMismatchError

if TYPE_CHECKING:
    from recoup.checkpointing.api import Checkpoint

__all__ = ["Frame", "Sought", "seeking"]

_current_task: Callable[[], int] = torch._C._current_graph_task_id
_queue_callback: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)
_NO_TASK = -1


class Sought(BaseException):
    """Carries a frame out of `unpack` while `seeking`."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame


class _Seeking(threading.local):
    active = False


_seeking = _Seeking()


@contextmanager
def seeking() -> Iterator[None]:
    """Makes frames on this thread show themselves, by raising `Sought`, instead of replaying."""
    _seeking.active = True
    try:
        yield
    finally:
        _seeking.active = False


class _Leaf:
    """A leaf that needs a gradient, or a view of one, held as it is; ``owner`` is the leaf itself."""

    __slots__ = ("owner", "tensor", "version")

    def __init__(self, tensor: Tensor, owner: Tensor) -> None:
        self.tensor = tensor
        self.owner = owner
        self.version = tensor._version


class _Lasting(dict[int, Tensor]):
    """Values that may be read any number of times."""

    def pop(self, position: int, default: Any = None) -> Any:
        return self.get(position, default)


class Frame:
    """What is left of a checkpointed call: the function, its arguments, its surroundings, and records."""

    __slots__ = (
        "__weakref__", "_arguments", "_digests", "_environment", "_leaves", "_lock", "_options", "_records",
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
        reach = Reach(fn, self._arguments.others)
        self._state = None
        if reach.roots or reach.bindings:
            self._state = FunctionState(
                reach, preserve_buffers=options.preserve_buffers, waits=not is_replaying()
            )
        self._environment = Environment(reach.generators, preserve_rng=options.preserve_rng)
        self._records: list[Record] = []
        self._leaves: dict[int, Tensor] = {}
        self._digests: list[Tensor | None] = []
        self._values: dict[int, Tensor] = {}
        self._versions: dict[int, int] = {}
        self._task = _NO_TASK
        self._settled = False
        self._lock = threading.RLock()

    def is_idle(self) -> bool:
        """Whether the call was given no tensor and saved none."""
        return not self._arguments and not self._records

    def settle(self) -> None:
        """Ends the forward: from here on only what the replay needs is held."""
        self._arguments.settle()
        self._environment.settle()
        if self._state is not None:
            self._state.settle()
        self._settled = True

    def pack_hook(self) -> Callable[[Tensor], Record | _Leaf]:
        """What autograd calls for every tensor that it saves in the forward."""
        if self._options.check == "values":
            return self._pack_with_digest
        return self._pack if self._state is None else self._pack_beside_modules

    def _pack(self, tensor: Tensor) -> Record | _Leaf:
        """Notes the kind of a saved tensor and lets go of it."""
        records = self._records
        record = (len(records), kind_of(tensor))
        records.append(record)
        if tensor.is_leaf and tensor.requires_grad:
            self._leaves[record[0]] = tensor
            return _Leaf(tensor, tensor)
        return record

    def _pack_beside_modules(self, tensor: Tensor) -> Record | _Leaf:
        """As `_pack`; views of parameters, such as a transposed weight, are held like parameters."""
        base = tensor._base
        if base is None or not (base.is_leaf and base.requires_grad):
            return self._pack(tensor)
        position = len(self._records)
        self._records.append((position, kind_of(tensor)))
        self._leaves[position] = base
        return _Leaf(tensor.detach(), base)

    def _pack_with_digest(self, tensor: Tensor) -> Record | _Leaf:
        """As `_pack_beside_modules`, and notes the content too."""
        self._digests.append(digest(tensor))
        return self._pack_beside_modules(tensor)

    def unpack(self, packed: Record | _Leaf) -> Tensor:
        """Autograd needs a saved tensor back."""
        if isinstance(packed, _Leaf):
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
        if _seeking.active:
            raise Sought(self)
        if leaf.tensor._version != leaf.version:
            raise self._refuse_watched(leaf.owner)
        return leaf.tensor

    def _unpack_slowly(self, position: int) -> Tensor:
        if _seeking.active:
            raise Sought(self)
        task = _current_task()
        with self._lock:
            # Another thread of this backward may have replayed while this one waited.
            tensor = self._values.pop(position, None)
            if tensor is not None:
                return tensor
            self._values = {}
            values, self._versions = self._replay()
            # Taken before the others are there for all to see.
            tensor = values.pop(position)
            if task == self._task and task != _NO_TASK:  # read a second time
                values[position] = tensor
                self._values = _Lasting(values)
            elif task != _NO_TASK:
                self._task = task
                self._values = values
                if values:
                    # Weakly: the callback lives until the backward ends, the frame should not.
                    _queue_callback(partial(_forget, weakref.ref(self), task))
            return tensor

    def forget(self, task: int) -> None:
        """Drops what a backward that has ended left over."""
        with self._lock:
            if self._task == task:
                self._values = {}
                self._task = _NO_TASK

    def _replay(self) -> tuple[dict[int, Tensor], dict[int, int]]:
        slot = self._arguments.first_stale()
        if slot is not None:
            path = self._arguments.path(slot, mismatch.parameter_names(self.fn))
            raise mismatch.changed_argument(self.fn, path, by_function=slot in self._arguments.changed)
        try:
            return self._run_again(carefully=self._options.check == "values")
        except ReplayMismatchError as error:
            if self._options.check != "metadata":
                raise
            raise self._locate(error) from None

    def _locate(self, error: ReplayMismatchError) -> ReplayMismatchError:
        """Replays once more, comparing every tensor while the operation that saves it runs: that can say where."""
        try:
            self._run_again(carefully=True)
        except ReplayMismatchError as located:
            return located
        except Exception:
            return error
        return error

    def _run_again(self, *, carefully: bool) -> tuple[dict[int, Tensor], dict[int, int]]:
        args, kwargs = self._arguments.rebuild()
        if self._replay_context is None and self._state is None and not self._environment.differs():
            return self._run(args, kwargs, carefully)
        guard = None
        with ExitStack() as stack:
            if self._state is not None:
                self._state.enter(stack)
                if stale := self._state.stale():
                    guard = stack.enter_context(StaleGuard(stale, self._refuse_watched))
            self._environment.enter(stack)
            if self._replay_context is not None:
                stack.enter_context(self._replay_context)
            try:
                return self._run(args, kwargs, carefully)
            except Exception:
                if guard is not None and guard.error is not None:
                    raise guard.error from None
                raise

    def _run(
        self, args: Sequence[Any], kwargs: dict[str, Any], carefully: bool
    ) -> tuple[dict[int, Tensor], dict[int, int]]:
        records, leaves, digests = self._records, self._leaves, self._digests
        return replay(
            self.fn, args, kwargs, self._options, records, leaves, digests, self._settled, carefully
        )

    def _refuse_watched(self, tensor: Tensor) -> InputChangedError:
        name, by_function = f"a leaf of shape {list(tensor.shape)}", False
        if self._state is not None:
            name, by_function = self._state.describe(tensor)
        return mismatch.changed_state(self.fn, name, by_function=by_function)

    def __repr__(self) -> str:
        num_saved = len(self._records)
        return (
            f"<checkpoint of {mismatch.describe_function(self.fn)}: holds [{', '.join(self._arguments.describe())}],"
            f" {num_saved} saved tensor{'s' * (num_saved != 1)} to replay, {self._environment.describe()}>"
        )


def _forget(reference: weakref.ref[Frame], task: int) -> None:
    frame = reference()
    if frame is not None:
        frame.forget(task)
