"""The measured numbers of a model's step: what `measure` returns and `plan` reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from recoup.model.accumulation import Accumulates
from recoup.model.conditions import Conditions
from recoup.model.recipe import Recipe
from recoup.planning import Backward, Forward, Keep, Phase, Plan, Problem, Schedule, Simulation, simulate
from recoup.plans.tightest import Tightest
from recoup.sizes import format_bytes

__all__ = ["Profile", "ProfiledUnit", "Residents"]


@dataclass(frozen=True, slots=True)
class ProfiledUnit:
    """A position of the step: a unit's call, or the code between units.

    Attributes:
        name: of the call, such as ``"blocks.3"``, or ``"cell#2"`` for a second call; code is named by what follows.
        module: the module's name in the model, or a slice's, such as ``"features[0:3]"``; ``None`` for code.
        call: which call of that module it is, from 0.
        kind: the same number for units that cost the same.
        recipes: in the order of the problem's options.
        unsafe: why it is kept whatever the budget; empty if it may be replayed.
        num_parts: how many modules it calls, into which it could be split.
        num_stored: by recipe, how many tensors its replays store; of keeping, those of a replay of the whole unit.
            Empty if that is not known.
        uncaptured: why it runs eagerly beside captured units; empty if it is captured, or none is.
    """

    name: str
    module: str | None
    call: int
    kind: int
    recipes: tuple[Recipe, ...]
    unsafe: str = ""
    num_parts: int = 0
    num_stored: tuple[int, ...] = ()
    uncaptured: str = ""

    @property
    def is_code(self) -> bool:
        """Whether it is code between units, which only the model itself can run."""
        return self.module is None


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
class Profile:
    """The measured numbers of a model's step.

    Attributes:
        model: the model's class.
        device: that it was measured on.
        units: every position of the step, in order; the last is the loss.
        problem: the same in numbers, as the planner reads it.
        residents: what lives for the whole step.
        accumulates: whether gradients are there when a step begins, and perhaps that they are not reduced by then.
        seconds_are_estimates: whether seconds were worked out for hardware that was not there, and not measured.
        ranks: over which parameters, gradients and optimizer state are divided.
        device_bytes: all the memory of the device; 0 if that is not known.
        holds_output: whether the caller was taken to hold the model's output through the backward.
        output_bytes: of that output, apart from the loss.
        output_names: the names of its largest parts.
        conditions: what the model was called with; ``None`` if that is not known, or only parts of it were called.
        engine: that units run on, where they can.
        in_flight: how many forwards wait for their backward at once, as in a stage of a pipeline.
    """

    model: str
    device: str
    units: tuple[ProfiledUnit, ...] = field(repr=False)
    problem: Problem = field(repr=False)
    residents: Residents
    accumulates: Accumulates = False
    seconds_are_estimates: bool = False
    ranks: int = 1
    device_bytes: int = 0
    holds_output: bool = True
    output_bytes: int = 0
    output_names: str = ""
    conditions: Conditions | None = None
    engine: str = "eager"
    in_flight: int = 1

    @property
    def plain_schedule(self) -> Schedule:
        """The step with everything kept, as it would run without recoup."""
        last = len(self.units) - 1
        keep = [Forward(index, keep=Keep.OPTION, option=0) for index in range(last + 1)]
        return Schedule([*keep, *(Backward(index, option=0) for index in range(last, -1, -1))])

    @cached_property
    def plain(self) -> Simulation:
        """What that step takes."""
        return simulate(self.problem, self.plain_schedule)

    @cached_property
    def _tightest(self) -> Tightest:
        return Tightest(self.problem, [unit.recipes for unit in self.units])

    @property
    def tightest(self) -> Plan:
        """The plan that needs the least memory."""
        return self._tightest.plan

    def may_fit(self, num_bytes: int) -> bool:
        """Whether the tightest plan of a single forward needs no more."""
        return self._tightest.fits(num_bytes)

    @property
    def is_captured(self) -> bool:
        """Whether units run as captured graphs."""
        return any(recipe.cut is not None for unit in self.units for recipe in unit.recipes)

    @property
    def plain_bytes(self) -> int:
        """Predicted peak of the plain step, the optimizer's step included."""
        waiting_bytes = self.waiting_bytes(self.plain_schedule, self.plain)
        return max(self.plain.peak_bytes + waiting_bytes, self.residents.optimizer_peak_bytes)

    def waiting_bytes(self, schedule: Schedule, simulation: Simulation) -> int:
        """What the forwards in flight hold, beside the one whose backward comes next."""
        if self.in_flight == 1:
            return 0
        first = next(index for index, action in enumerate(schedule) if isinstance(action, Backward))
        ended = [
            moment for moment in simulation.timeline if moment.action < first and moment.phase == "after"
        ]
        # Parameters that are gathered when a step begins may be freed by its forward, unlike what else is there before.
        initial_bytes = sum(
            value.num_bytes
            for value in self.problem.values
            if value.made is None and (value.stays or any(use.phase is not Phase.FIRST for use in value.read))
        )
        return (self.in_flight - 1) * max(0, ended[-1].num_bytes - initial_bytes)

    @property
    def activation_bytes(self) -> int:
        """What the plain step takes beyond parameters, gradients, optimizer state and sample."""
        fixed = self.residents.total_bytes + self.residents.gradient_bytes
        return max(0, self.plain.peak_bytes - fixed)

    def to_json(self, *, indent: int | None = None) -> str:
        """Writes it as versioned JSON, from which `from_json` makes an equal profile."""
        from recoup.plans.profile_json import profile_to_json

        return profile_to_json(self, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Reads what `to_json` wrote.

        Raises:
            EncodingError: the text is not JSON, not a profile, of another version, incomplete or damaged.
        """
        from recoup.plans.profile_json import profile_from_json

        return profile_from_json(text)

    def __str__(self) -> str:
        num_calls = sum(not unit.is_code for unit in self.units)
        num_kinds = len({unit.kind for unit in self.units if not unit.is_code})
        among = f", one of {self.ranks} ranks" if self.ranks > 1 else ""
        note = " Seconds are estimates." if self.seconds_are_estimates else ""
        return (
            f"{self.model} on {self.device}{among}: {num_calls} unit calls of {num_kinds} kinds;"
            f" plain step {self.plain.seconds:.4g} s, peak {format_bytes(self.plain_bytes)}"
            f" ({format_bytes(self.residents.parameter_bytes)} parameters,"
            f" {format_bytes(self.residents.gradient_bytes)} gradients,"
            f" {format_bytes(self.residents.optimizer_bytes)} optimizer).{note}"
        )
