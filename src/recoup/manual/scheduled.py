"""A chain run by a planner's schedule: forwards, drops, backwards and moves in the order that it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from recoup.errors import ChainError
from recoup.manual.run import Gradients
from recoup.manual.steps import Step, call_backward, call_forward, first_gradient
from recoup.planning import Backward, Drop, Fetch, Forward, Keep, Schedule, Send, Value
from recoup.planning.actions import Action
from recoup.stores import ActivationStore
from recoup.stores.arrays import copy_array

__all__ = ["ScheduledRun", "run_schedule"]


@dataclass(frozen=True, eq=False)
class ScheduledRun:
    """What a scheduled run gave and what it took.

    Attributes:
        output: what the last step gave.
        gradients: of the input, and of each step's parameters.
        num_forwards: how often each step ran forward.
        peak_bytes: the most bytes of inputs and outputs that were alive at once, the chain's input among them.
    """

    output: Any
    gradients: Gradients
    num_forwards: tuple[int, ...]
    peak_bytes: int


def run_schedule(
    steps: Sequence[Step], schedule: Schedule, *, array: Any, grad_output: Any | Callable[[Any], Any]
) -> ScheduledRun:
    """Runs steps as a schedule says; `recoup.manual.Chain.run_schedule` is its public face."""
    machine = _Machine(steps, copy_array(array), grad_output)
    for index, action in enumerate(schedule):
        machine.run(index, action)
    return machine.result(len(schedule))


class _Machine:
    """What is alive while a schedule runs.

    A step's backward reads the step's input and nothing else, so there are no held bytes beyond it: a forward
    that keeps an option keeps the input, and moves of held bytes have nothing to move.
    """

    def __init__(self, steps: Sequence[Step], array: Any, grad_output: Any | Callable[[Any], Any]) -> None:
        self._steps = steps
        self._last = len(steps) - 1
        self._values: dict[int, Any] = {-1: array}
        """By unit, its output; -1 is the chain's input, which stays."""
        self._pinned: set[int] = set()
        """Values that a unit which keeps its option will read in its backward."""
        self._elsewhere: dict[str, ActivationStore] = {}
        self._make_gradient = grad_output if callable(grad_output) else lambda output: grad_output
        self._grad: Any = None
        self._output: Any = None
        self._next_backward = self._last
        self._parameters: list[Any] = [None] * len(steps)
        self._num_forwards = [0] * len(steps)
        self._peak_bytes = array.nbytes

    def run(self, index: int, action: Action) -> None:
        where = f"Action {index} ({action})"
        if not 0 <= action.unit <= self._last:
            raise ChainError(
                f"{where}: there is no unit {action.unit}; the chain has {len(self._steps)} steps."
                " Plan for as many units as the chain has."
            )
        match action:
            case Forward():
                self._forward(where, action)
            case Backward():
                self._backward(where, action.unit)
            case Drop(unit, value=Value.OUTPUT):
                self._values.pop(unit, None)
            case Drop(unit):
                self._pinned.discard(unit - 1)
            case Send(unit, value=Value.OUTPUT, link=link):
                store = self._elsewhere.setdefault(link, ActivationStore(place="host"))
                store.put(unit, self._take(where, unit))
            case Fetch(unit, value=Value.OUTPUT, link=link):
                self._values[unit] = self._elsewhere[link].take(unit)
                self._note_peak()

    def _note_peak(self) -> None:
        self._peak_bytes = max(self._peak_bytes, sum(array.nbytes for array in self._values.values()))

    def _forward(self, where: str, action: Forward) -> None:
        unit = action.unit
        output = call_forward(self._steps[unit], unit, copy_array(self._read(where, unit - 1)))
        self._num_forwards[unit] += 1
        self._values[unit] = output
        self._note_peak()
        if action.keep is Keep.OPTION:
            self._pinned.add(unit - 1)
        elif action.keep is Keep.NOTHING and unit > 0 and unit - 1 not in self._pinned:
            del self._values[unit - 1]
        if unit == self._last and self._grad is None:
            self._output = output
            self._grad = first_gradient(self._make_gradient(copy_array(output)), tuple(output.shape))
        if unit == self._last:
            del self._values[unit]  # the gradient stands in its place

    def _backward(self, where: str, unit: int) -> None:
        if unit != self._next_backward or self._grad is None:
            raise ChainError(
                f"{where}: the next backward is that of unit {self._next_backward}, after the last unit's forward."
                " Check the schedule with recoup.planning.simulate."
            )
        array = copy_array(self._read(where, unit - 1))
        self._grad, self._parameters[unit] = call_backward(self._steps[unit], unit, array, self._grad)
        self._next_backward = unit - 1
        self._pinned.discard(unit - 1)
        self._values.pop(unit, None)
        if unit > 0:
            self._values.pop(unit - 1, None)

    def _read(self, where: str, unit: int) -> Any:
        if unit not in self._values:
            raise ChainError(
                f"{where}: the output of unit {unit} is not there. Check the schedule with"
                " recoup.planning.simulate, which says what is missing."
            )
        return self._values[unit]

    def _take(self, where: str, unit: int) -> Any:
        array = self._read(where, unit)
        del self._values[unit]
        return array

    def result(self, num_actions: int) -> ScheduledRun:
        if self._next_backward >= 0:
            raise ChainError(
                f"The schedule ends after {num_actions} actions, and the backward of unit {self._next_backward}"
                " has not run."
            )
        gradients = Gradients(self._grad, tuple(self._parameters))
        return ScheduledRun(self._output, gradients, tuple(self._num_forwards), self._peak_bytes)
