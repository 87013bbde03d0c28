"""When a replay is compared by content: on the first calls of a call site, then ever more rarely.

NOTE [ Sampled comparison ]

1. Watching every place where a function could find state never ends. What the forward saved is compared instead with
   what the replay saves, by digests, on the 1st, 2nd, 4th, 8th, … call of each call site: that finds whatever changes
   the results, for whatever reason, and costs nothing in the long run.
2. A call site is a module, or the code of a function; for a function that captures a module, that module. Calls inside
   a replay do not count: no backward reads what they save.
3. Where the contents differ, the function is replayed once more, to its end, and its results are compared with the
   forward's: their hashes, and some of their values. If they are the same, and the contents differ again, these are
   memory that nobody filled (workspaces, seeds that were not read). If they differ by rounding, the device does not fix
   the order of sums: one warning, and the site is not compared again. If they differ by more, what the function depends
   on has changed: an error.
4. One more call is compared a few calls later each time, so that it is not always the same one of a step's calls.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, Literal

import torch
from torch.nn import Module

from recoup.checkpointing.by_identity import ByIdentity
from recoup.checkpointing.replay import depth
from recoup.snapshot.own_code import content_of

__all__ = ["is_due", "is_sampling_as_usual", "never_again", "sampling", "site_of"]


class _Mode:
    # Of the process: replays on an accelerator run on threads of autograd's own.
    samples: Literal["usual", "always", "never"] = "usual"
    left_out: frozenset[int] = frozenset()


_mode = _Mode()


class _Site:
    """Where calls come from: how many there were, and which is the next to be compared."""

    __slots__ = ("count", "next", "power")

    def __init__(self) -> None:
        self.count, self.next, self.power = 0, 1, 1


_sites = ByIdentity(_Site)


@contextmanager
def sampling(samples: Literal["always", "never"], *, left_out: Iterable[Any] = ()) -> Iterator[None]:
    """Every call with ``check="sampled"`` is compared, or none; neither is counted.

    Args:
        samples: which of both.
        left_out: call sites whose calls are not compared.
    """
    before = _mode.samples, _mode.left_out
    _mode.samples, _mode.left_out = samples, frozenset(map(id, left_out))
    try:
        yield
    finally:
        _mode.samples, _mode.left_out = before


def is_sampling_as_usual() -> bool:
    """Whether calls are counted: not while a model is measured or verified."""
    return _mode.samples == "usual"


def is_due(site: Any) -> bool:
    """Counts a call of a call site, and says whether it is to be compared."""
    if _mode.samples != "usual" or depth():
        return _mode.samples == "always" and not depth() and id(site) not in _mode.left_out
    known = _sites.of(site)
    known.count += 1
    # One that falls into a capture is made up for by the next.
    if known.count < known.next or _is_capturing():
        return False
    # Behind the 8th, 16th, 32nd, … call one more: the shifts go through all remainders of eight.
    shift = (3 * known.power.bit_length() + 1) % 8 if known.power >= 8 else 0
    if known.count == known.power and shift:
        known.next = known.power + shift
    else:
        known.power *= 2
        known.next = known.power
    return True


def never_again(fn: Any) -> None:
    """The function's results are not the same bits each time: its site is not compared any more."""
    _sites.of(site_of(fn)).next = sys.maxsize


def _is_capturing() -> bool:
    """Whether a CUDA graph is being captured: nothing may wait for the device then."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def site_of(fn: Any) -> Any:
    """The module, the code or the type that calls of a function come from."""
    if type(fn) is FunctionType:
        if not fn.__closure__:
            return fn.__code__
        return next(
            (cell for cell in map(content_of, fn.__closure__) if isinstance(cell, Module)), fn.__code__
        )
    if isinstance(fn, Module):
        return fn
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, Module):
        return owner
    if isinstance(fn, MethodType):
        return site_of(fn.__func__)
    if isinstance(fn, functools.partial):
        return site_of(fn.func)
    return type(fn)
