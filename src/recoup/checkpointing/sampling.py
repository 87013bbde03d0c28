"""When a replay is compared by content: on the first calls of a call site, then ever more rarely.

NOTE [ Sampled comparison ]

1. Watching every place where a function could find state never ends. What the forward saved is compared instead with
   what the replay saves, by digests, on the 1st, 2nd, 4th, 8th, … call of each call site: that finds whatever drifts,
   for whatever reason, and costs nothing in the long run.
2. A call site is a module, or the code of a function.
3. Where the contents differ, the function is replayed once more, and compared with its own first replay. If the two
   are equal, it repeats itself, and what it depends on has changed since the forward: an error. If they differ by no
   more than rounding, the device does not fix the order of its sums: one warning, and the site is not compared again.
   If they differ by more, the function draws on something of its own: an error.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module

__all__ = ["is_close", "is_due", "never_again", "sampling"]


class _Mode:
    # Of the process: replays on an accelerator run on threads of autograd's own.
    samples: Literal["usual", "always", "never"] = "usual"


_mode = _Mode()


class _Site:
    """Where calls come from: how many there were, and which is the next to be compared."""

    __slots__ = ("count", "next", "reference")

    def __init__(self, site: Any) -> None:
        self.count, self.next = 0, 1
        self.reference = weakref.ref(site, functools.partial(_forget, id(site)))


# By identity, since modules may be compared by their contents.
_sites: dict[int, _Site] = {}


def _forget(key: int, reference: Any) -> None:
    _sites.pop(key, None)


@contextmanager
def sampling(samples: Literal["always", "never"]) -> Iterator[None]:
    """Every call with ``check="sampled"`` is compared, or none; neither is counted."""
    before, _mode.samples = _mode.samples, samples
    try:
        yield
    finally:
        _mode.samples = before


def is_due(fn: Any) -> bool:
    """Counts a call, and says whether it is to be compared."""
    if _mode.samples != "usual":
        return _mode.samples == "always"
    site = fn.__code__ if type(fn) is FunctionType else _site_of(fn)
    known = _sites.get(id(site))
    if known is None:
        known = _sites[id(site)] = _Site(site)
    known.count += 1
    if known.count != known.next:
        return False
    known.next *= 2
    return True


def never_again(fn: Any) -> None:
    """The function's results are not the same bits each time: its site is not compared any more."""
    site = _site_of(fn)
    known = _sites.setdefault(id(site), _Site(site))
    known.next = 0


def _site_of(fn: Any) -> Any:
    if type(fn) is FunctionType:
        return fn.__code__
    if isinstance(fn, Module):
        return fn
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, Module):
        return owner
    if isinstance(fn, MethodType):
        return _site_of(fn.__func__)
    if isinstance(fn, functools.partial):
        return _site_of(fn.func)
    return type(fn)


def is_close(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors agree to half of their digits.

    >>> is_close(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + 1e-6]))
    True
    >>> is_close(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1]))
    False
    """
    if left.shape != right.shape or left.dtype != right.dtype or left.layout is not torch.strided:
        return False
    if not (left.is_floating_point() or left.is_complex()) or left.numel() == 0:
        return torch.equal(left, right)
    # Half of the digits: rounding grows within a unit. Compared with the largest value, since sums cancel.
    tolerance = math.sqrt(torch.finfo(left.dtype).eps)
    finite = left[left.isfinite()].abs()
    scale = finite.max().item() if finite.numel() else 0.0
    return torch.allclose(left, right, rtol=0.0, atol=tolerance * scale, equal_nan=True)
