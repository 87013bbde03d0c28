"""How many processes train the model together."""

from __future__ import annotations

import torch

__all__ = ["num_processes"]


def num_processes() -> int:
    """Processes of `torch.distributed`, which have to run the same steps; 1 without it.

    >>> num_processes()
    1
    """
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if is_distributed else 1
