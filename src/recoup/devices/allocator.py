"""What the caching allocator of a GPU takes for a tensor."""

from __future__ import annotations

import os

__all__ = ["block_bytes", "has_expandable_segments"]

_MIB = 2**20


def block_bytes(num_bytes: int) -> int:
    """The bytes of the block for a size, which are those that the allocator's statistics count.

    Sizes are rounded up to 512 bytes. From 10 MiB on they get segments of whole 2 MiB, of which up to 1 MiB that is
    left over is not split off. In a block that was free already more may be left over, and is split off: this is the
    most.

    >>> block_bytes(1000), block_bytes(24_576_000) - 24_576_000, block_bytes(24_000_000) - 24_000_000
    (1024, 589824, 0)
    """
    found = -(-num_bytes // 512) * 512
    left_bytes = -found % (2 * _MIB)
    is_split = found < 10 * _MIB or left_bytes > _MIB or has_expandable_segments()
    return found if is_split else found + left_bytes


def has_expandable_segments() -> bool:
    """Whether the process was started with segments that grow, of which everything that is left over is split off."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return any("expandable_segments:true" in os.environ.get(name, "").lower() for name in names)
