"""What ``simulate`` returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from recoup.sizes import format_bytes

__all__ = ["Moment", "Simulation"]


class Moment(NamedTuple):
    """Device memory from ``time_s`` until the next moment.

    ``phase`` is ``"forward"``, ``"replay"`` or ``"backward"`` while an action runs, ``"after"`` when it has
    ended, ``"fetch"`` when bytes are on their way back and ``"sent"`` when a move to another store has ended.
    """

    time_s: float
    num_bytes: int
    action: int
    unit: int
    phase: str


@dataclass(frozen=True, slots=True)
class Simulation:
    """The exact figures of a schedule.

    Attributes:
        seconds: from the first action's start to the last one's end.
        peak: the first moment with the most bytes, with the action and unit that cause it.
        wait_s: seconds in which the computation waited for a link.
        num_recomputes: for each unit, how often its forward ran again (a replay within its backward counts).
        final_bytes: what is left at the end (resident bytes, input, gradients of parameters and input).
        timeline: device memory over time, as steps.
    """

    seconds: float
    peak: Moment
    wait_s: float
    num_recomputes: tuple[int, ...]
    final_bytes: int
    timeline: tuple[Moment, ...] = field(repr=False)

    @property
    def peak_bytes(self) -> int:
        """The most device bytes at any moment."""
        return self.peak.num_bytes

    def __str__(self) -> str:
        peak = self.peak
        return (
            f"{self.seconds:.6g} s, peak {format_bytes(peak.num_bytes)} in the {peak.phase} of unit"
            f" {peak.unit} (action {peak.action}), {sum(self.num_recomputes)} recomputed forwards"
        )
