"""A trainer's own step under the autopilot."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from recoup.piloting import Autopilot
from recoup.snapshot.places import Snapshot

__all__ = ["run_piloted"]

T = TypeVar("T")


def run_piloted(pilot: Autopilot, step: Callable[[], T], held: Snapshot) -> T:
    """Runs a step, and again if it ran out of memory, here or on another rank.

    Args:
        pilot: of the run.
        step: forward and backward of one micro-batch.
        held: what is put back before the step runs again, beside all that the autopilot puts back.
    """
    num_attempts = 0

    def attempt() -> T:
        nonlocal num_attempts
        if num_attempts:
            held.put_back()
        num_attempts += 1
        return step()

    return pilot.step(attempt)
