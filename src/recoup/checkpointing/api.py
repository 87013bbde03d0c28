"""The primitive's public face: `checkpoint`, `Checkpoint` and the callable with torch's own signature."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.utils.checkpoint

from recoup.checkpointing.mismatch import describe_function
from recoup.checkpointing.segment import Segment
from recoup.errors import NothingToCheckpointError
from recoup.tensors import each_tensor
from recoup.torch_private import current_transform

__all__ = ["Checkpoint", "checkpoint", "not_callable", "run_traced", "torch_checkpoint"]

T = TypeVar("T")
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """How to checkpoint: call it with a function and its arguments, or use it as a decorator.

    Called with a function alone, it returns the checkpointed function; with arguments too, it runs it.

    Args:
        preserve_rng: the replay draws the same random numbers, and the caller's generators do not notice. Off
            saves a few microseconds for functions that draw none.
        preserve_buffers: buffers that the function changes are seen by the replay as the forward saw them. Off
            saves a copy of the function's buffers in the forward; changing one is then an error.
        early_stop: the replay stops when the last tensor that the backward needs exists.
        check: what the replay is compared by: ``"metadata"`` (number, shape, dtype and device of the saved
            tensors), ``"values"`` (their content too, by a hash), ``"sampled"`` (metadata always, content on the
            1st, 2nd, 4th, 8th, … call of a module or function), or ``"none"``.
        keep_decisions: integers, booleans and numbers that depend on floating-point values (top-k indices,
            comparisons) are kept, and the replay is given them. Every operation of a module or function takes a few
            microseconds longer on its first eight calls, the 16th, 32nd, …; in others only operations that decide do.

    >>> import torch
    >>> x = torch.tensor([2.0, 3.0], requires_grad=True)
    >>> @Checkpoint(check="values")
    ... def square(x):
    ...     return x * x
    >>> square(x).sum().backward()
    >>> x.grad
    tensor([4., 6.])
    """

    preserve_rng: bool = True
    preserve_buffers: bool = True
    early_stop: bool = True
    check: Literal["sampled", "metadata", "values", "none"] = "sampled"
    keep_decisions: bool = True

    def __post_init__(self) -> None:
        if self.check not in ("sampled", "metadata", "values", "none"):
            raise ValueError(f"check is 'sampled', 'metadata', 'values' or 'none'; got {self.check!r}.")
        for name in ("preserve_rng", "preserve_buffers", "early_stop", "keep_decisions"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is True or False; got {getattr(self, name)!r}.")

    def __call__(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Any:
        """Runs ``fn`` checkpointed, or returns it checkpointed if nothing but ``fn`` is given."""
        if args or kwargs:
            return _run(self, fn, args, kwargs)
        if not callable(fn):
            raise not_callable(fn)

        @functools.wraps(fn, updated=())
        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            return _run(self, fn, args, kwargs)

        return checkpointed


_DEFAULT = Checkpoint()


def checkpoint(fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Runs ``fn(*args, **kwargs)``, drops what it saved for the backward, and replays it there.

    All arguments belong to ``fn``; options live on `Checkpoint`. The gradients are those of the plain call, bit
    for bit where its operations are deterministic. Without grad mode, and in torch.func transforms, it is a plain call.

    Raises:
        NothingToCheckpointError: there is no tensor among the arguments and the result needs no gradient.
        InputChangedError: (in the backward) something that ``fn`` reads was changed in place meanwhile.
        ReplayMismatchError: (in the backward) the replay saved other tensors than the forward.

    >>> import torch
    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> checkpoint(lambda x: x * x, x).backward()
    >>> x.grad
    tensor(6.)
    """
    output: T = _run(_DEFAULT, fn, args, kwargs)
    return output


def torch_checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], Contexts] | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    preserve_rng_state: bool = True,
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """`checkpoint` with the signature of ``torch.utils.checkpoint.checkpoint``, for libraries that take one.

    Args:
        function: what to run.
        *args: its positional arguments.
        use_reentrant: accepted and ignored. There is one implementation, without reentrant backwards.
        context_fn: returns the contexts for the forward and for the replay, as torch's does.
        determinism_check: ``"default"`` compares metadata, and now and then contents; ``"none"`` nothing.
        debug: accepted and ignored. Errors always say where the replay differed.
        preserve_rng_state: as `Checkpoint.preserve_rng`.
        early_stop: as `Checkpoint.early_stop`.
        **kwargs: the function's keyword arguments.

    >>> import torch
    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> torch_checkpoint(torch.square, x, use_reentrant=False).backward()
    >>> x.grad
    tensor(6.)
    """
    if determinism_check not in ("default", "none"):
        raise ValueError(f"determinism_check is 'default' or 'none'; got {determinism_check!r}.")
    options = Checkpoint(
        preserve_rng=preserve_rng_state,
        early_stop=early_stop,
        check="sampled" if determinism_check == "default" else "none",
    )
    return _run(options, function, args, kwargs, context_fn)


def _run(
    options: Checkpoint,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context_fn: Callable[[], Contexts] | None = None,
) -> Any:
    if torch.compiler.is_compiling():
        return run_traced(options, fn, args, kwargs, context_fn)
    if not callable(fn):
        raise not_callable(fn)
    if not torch.is_grad_enabled() or current_transform() is not None:
        return fn(*args, **kwargs)
    segment = Segment(options)
    output = segment.run(fn, args, kwargs, contexts=(None, None) if context_fn is None else context_fn())
    if segment.is_idle() and not _needs_grad(output):
        raise NothingToCheckpointError(
            f"{describe_function(fn)} was given no tensor and its result needs no gradient: there is nothing to"
            " checkpoint. Pass its inputs as arguments, or call it directly."
        )
    return output


def run_traced(
    options: Checkpoint,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context_fn: Callable[[], Contexts] | None = None,
) -> Any:
    """Under torch.compile: torch's own checkpoint, which the compiler understands as one operation."""

    def bound(*args: Any) -> Any:  # keyword arguments of fn that torch would take for its own options
        return fn(*args, **kwargs)

    more: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}
    return torch.utils.checkpoint.checkpoint(
        bound, *args, use_reentrant=False, preserve_rng_state=options.preserve_rng, **more
    )


def not_callable(fn: Any) -> TypeError:
    """The error for a call without a function."""
    return TypeError(
        f"checkpoint takes a function and its arguments: checkpoint(fn, x). Got a {type(fn).__name__} as function."
    )


def _needs_grad(output: Any) -> bool:
    tensors = each_tensor((output, getattr(output, "__dict__", None)))
    return any(tensor.requires_grad for tensor in tensors)
