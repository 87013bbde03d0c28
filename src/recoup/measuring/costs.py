"""What measuring found about one step, before it becomes a planning problem."""

from __future__ import annotations

from dataclasses import dataclass

from recoup.measuring.isolate import CallBytes, CallSeconds
from recoup.measuring.options import Recipe
from recoup.measuring.structure import Structure

__all__ = ["CodeSeconds", "RecipeCosts", "Residents", "StepCosts"]


@dataclass(frozen=True, slots=True)
class RecipeCosts:
    """One way to run a unit, measured."""

    recipe: Recipe
    bytes: CallBytes
    seconds: CallSeconds


@dataclass(frozen=True, slots=True)
class CodeSeconds:
    """Seconds of the code between units."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class Residents:
    """Bytes that live for the whole step, and what the optimizer's own step needs.

    Attributes:
        parameter_bytes: of parameters and buffers.
        optimizer_bytes: of the optimizer's state, also before its first step.
        other_bytes: the sample, and whatever else lives on the device.
        gradient_bytes: of all parameters' gradients. They are resident only where a step accumulates them.
        optimizer_transient_bytes: while the optimizer steps, beside all of these.
    """

    parameter_bytes: int
    optimizer_bytes: int
    other_bytes: int
    gradient_bytes: int
    optimizer_transient_bytes: int

    @property
    def total_bytes(self) -> int:
        """What lives before the forward begins."""
        return self.parameter_bytes + self.optimizer_bytes + self.other_bytes

    @property
    def optimizer_peak_bytes(self) -> int:
        """The peak of the optimizer's step, which no plan can change."""
        return self.total_bytes + self.gradient_bytes + self.optimizer_transient_bytes


@dataclass(frozen=True)
class StepCosts:
    """A step, measured.

    Attributes:
        structure: its calls and what passes between them.
        options: for each call, the ways to run it.
        code_seconds: of the code before each call, and of the tail last.
        residents: what lives all the time.
        accumulates: whether gradients are there when a step begins.
        once: the calls that cannot be replayed, not even as part of a segment.
        holds_output: whether the caller holds the model's output through the backward.
    """

    structure: Structure
    options: tuple[tuple[RecipeCosts, ...], ...]
    code_seconds: tuple[CodeSeconds, ...]
    residents: Residents
    accumulates: bool
    once: frozenset[int] = frozenset()
    holds_output: bool = True

    @property
    def caller_holds(self) -> dict[int, int]:
        """Bytes of the storages that the caller holds through the backward."""
        tail = self.structure.tail
        return tail.loss | (tail.output if self.holds_output else {})
