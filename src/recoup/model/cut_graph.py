"""Cutting the autograd graph around a unit: fresh inputs, fresh outputs, and a gradient to start from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import grad as run_grad

from recoup.tensors import (
    is_divided,
    local_part,
    map_tensors,
    needing_gradient,
    num_bytes_of,
    rebuilt,
    span_of,
    storage_of,
    tensors_in,
)

__all__ = [
    "Gradient",
    "NestedTensorError",
    "anchored",
    "copied_as_accumulated",
    "described",
    "gradients_from",
    "seeded",
    "seeded_as",
]


class Gradient(NamedTuple):
    """One gradient of a backward, without its memory.

    Attributes:
        owner: tells its storage from those of the other gradients of the same backward.
        owner_bytes: of that storage.
        num_bytes: of the gradient.
        shape: of the gradient; None if it is divided over ranks, and cannot be made again.
        stride: in the storage.
        offset: in the storage.
        dtype: of the gradient.
        is_contiguous: whether a backward can read it without a copy.
    """

    owner: int
    owner_bytes: int
    num_bytes: int
    shape: torch.Size | None
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_contiguous: bool

    def made(self, owner: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """A gradient in the same place of its storage, which is made unless it is given; and that storage."""
        assert self.shape is not None, "divided over ranks"
        if owner is None:
            size = self.owner_bytes // self.dtype.itemsize
            owner = torch.full((size,), 1e-3, dtype=self.dtype, device=device)
        return owner.view(self.dtype).as_strided(self.shape, self.stride, self.offset), owner


def described(gradients: Sequence[Tensor | None]) -> list[Gradient | None]:
    """The gradients of one backward; None for those that are not given, or are sparse."""
    known: dict[int, int] = {}
    found: list[Gradient | None] = []
    for gradient in gradients:
        if gradient is None or gradient.layout is not torch.strided:
            found.append(None)
            continue
        storage, part = storage_of(gradient), local_part(gradient)
        owner = known.setdefault(storage._cdata, len(known))
        found.append(
            Gradient(
                owner,
                storage.nbytes(),
                num_bytes_of(gradient),
                None if is_divided(gradient) else gradient.shape,
                part.stride(),
                int(part.storage_offset()),
                part.dtype,
                part.is_contiguous(),
            )
        )
    return found


class NestedTensorError(Exception):
    """A nested tensor that needs a gradient: a history cannot begin with one."""


class _Anchor(torch.autograd.Function):
    """Returns tensors that alias the given ones and have a history that begins here.

    They are neither views nor leaves: code after it may change them in place, like any module's output.
    """

    @staticmethod
    def forward(ctx: Any, start: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(_same_storage(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (torch.empty(0), *(None for _ in gradients))


def _same_storage(tensor: Tensor) -> Tensor:
    if is_divided(tensor):
        return rebuilt(tensor, _same_storage)
    with torch.no_grad():
        fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        # From the tensor, not from its storage: fake tensor modes hold storages that they are given.
        same: Tensor = torch.ops.aten.set_.source_Tensor(fresh, tensor)
        return same


def anchored(tree: Any) -> tuple[Any, Tensor]:
    """The same tree with a new history for all tensors that need a gradient; and where that history begins.

    Other tensors are detached. Identical tensors stay identical.

    Raises:
        NestedTensorError: one of them is nested.
    """
    start = torch.empty(0, requires_grad=True)
    needing = needing_gradient(tree)
    if any(tensor.is_nested for tensor in needing):
        raise NestedTensorError
    if not needing:
        return map_tensors(Tensor.detach, tree), start
    anchors = _Anchor.apply(start, *(tensor.detach() for tensor in needing))  # type: ignore[no-untyped-call]
    fresh = dict(zip(map(id, needing), anchors, strict=True))
    return map_tensors(lambda tensor: fresh.get(id(tensor), tensor), tree), start


class _Seed(torch.autograd.Function):
    """An empty tensor whose backward makes the gradients of many tensors.

    Made inside the backward, only autograd holds them, and frees them as early as in a real step. Where an owner is
    given, as large or without dimensions, the gradient is a view of it; where a gradient is described, it is like that.
    """

    @staticmethod
    def forward(ctx: Any, owners: Sequence[Tensor | Gradient | None], *tensors: Tensor) -> Tensor:
        ctx.makers = list(map(_gradient_maker, tensors, owners))
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        storages: dict[int, Tensor] = {}
        return None, *(make(storages) for make in ctx.makers)


_Maker = Callable[[dict[int, Tensor]], Tensor]
"""Makes a gradient, given the storages of those that were made before."""


def _made_like(like: Gradient, device: torch.device, storages: dict[int, Tensor]) -> Tensor:
    gradient, storages[like.owner] = like.made(storages.get(like.owner), device)
    return gradient


def _gradient_maker(tensor: Tensor, owner: Tensor | Gradient | None) -> _Maker:
    """Makes a gradient for a tensor, which it does not hold."""
    if is_divided(tensor):
        # Without its memory: divided in the same way, of the same size.
        shape = local_part(tensor).shape
        like = rebuilt(tensor, lambda part: torch.empty(0, dtype=part.dtype, device=part.device))
        return lambda _: rebuilt(
            like, lambda part: torch.full(shape, 1e-3, dtype=part.dtype, device=part.device)
        )
    shape, dtype, device = tensor.shape, tensor.dtype, tensor.device
    if isinstance(owner, Gradient):
        return partial(_made_like, owner, device)
    if owner is not None:
        return lambda _: owner.expand(shape)
    return lambda _: torch.full(shape, 1e-3, dtype=dtype, device=device)


def seeded(
    tree: Any, wanted: Sequence[bool | Gradient] | None = None, owners: Mapping[int, Tensor] | None = None
) -> Tensor | None:
    """A tensor from which the backward of all tensors in a tree starts; None if none needs a gradient.

    The tensor and its gradient are empty: neither counts in a measurement. See `gradients_from`.

    Args:
        tree: whose tensors get gradients.
        wanted: for each of them, whether it gets one, or how the one that it gets lies in its storage; if that leaves
            none, or has another length, all that need one do.
        owners: by the identity of some of them, what their gradients are views of.
    """
    needing = needing_gradient(tree)
    tensors = tensors_in(tree)
    made_as: dict[int, Tensor | Gradient] = {}
    if wanted is not None and len(wanted) == len(tensors):
        needing = [tensor for tensor in compress(tensors, wanted) if tensor.requires_grad] or needing
        made_as |= {
            id(t): like for t, like in zip(tensors, wanted, strict=True) if isinstance(like, Gradient)
        }
    if not needing:
        return None
    made_as |= owners or {}
    return seeded_as([(tensor, made_as.get(id(tensor))) for tensor in needing])


def seeded_as(pairs: Sequence[tuple[Tensor, Tensor | Gradient | None]]) -> Tensor:
    """A tensor from which the backward of some tensors starts.

    Args:
        pairs: the tensors, each with the tensor that its gradient is a view of (as large, or without dimensions), or
            with what its gradient is like; None if the gradient has a storage of its own.
    """
    seed: Tensor = _Seed.apply([owner for _, owner in pairs], *(tensor for tensor, _ in pairs))  # type: ignore[no-untyped-call]
    return seed


@contextmanager
def copied_as_accumulated(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """A block in whose backwards gradients are copied that lie otherwise than their parameters, as for ``.grad``.

    Such is that of a contiguous convolution whose input is channels-last: a transformer's tokens as an image. Autograd
    also copies a gradient that something else holds, such as that of a sum's other operand: this is not seen here.

    Yields:
        the parameters whose gradients were copied so far.
    """
    hooked = [p for p in parameters if not is_divided(p)]
    without = [p for p in hooked if p._backward_hooks is None]
    copied: list[Tensor] = []
    try:
        with ExitStack() as stack:
            for parameter in hooked:
                stack.callback(parameter.register_hook(partial(_like_parameter, parameter, copied)).remove)
            yield copied
    finally:
        for parameter in without:
            # Not an empty dictionary, which every later backward would look at.
            parameter._backward_hooks = None


def _like_parameter(parameter: Tensor, copied: list[Tensor], gradient: Tensor) -> Tensor | None:
    """A copy where autograd makes one; None where a gradient is taken as it is."""
    if gradient.layout is not torch.strided or parameter.layout is not torch.strided:
        return None
    is_alike = gradient.is_contiguous()
    if span_of(parameter) == parameter.numel():  # only without gaps in memory are strides compared
        strides = zip(gradient.shape, gradient.stride(), parameter.stride(), strict=True)
        is_alike = all(own == wanted for size, own, wanted in strides if size != 1)
    if is_alike:
        return None
    copied.append(parameter)
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


def gradients_from(seeds: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Runs the backward from seeds."""
    return run_grad(seeds, inputs, [torch.empty(0) for _ in seeds], allow_unused=True)
