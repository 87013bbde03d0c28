"""Gradients that wait for the last micro-batch, as Accelerate lets them."""

from __future__ import annotations

from typing import Any, Literal

__all__ = ["accumulation_of"]


def accumulation_of(accelerator: Any, num_steps: int) -> bool | Literal["unreduced"]:
    """What is there when one of several micro-batches begins: its ``no_sync`` reduces in the last one only.

    Args:
        accelerator: of the training.
        num_steps: micro-batches for each step of the optimizer.
    """
    if num_steps == 1:
        return False
    return bool(accelerator.gradient_state.plugin_kwargs.get("sync_each_batch")) or "unreduced"
