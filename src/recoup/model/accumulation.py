"""Gradients that several backwards add up in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from recoup.errors import SampleError

if TYPE_CHECKING:
    from recoup.model.step import TrainingStep

__all__ = ["UNREDUCED", "Accumulates", "read_accumulation"]

UNREDUCED: Literal["unreduced"] = "unreduced"

Accumulates: TypeAlias = bool | Literal["unreduced"]
"""Whether gradients are there when a step begins; of parameters that FSDP2 divides, the rank's shares of them, or
"unreduced" ones: in full, since only the last micro-batch reduces them."""


def read_accumulation(step: TrainingStep, accumulates: Accumulates) -> Accumulates:
    """What the user says of a step, which notes it.

    Raises:
        SampleError: it is none of the values that it can have.
    """
    if accumulates not in (True, False, UNREDUCED):
        raise SampleError(f"accumulates must be True, False or {UNREDUCED!r}; got {accumulates!r}.")
    # Gradients that are views of buckets are there when a step begins.
    is_unreduced = accumulates == UNREDUCED and bool(step.shards)
    step.accumulates = UNREDUCED if is_unreduced else bool(accumulates) or step.buckets.are_gradients
    return step.accumulates
