"""Copies of tensors' values that are made in every step, in memory that is used again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recoup.torch_private import foreach_copy, without_modes

__all__ = ["Copies"]


class Copies:
    """The values of some tensors.

    Args:
        on_host: whether the copies are in host memory: else each is on its tensor's device.

    >>> tensor = torch.zeros(2)
    >>> copies = Copies(on_host=False)
    >>> copies.hold([tensor])
    >>> tensor = tensor.add_(1)
    >>> copies.restore()
    >>> tensor
    tensor([0., 0.])
    """

    def __init__(self, *, on_host: bool) -> None:
        self._on_host = on_host
        self._kept: list[Tensor] = []
        self._tensors: list[Tensor] = []

    @property
    def values(self) -> list[Tensor]:
        """The copies, in the order of the tensors."""
        return self._kept

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """Copies the values of some tensors, and forgets those of others."""
        # Out of sight of trackers: on a machine without a device, host memory stands in for the device's.
        with without_modes(), torch.no_grad():
            kept = self._kept if len(self._kept) == len(tensors) else [None] * len(tensors)
            self._kept = [self._room_for(*pair) for pair in zip(tensors, kept, strict=True)]
            self._tensors = list(tensors)
            if tensors:
                foreach_copy(self._kept, self._tensors, non_blocking=True)

    def restore(self) -> None:
        """Puts the values back where they differ: autograd counts each write."""
        with without_modes(), torch.no_grad():
            for tensor, kept in zip(self._tensors, self._kept, strict=True):
                if not torch.equal(tensor, kept.to(tensor.device)):
                    tensor.copy_(kept)
        self.drop()

    def drop(self) -> None:
        """Lets the tensors go; the memory of their copies stays for the next ones."""
        self._tensors = []

    def free(self) -> None:
        """Frees the memory of the copies."""
        self._tensors, self._kept = [], []

    def _room_for(self, tensor: Tensor, kept: Tensor | None) -> Tensor:
        device = torch.device("cpu") if self._on_host else tensor.device
        if kept is not None and (kept.shape, kept.dtype, kept.device) == (tensor.shape, tensor.dtype, device):
            return kept
        # Pinned, so that the host does not wait for the copy.
        pins = device.type == "cpu" and tensor.device.type == "cuda"
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device, pin_memory=pins)
