"""A cheap digest of a tensor's content, made where the tensor lives."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["digest", "digest_of_saved"]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COLUMNS = 1024
_SEEDS = (torch.int64, torch.uint64)


def digest(tensor: Tensor) -> Tensor | None:
    """Sums the tensor's bits, weighted by row and by column, so that moved values show as well as changed ones.

    Two passes over the data, no copy of it (unless it is not contiguous) and no synchronisation. Returns None
    for tensors without plain storage (sparse, quantised, nested, fake).

    >>> bool(torch.equal(digest(torch.tensor([1.0, 2.0])), digest(torch.tensor([2.0, 1.0]))))
    False
    """
    with torch.no_grad():
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
            return None
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        flat = tensor.detach().resolve_neg().contiguous().view(-1)
        bits = flat.view(_BITS[flat.element_size()])
        num_rows = bits.numel() // _COLUMNS
        table, tail = bits[: num_rows * _COLUMNS].view(num_rows, _COLUMNS), bits[num_rows * _COLUMNS :]
        return torch.stack((_weighted(table.sum(0)), _weighted(table.sum(1)), _weighted(tail)))


def _weighted(sums: Tensor) -> Tensor:
    return (sums * torch.arange(1, sums.numel() + 1, device=sums.device)).sum()


def digest_of_saved(tensor: Tensor) -> Tensor | None:
    """The digest of a tensor that autograd saves; None for single integers and for raw bytes.

    Attention without dropout saves the seed and offset of a generator that it never read, and recurrent layers save a
    workspace whose gaps nobody fills: they hold whatever was in memory, and differ from run to run.
    """
    is_opaque = tensor.dtype is torch.uint8 or (tensor.dim() == 0 and tensor.dtype in _SEEDS)
    return None if is_opaque else digest(tensor)
