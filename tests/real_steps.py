"""The truth about a step, to compare a profile with."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from recoup.measuring import MemoryTracker, Profile, preserving
from recoup.model.step import TrainingStep


def real_peak_bytes(
    model: nn.Module,
    sample: Any,
    loss: Callable[[Any], Tensor] | None = None,
    *,
    accumulates: bool = False,
) -> int:
    """The peak of a plain step, beyond what lives before it."""
    step = TrainingStep(model, sample, loss=loss)
    gc.collect()
    with preserving(model):
        if accumulates:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        with MemoryTracker() as memory:
            output, scalar = step.forward()
            scalar.backward()
            del output
    return memory.peak_bytes


def predicted_peak_bytes(profile: Profile) -> int:
    """The same, as a profile predicts it."""
    return profile.plain.peak_bytes - profile.problem.resident_bytes
