"""One forward of a chain, and its backward."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recoup.errors import NotHeldError, UnitRangeError
from recoup.manual.memory import Memory
from recoup.manual.steps import Step, call_backward, call_forward, first_gradient
from recoup.stores import ActivationStore
from recoup.stores.arrays import copy_array

__all__ = ["Gradients", "Run"]


@dataclass(frozen=True, eq=False)
class Gradients:
    """What a backward gives.

    Attributes:
        input: the gradient of the chain's input.
        parameters: for every step what its backward gave besides, or None.
    """

    input: Any
    parameters: tuple[Any, ...]


class Run:
    """A forward that was run: its output, what is held of it, and the way back.

    Made by `recoup.manual.Chain.forward`.

    NOTE [ What is run again ]

    1. The backward of a unit needs that unit's input. If it is not held, the units from the nearest held
       input before it are run again.
    2. The inputs met on the way are set aside, outside the store, until their own backward has used them. So
       a backward runs every unit again at most once, unless something is evicted meanwhile. One such stretch
       is alive at a time: at worst all inputs between two held ones.
    3. What is held stays held: another backward, or `activation`, starts from it again.

    Attributes:
        output: what the last step gave.
    """

    def __init__(self, steps: Sequence[Step], memory: Memory, output: Any) -> None:
        self._units = range(memory.first_unit, memory.first_unit + len(steps))
        self._steps = dict(zip(self._units, steps, strict=True))
        self._memory = memory
        self._output_shape = tuple(output.shape)
        self._num_recomputed = 0
        self.output = output

    def __repr__(self) -> str:
        return (
            f"<Run of {self._counted()}: output of shape {list(self._output_shape)}, holds {self.held_units()},"
            f" {self._num_recomputed} run again>"
        )

    def _counted(self) -> str:
        return f"{len(self._units)} units, counted from {self._units.start}"

    @property
    def store(self) -> ActivationStore:
        """Where its activations are held."""
        return self._memory.store

    @property
    def num_recomputed(self) -> int:
        """How many times a step was run again so far."""
        return self._num_recomputed

    def held_units(self) -> tuple[int, ...]:
        """Lists the units whose inputs the store still holds for this run, in ascending order."""
        return self._memory.held_units()

    def activation(self, unit: int) -> Any:
        """Gives the input of a unit, recomputed from the nearest held one at or before it.

        Raises:
            UnitRangeError: if the chain has no such unit.
            NotHeldError: if nothing is held at or before it.
        """
        if unit not in self._units:
            raise UnitRangeError(f"Unit {unit!r} is out of range: the chain has {self._counted()}.")
        return self._reach(operator.index(unit), {}, set_aside=False)

    def backward(self, grad_output: Any) -> Gradients:
        """Passes a gradient back through all steps.

        Args:
            grad_output: the gradient of the output, of the same shape; it is not changed.

        Raises:
            ChainError: if the shape is wrong, or a step has no backward or gives a wrong result.
            NotHeldError: if a unit's input is gone and nothing is held before it.
        """
        grad = first_gradient(grad_output, self._output_shape)
        parameters: list[Any] = []
        aside: dict[int, Any] = {}
        for unit, step in reversed(self._steps.items()):
            array = self._reach(unit, aside, set_aside=True)
            grad, given = call_backward(step, unit, array, grad)
            parameters.append(given)
        return Gradients(grad, tuple(reversed(parameters)))

    def _reach(self, unit: int, aside: dict[int, Any], *, set_aside: bool) -> Any:
        """Gives an input that the caller may change, running again what lies between it and a held one."""
        start, array = self._nearest(unit, aside)
        for current in range(start, unit):
            # The entry at the start is in the store, which gave a copy; only what is new is set aside.
            if set_aside and current > start:
                aside[current] = array
                array = copy_array(array)
            array = call_forward(self._steps[current], current, array)
            self._num_recomputed += 1
        return array

    def _nearest(self, unit: int, aside: dict[int, Any]) -> tuple[int, Any]:
        if unit in aside:
            return unit, aside.pop(unit)
        for start in range(unit, self._units.start - 1, -1):
            array = self._memory.load(start)
            if array is not None:
                return start, array
        lost = f" {self._memory.why_lost}" if self._memory.why_lost else ""
        raise NotHeldError(
            f"The input of unit {unit} is not held, nor that of any unit before it to recompute it from.{lost} Run the"
            " forward with keep_input=True, keep more (policy=…), give the store more room, or, where several forwards"
            " share it, number their units one after the other (first_unit=…)."
        )
