"""One checkpoint over several calls that the caller's own code makes, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from recoup.checkpointing.api import not_callable, run_traced
from recoup.checkpointing.feeding import Outputs
from recoup.checkpointing.groups import Group, check_groups
from recoup.checkpointing.mismatch import describe_function
from recoup.checkpointing.replay import depth
from recoup.checkpointing.segment import Segment
from recoup.errors import CheckpointError
from recoup.torch_private import current_transform

if TYPE_CHECKING:
    from recoup.checkpointing.api import Checkpoint

__all__ = ["Span"]


class Span:
    """A checkpoint over several calls: what they save is dropped, and they are replayed together.

    What one call returns and a later one is given is not held, only what comes from outside. Every call has the
    guarantees of `recoup.checkpoint`. What a call returns is recognised by identity: the tensor itself, not a copy or
    a view of it, and not changed in place meanwhile. All else is held as an argument from outside.

    A call that raises leaves the calls before it as they are. Calls after it are replayed apart from them.

    Args:
        options: as for a checkpoint of one function.
        groups: consecutive calls that are checkpointed again within the replay: it runs them, holds what the group is
            given, and replays the group when the backward gets to it. Groups may be nested to any depth.

    >>> from recoup import Checkpoint
    >>> x = torch.tensor([2.0, 3.0], requires_grad=True)
    >>> span = Span(Checkpoint())
    >>> y = x
    >>> for _ in range(3):
    ...     y = span.call(torch.square, (y,), {})
    >>> y.sum().backward()
    >>> x.grad
    tensor([ 1024., 17496.])
    """

    __slots__ = ("_depth", "_groups", "_is_closed", "_is_running", "_options", "_outputs", "_segment")

    def __init__(self, options: Checkpoint, groups: Sequence[Group] = ()) -> None:
        self._options = options
        self._groups = tuple(groups)
        check_groups(self._groups)
        self._depth: int | None = None
        """Of replays inside each other, at the first call."""
        self._is_closed = False
        self._is_running = False
        self._segment: Segment | None = None
        self._outputs = Outputs(with_digest=options.check == "values")

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs ``fn(*args, **kwargs)`` as the next call of the span.

        Without grad mode it is a plain call, which the span does not remember. Under torch.compile it is a
        checkpoint of its own.

        Raises:
            CheckpointError: the span is closed, this is a call inside another call of the same span, or a replay
                makes a call of a span that it did not make itself.
            InputChangedError: (in the backward) something that ``fn`` reads was changed in place meanwhile.
            ReplayMismatchError: (in the backward) the replay saved or returned other tensors than the forward.
        """
        if torch.compiler.is_compiling():
            return run_traced(self._options, fn, args, kwargs)
        self._refuse_misuse(fn)
        if not torch.is_grad_enabled() or current_transform() is not None:
            return fn(*args, **kwargs)
        if self._segment is None:
            self._segment = Segment(self._options, self._groups)
        self._is_running = True
        try:
            output = self._segment.run(fn, args, kwargs, find=self._outputs.find)
            self._outputs.note(len(self._segment) - 1, output)
        except BaseException:
            self._let_go()
            raise
        finally:
            self._is_running = False
        return output

    def close(self) -> None:
        """Ends the span: there are no more calls, and it is the graph alone that holds what the replay needs."""
        self._is_closed = True
        self._let_go()

    def _let_go(self) -> None:
        self._segment = None
        self._outputs = Outputs(with_digest=self._options.check == "values")

    def _refuse_misuse(self, fn: Any) -> None:
        if not callable(fn):
            raise not_callable(fn)
        if self._is_closed:
            raise CheckpointError(
                f"The span was closed before this call of {describe_function(fn)}. Make a new one."
            )
        if self._is_running:
            raise CheckpointError(
                f"{describe_function(fn)} was called inside another call of the same span, whose replay makes that call"
                " again. Call it directly there, or in a span that is made inside the call."
            )
        if self._depth is None:
            self._depth = depth()
        elif self._depth != depth():
            raise CheckpointError(
                f"A replay calls {describe_function(fn)} in a span from outside that replay. Make inner spans where a"
                " replay makes them again: in the checkpointed function itself."
            )
