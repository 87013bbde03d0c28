"""Passes over one step: each meets the same calls of the same units, with the same random numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

from torch import nn

from recoup.devices.meter import Meter
from recoup.errors import UnitError
from recoup.measuring.problem.costs import CodeSeconds
from recoup.measuring.stream.seen import Structure
from recoup.measuring.stream.structure import look
from recoup.measuring.stream.timing import time_code
from recoup.model.calls import ModuleCall, class_of_module, watch_calls
from recoup.model.depth import deepest
from recoup.model.step import TrainingStep
from recoup.model.streaming import LeakError, UnitCall
from recoup.model.undo import undone
from recoup.model.units import Units, children_of, choose_units, find_units, split_units
from recoup.snapshot.random_state import held_random_state

__all__ = ["Passes"]

_T = TypeVar("_T")


class Passes:
    """The units of a step, and passes over it.

    Args:
        step: to run.
        meter: of its device.
        wanted: the units; by default they are chosen here.

    Attributes:
        units: the modules whose calls are visited.
        inside: for each unit, the modules that it calls directly.
        put_back_random_state: gives each run of the step the same random numbers.
    """

    def __init__(self, step: TrainingStep, meter: Meter, wanted: Units | Iterable[Units] | None) -> None:
        self.step, self.meter = step, meter
        put_back_random_state = held_random_state()
        root = watch_calls(step)
        put_back_random_state()
        root = deepest(step, root)
        self.put_back_random_state = held_random_state()
        self.units = choose_units(root) if wanted is None else find_units(root, wanted)
        self.inside: dict[nn.Module, list[nn.Module]] = {}
        self._root, self._may_split = root, wanted is None
        self._names: tuple[str, ...] = ()

    def look(self) -> Structure:
        """The first pass with a graph. Units that leak tensors, and all units of their class, are split into parts.

        Raises:
            UnitError: no unit is called, or one leaks tensors and cannot be split.
        """
        structure = None
        while structure is None:
            self.inside = {unit: children_of(self._root, unit) for unit in self.units}
            self.put_back_random_state()
            try:
                structure = look(self.step, self.units, self.meter, self.inside)
            except LeakError as error:
                self.units = self._split(self._root, error)
                continue
            if self.step.ranks.largest(bool(structure.accumulates and structure.copies)):
                # Only the first of several backwards in a step copies gradients; later ones, which add, take more.
                self.step.accumulates, structure = structure.accumulates, None
        if not structure.calls:
            compiled = [name for name, _ in self.step.compiled]
            hidden = f", and that {compiled[0]!r}, which is compiled, does not call it" if compiled else ""
            raise UnitError(
                "The step runs no module of the model with gradients, so there is nothing to decide about. Check"
                f" step= and torch.no_grad around the model{hidden}."
            )
        self._names = tuple(seen.name for seen in structure.calls)
        return structure

    def _split(self, root: ModuleCall, error: LeakError) -> list[nn.Module]:
        kind = class_of_module(error.module)
        split = split_units(root, self.units, [unit for unit in self.units if class_of_module(unit) is kind])
        if not self._may_split or not split:
            raise error
        return split

    def visit(
        self, indices: Collection[int], measure: Callable[[UnitCall], _T]
    ) -> tuple[list[CodeSeconds], dict[int, _T]]:
        """A pass that calls ``measure`` at some of the step's calls; each may be run again and again there.

        Returns:
            the seconds of the code between units, and the results by the call's index.

        Raises:
            UnitError: other units are called than in the first pass.
        """
        num_calls = 0
        found: dict[int, _T] = {}

        def at_call(call: UnitCall) -> None:
            nonlocal num_calls
            num_calls += 1
            expected = self._names[call.index] if call.index < len(self._names) else None
            if call.name != expected:
                raise _unsteady(f"{call.name!r} was called in the place of {expected!r}")
            if call.index in indices:
                with undone(call) as repeatable:
                    found[call.index] = measure(repeatable)

        self.put_back_random_state()
        seconds = time_code(self.step, self.units, self.meter, at_call)
        if num_calls < len(self._names):
            raise _unsteady(f"{self._names[num_calls]!r} was not called again")
        return seconds, found


def _unsteady(what: str) -> UnitError:
    return UnitError(
        f"The step does not call the same units each time that it runs: {what}. Let it depend on torch's, NumPy's or"
        " Python's own random numbers and on its arguments alone, which are the same each time; or choose units that it"
        " always calls, with units=."
    )
