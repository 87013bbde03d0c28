"""What measuring found about one step, before it becomes a planning problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recoup.measuring.stream.seen import Structure
from recoup.measuring.unit.one_unit import CallBytes, CallSeconds
from recoup.model.accumulation import Accumulates
from recoup.model.recipe import Recipe
from recoup.plans.profile import Residents

__all__ = ["CodeSeconds", "RecipeCosts", "StepCosts"]


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
        copied_bytes: for each call, what it leaves in copies for a replay, under every recipe that replays the whole of
            it and was measured: also under those that are not worth planning with.
        holds_output: whether the caller holds the model's output through the backward.
    """

    structure: Structure
    options: tuple[tuple[RecipeCosts, ...], ...]
    code_seconds: tuple[CodeSeconds, ...]
    residents: Residents
    accumulates: Accumulates
    once: frozenset[int]
    copied_bytes: tuple[Mapping[Recipe, int], ...]
    holds_output: bool = True

    @property
    def caller_holds(self) -> dict[int, int]:
        """Bytes of the storages that the caller holds through the backward."""
        tail = self.structure.tail
        return tail.loss | (tail.output if self.holds_output else {})
