"""A step that ran out of memory: how to tell, and how to free what it left."""

from __future__ import annotations

import traceback

import torch

__all__ = ["free_frames", "is_out_of_memory"]

# Libraries that allocate by themselves, and the CPU's allocator, raise a plain RuntimeError.
_WORDS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "can't allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out.

    >>> is_out_of_memory(RuntimeError("CUDA error: out of memory")), is_out_of_memory(RuntimeError("wrong shape"))
    (True, False)
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def free_frames(error: BaseException) -> None:
    """Clears the local variables of all calls that an error went through: they hold the half-built graph."""
    seen: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        found = waiting.pop()
        if found is None or found in seen:
            continue
        seen.append(found)
        waiting += [found.__cause__, found.__context__]
        traceback.clear_frames(found.__traceback__)
        found.__traceback__ = None
