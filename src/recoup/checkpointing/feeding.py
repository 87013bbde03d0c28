"""What one call of a span gives to a later one: recognised in the forward, not held, and made again in the replay."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from recoup.checkpointing import mismatch
from recoup.checkpointing.arguments import Arguments, Given
from recoup.checkpointing.digest import Digest, digest, is_same
from recoup.checkpointing.mismatch import Kind, kind_of
from recoup.tensors import argument_paths, each_tensor, put_together, take_apart, versions_of
from recoup.torch_private import SHARDING_HOOK

__all__ = ["FedArguments", "Feed", "Flow", "Outputs", "Place", "rooted"]

Place: TypeAlias = tuple[int, int]
"""A call, and a place among the tensors of its output."""

_SMALL_BYTES = 1 << 16


class Feed(NamedTuple):
    """A tensor among a call's arguments that an earlier call of the span returned."""

    call: int
    place: int
    """Its place among the tensors of that call's output."""
    kind: Kind
    digest: Digest


class _Returned(NamedTuple):
    reference: weakref.ref[Tensor]
    version: int
    needs_grad: bool
    call: int
    place: int


class Outputs:
    """The tensors that the calls of a span returned in the forward, known but not kept alive."""

    __slots__ = ("_returned", "_with_digest")

    def __init__(self, *, with_digest: bool) -> None:
        self._returned: dict[int, _Returned] = {}
        self._with_digest = with_digest

    def note(self, call: int, output: Any) -> None:
        """Notes the tensors in a call's output. One that an earlier call returned, too, is now this call's."""
        for place, tensor in enumerate(each_tensor(output)):
            (version,) = versions_of([tensor])
            self._returned[id(tensor)] = _Returned(
                weakref.ref(tensor), version, tensor.requires_grad, call, place
            )

    def find(self, tensor: Tensor) -> Feed | None:
        """Says which call returned this very tensor, unless it has been changed since."""
        found = self._returned.get(id(tensor))
        if found is None or found.reference() is not tensor:  # an identity can be given to another object
            found = self._find_behind_hook(tensor)
        if found is None:
            return None
        if [found.version] != versions_of([tensor]) or found.needs_grad != tensor.requires_grad:
            return None
        then = digest(tensor) if self._with_digest else None
        return Feed(found.call, found.place, kind_of(tensor), then)

    def _find_behind_hook(self, tensor: Tensor) -> _Returned | None:
        """Who returned the tensor that a hook of sharding has given on as a view of the whole of it."""
        if tensor._base is None or type(tensor.grad_fn).__name__ != SHARDING_HOOK:
            return None
        for found in self._returned.values():
            one = found.reference()
            if one is not None and tensor.is_set_to(one):
                return found
        return None


class FedArguments(Arguments):
    """The arguments of one call of a span: fed ones are not held, the others as those of any call.

    But without their history, because that may contain earlier calls of the same span, which hold the span: no
    reference counting could free that.
    """

    __slots__ = ("_fed", "_fed_versions", "_outside", "_tree", "changed_feeds", "feeds")

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], find: Callable[[Tensor], Feed | None]
    ) -> None:
        tensors: list[Tensor] = []
        others: list[Any] = []
        self._tree = take_apart((args, kwargs), tensors, others)
        found = [find(tensor) for tensor in tensors]
        self.feeds = {slot: feed for slot, feed in enumerate(found) if feed is not None}
        self._fed = [tensors[slot] for slot in self.feeds]
        self._fed_versions = versions_of(self._fed)
        self.changed_feeds: set[Place] = set()
        """What the function changed in place of what earlier calls fed it."""
        self._outside = {slot: tensors[slot].requires_grad for slot, feed in enumerate(found) if feed is None}
        """The slots of the others, and whether these need a gradient."""
        held = [tensors[slot] for slot in self._outside]
        # Not as leaves that need a gradient: an enclosing checkpoint holds these as they are.
        bare = {id(t): t if t.grad_fn is None else t.detach() for t in held}
        super().__init__(tuple(bare[id(t)] for t in held), {})
        self.others = others

    def settle(self) -> bool:
        """Notes, right after the forward, what the function itself changed in place; returns whether anything."""
        changes_held = super().settle()
        versions = zip(self._fed_versions, versions_of(self._fed), self.feeds.values(), strict=True)
        self.changed_feeds = {(feed.call, feed.place) for then, now, feed in versions if then != now}
        self._fed = []
        return changes_held or bool(self.changed_feeds)

    def put_together(self, rebuilt: Given, give: Callable[[Feed], Tensor] | None) -> Given:
        """Gives the arguments as they were: those from outside as rebuilt, the fed ones from this replay."""
        held, _ = rebuilt
        # One tensor that was given twice is one again: functions ask whether their key is their value.
        fresh = {
            id(tensor): tensor
            if tensor.requires_grad == needs_grad
            else rooted(tensor, needs_grad=needs_grad)
            for tensor, needs_grad in zip(held, self._outside.values(), strict=True)
        }
        tensors = {slot: fresh[id(tensor)] for tensor, slot in zip(held, self._outside, strict=True)}
        if give is not None:
            tensors.update((slot, give(feed)) for slot, feed in self.feeds.items())
        return put_together(self._tree, [tensors[slot] for slot in range(len(tensors))])  # type: ignore[no-any-return]

    def path(self, index: int, names: Sequence[str]) -> str:
        """Names a slot of those that are held."""
        return dict(argument_paths(self._tree, names))[list(self._outside)[index]]


class Flow:
    """What flows between the calls of one replay: it waits for its readers, and goes with the last one."""

    __slots__ = ("_check", "_expected", "_readers", "_waiting")

    def __init__(self, calls: Iterable[Arguments], check: str, waiting: dict[Place, Tensor]) -> None:
        self._check = check
        self._expected: dict[int, dict[int, Feed]] = {}
        """By call that returns it and place in its output."""
        self._readers: dict[Place, int] = {}
        """How often each is still to be read."""
        self._waiting = waiting
        for arguments in calls:
            for feed in arguments.feeds.values():
                self._expected.setdefault(feed.call, {})[feed.place] = feed
                key = feed.call, feed.place
                self._readers[key] = self._readers.get(key, 0) + 1

    def put(self, call: int, fn: Callable[..., Any], output: Any) -> None:
        """Takes from a call's output what later calls read."""
        expected = self._expected.get(call)
        if not expected:
            return
        tensors = list(each_tensor(output))
        for place, feed in expected.items():
            tensor = tensors[place] if place < len(tensors) else None
            if tensor is None or (self._check != "none" and kind_of(tensor) != feed.kind):
                raise mismatch.returned_otherwise(fn, place, feed.kind, tensor)
            if feed.digest is not None and not is_same(feed.digest, digest(tensor)):
                raise mismatch.returned_drifted(fn, place, feed.kind)
            self._waiting[call, place] = tensor

    def give(self, feed: Feed) -> Tensor:
        """Gives a tensor to one of its readers."""
        key = feed.call, feed.place
        self._readers[key] -= 1
        return self._waiting[key] if self._readers[key] else self._waiting.pop(key)

    def look_at(self, place: Place) -> Tensor:
        """A tensor that waits, without what led to it in this replay."""
        tensor = self._waiting[place]
        if not tensor.requires_grad and tensor.layout is torch.strided and tensor.nbytes <= _SMALL_BYTES:
            return tensor.clone()
        return tensor if tensor.grad_fn is None else rooted(tensor)


class _Rooted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, root: Tensor, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


def rooted(tensor: Tensor, *, needs_grad: bool | None = None) -> Tensor:
    """The same memory without its history.

    One that needs a gradient gets a history of one node, and is no leaf: a graph holds its leaves, and functions
    may not change leaves in place.
    """
    if not (tensor.requires_grad if needs_grad is None else needs_grad):
        return tensor.detach()
    with torch.enable_grad():
        root = torch.empty(0, device="cpu", requires_grad=True)
        made: Tensor = _Rooted.apply(root, tensor)  # type: ignore[no-untyped-call]
    return made
