"""One checkpointed call: what its forward leaves behind, and how it is run again.

NOTE [ How a frame works ]

1. In the forward, every tensor that autograd saves goes through `Frame.pack`, which notes its kind and drops it.
   What autograd keeps instead is the *record*, a small tuple that the frame's list also holds.
2. The first `Segment.unpack` of a backward replays the function. Its saved tensors arrive in the same order; those that
   are still wanted are kept by their positions.
3. A record is wanted while someone besides the list refers to it, which its reference count tells. Parts of the graph
   that were dropped (an unused output) are neither computed nor held, and the replay stops as soon as nothing more is
   wanted. No weak references are needed for that.
4. Every value is handed out once and dropped. One that is read a second time in the same backward costs a second
   replay, after which values stay until that backward ends.
5. Each backward (autograd's graph task) replays for itself; what it does not read is dropped when it ends.
6. Leaves that need a gradient (parameters), and views of them, are held as they are: the graph holds them anyway.
   Their version counters tell whether an optimizer stepped in between. The replay must save the same ones.
7. No reference cycles: nothing that the forward's graph keeps refers to a tensor with a history, and a frame refers to
   no graph. Replayed values do have the replay's history (detaching each would cost more than all else here), so that
   graph's hooks drop them when the replay ends. Reference counting frees everything.
8. Autograd ties what it unpacks to the history that it remembers itself, not to the replay's.
9. An inner frame's arguments go through the outer frame's hooks (see `Arguments`), so nesting needs no rule of its own.
   Locks are taken from the inside out only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from recoup.checkpointing import mismatch, process_lock
from recoup.checkpointing.arguments import Arguments
from recoup.checkpointing.comparison import Compare, Comparison, Result, compare_exactly, results_of
from recoup.checkpointing.deciding import deciding_site
from recoup.checkpointing.decisions import ALL, NONE, Handing, Recording, most_bytes_of, run_in
from recoup.checkpointing.digest import Digest, digest_of_saved, fetched
from recoup.checkpointing.environment import Environment
from recoup.checkpointing.guard import StaleGuard
from recoup.checkpointing.mismatch import Kind, Record, kind_of
from recoup.checkpointing.reach import Reach
from recoup.checkpointing.replay import TO_END, Manner, Replayed, is_any_wanted, replay, run_for_output
from recoup.checkpointing.sampling import is_due, site_of
from recoup.checkpointing.state import FunctionState
from recoup.errors import InputChangedError, RecoupError
from recoup.tensors import each_tensor, positional_names, put_together, take_apart

if TYPE_CHECKING:
    from recoup.checkpointing.api import Checkpoint

__all__ = ["Frame", "Leaf"]


class Leaf:
    """A leaf that needs a gradient, or a view of one, held as it is; ``owner`` is the leaf itself."""

    __slots__ = ("owner", "position", "tensor", "version")

    def __init__(self, position: int, tensor: Tensor, owner: Tensor) -> None:
        self.position = position
        self.tensor = tensor
        self.owner = owner
        self.version = tensor._version


class Frame(Recording):
    """What is left of a checkpointed call: the function, its arguments, its environment, records, and what it keeps.

    Attributes:
        options: of the checkpoint.
        fn: the function.
        arguments: its arguments.
        first: the position of its first saved tensor among all of its segment.
        records: of what it saved.
        leaves: those that are held as they are, by position among the call's own.
        is_settled: whether the forward has ended.
        runs_backward: whether the function runs a backward inside.
    """

    __slots__ = (
        "_digests", "_environment", "_maker", "_outputs", "_replay_context", "_results", "_site", "_state",
        "arguments", "first", "fn", "is_settled", "leaves", "options", "records", "runs_backward",
    )  # fmt: skip

    def __init__(
        self,
        options: Checkpoint,
        fn: Callable[..., Any],
        arguments: Arguments,
        first: int = 0,
        replay_context: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.options, self.fn, self.arguments, self.first = options, fn, arguments, first
        self.records: list[Record] = []
        self.leaves: dict[int, Tensor] = {}
        self.is_settled = self.runs_backward = False
        super().__init__(0, NONE)
        site = site_of(fn)
        # Contexts may keep results of operations themselves, and then must see all of these.
        watches = options.keep_decisions and replay_context is None
        self._site = deciding_site(site) if watches else None
        self._replay_context = replay_context
        reach = Reach(fn, arguments.others)
        self._state = None
        if reach.roots or reach.bindings:
            self._state = FunctionState(reach, preserve_buffers=options.preserve_buffers)
        self._environment = Environment(reach.generators, preserve_rng=options.preserve_rng)
        check = options.check
        self._digests: list[Digest] | None = None
        """Of what was saved; None for calls whose contents are not compared."""
        if check == "values" or (check == "sampled" and is_due(site) and not arguments.are_copied):
            self._digests = []
        self._results: list[Result] = []
        """What the call returned, where that may be compared."""
        self._outputs: tuple[Kind, ...] = ()
        self._maker = process_lock.holder()

    def run_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the forward, and keeps what it decides."""
        if self._site is not None and (watched := self._site.watched()):
            self.watched, self.most_bytes = watched, most_bytes_of((args, kwargs))
        output = run_in(self, self.fn, args, kwargs)
        if self.watched is ALL and self._site is not None:
            self._site.note(self.deciding)
        return output

    def num_saved(self) -> int:
        """How many tensors autograd has saved so far."""
        return len(self.records)

    def handing(self) -> Handing | None:
        """What hands a replay what the forward kept; None if that is nothing."""
        if not self.kept:
            return None
        return Handing(
            self.fn, self.kept, self.watched if self.deciding else NONE, may_go_on=not self.is_settled
        )

    def run_again(self, args: Sequence[Any], kwargs: dict[str, Any], handing: Handing | None) -> Any:
        """Runs a replay, and gives it what the forward kept."""
        if handing is None:
            return self.fn(*args, **kwargs)
        return run_in(handing, self.fn, args, kwargs)

    def settle(self, output: Any) -> None:
        """Ends the forward: from here on only what the replay needs is held, and what the output was like."""
        outputs = [output] if type(output) is Tensor else list(each_tensor(output))
        self._outputs = tuple(kind_of(tensor) for tensor in outputs if not tensor.is_nested)
        changes_arguments = self.arguments.settle()
        self._environment.settle()
        if self._state is not None:
            self._state.settle()
        if self._digests is not None:
            if self.options.check == "sampled":
                # A second replay would find changed arguments.
                self._digests = None if changes_arguments else self._digests
                self._results = results_of(outputs)
            self._digests = self._digests and fetched(self._digests)
        self.is_settled = True

    def pack(self, tensor: Tensor) -> Record | Leaf:
        """Autograd saves a tensor in the forward: notes its kind, and its content where that is compared."""
        position = len(self.records)
        record = (self.first + position, kind_of(tensor))
        self.records.append(record)
        # Views of parameters, such as a transposed weight, are held like parameters.
        base = None if self._state is None else tensor._base
        owner = tensor if base is None else base
        is_leaf = owner.is_leaf and owner.requires_grad
        if self._digests is not None:
            self._digests.append(None if is_leaf else digest_of_saved(tensor))
        if not is_leaf:
            return record
        self.leaves[position] = owner
        return Leaf(record[0], tensor if base is None else tensor.detach(), owner)

    def is_wanted(self) -> bool:
        """Whether anything that the call saved is still wanted."""
        return is_any_wanted(self.records)

    def refuse_stale(self) -> None:
        """Raises if an argument was changed in place, so that a replay would start from another value."""
        if (slot := self.arguments.first_stale()) is not None:
            path = self.arguments.path(slot, positional_names(self.fn))
            raise mismatch.changed_argument(self.fn, path, by_function=slot in self.arguments.changed)

    def run_as_then(self, args: Sequence[Any], kwargs: dict[str, Any], manner: Manner) -> Replayed:
        """Runs the function again in the state and the environment of its forward."""
        if self._digests is None or manner.outputs_only or manner.carefully:
            return self._run_as_then(args, kwargs, manner)
        # NOTE [ Sampled comparison ]
        tensors: list[Tensor] = []
        apart = take_apart((args, kwargs), tensors, [])
        comparison = Comparison(self.fn, self.records, self._digests)
        replayed = self._run_as_then(args, kwargs, manner, comparison.note)
        if comparison.drifts(replayed[0]):
            args, kwargs = put_together(apart, tensors)
            output = self._run_as_then(args, kwargs, TO_END, comparison.note_again)[2]
            comparison.judge(self._results, results_of(list(each_tensor(output))))
        return replayed

    def _run_as_then(
        self, args: Sequence[Any], kwargs: dict[str, Any], manner: Manner, compare: Compare | None = None
    ) -> Replayed:
        if compare is None and manner.carefully:
            compare = partial(compare_exactly, self.fn, self.records, self._digests)
        if self._replay_context is None and self._state is None and not self._environment.differs():
            return self._run(args, kwargs, manner, compare)
        guard = None
        with ExitStack() as stack:
            stack.enter_context(process_lock.locked(self._maker))
            if self._state is not None:
                self._state.enter(stack)
                if stale := self._state.stale():
                    guard = stack.enter_context(StaleGuard(stale, self.refuse_watched))
            self._environment.enter(stack)
            if self._replay_context is not None:
                stack.enter_context(self._replay_context)
            if guard is not None:
                compare = partial(_compare_guarded, guard, compare)
            try:
                return self._run(args, kwargs, manner, compare)
            except Exception:
                if guard is not None and guard.error is not None:
                    raise guard.error from None
                raise

    def _run(
        self, args: Sequence[Any], kwargs: dict[str, Any], manner: Manner, compare: Compare | None
    ) -> Replayed:
        try:
            if manner.outputs_only:
                return {}, {}, run_for_output(self, args, kwargs)
            return replay(self, args, kwargs, manner, compare)
        except Exception as error:
            # As it is, since others may wait for it; Pythons from 3.11 on show the note below it.
            if self.is_settled and not isinstance(error, RecoupError) and hasattr(error, "add_note"):
                error.add_note(mismatch.raised_in_replay(self.fn))
            raise

    def refuse_saved(self, position: int) -> InputChangedError:
        """The error for a saved tensor that was changed in place."""
        which = f"saved tensor {position - self.first + 1} of {len(self.records)}"
        return mismatch.changed_saved(self.fn, which)

    def refuse_watched(self, tensor: Tensor) -> InputChangedError:
        """The error for a tensor that the function reads, and that was changed in place."""
        name, by_function = f"a leaf of shape {list(tensor.shape)}", False
        if self._state is not None:
            name, by_function = self._state.describe(tensor)
        return mismatch.changed_state(self.fn, name, by_function=by_function)

    def __repr__(self) -> str:
        num_saved = len(self.records)
        kept = f", keeps [{', '.join(map(str, self.kept))}]" if self.kept else ""
        return (
            f"<checkpoint of {mismatch.describe_function(self.fn)}: holds [{', '.join(self.arguments.describe())}],"
            f" gives [{', '.join(map(mismatch.describe_shape, self._outputs))}],"
            f" {num_saved} saved tensor{'s' * (num_saved != 1)} to replay, {self._environment.describe()}{kept}>"
        )


def _compare_guarded(guard: StaleGuard, compare: Compare | None, position: int, tensor: Tensor) -> None:
    """Autograd saves what an operation is given before the guard sees the operation."""
    guard.check(tensor)
    if compare is not None:
        compare(position, tensor)
