"""What a plan does at every position of a step, in bytes and seconds, and the alternatives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from recoup.errors import ScheduleError
from recoup.planning import Action, Backward, Forward, Keep, Schedule, simulate
from recoup.planning.additive_numbers import additive
from recoup.planning.solvers.baselines import REPLAY
from recoup.plans.model_plan import ModelPlan
from recoup.plans.tree import Item, Leaf, Segment, leaves_of
from recoup.report.memory_picture import durations

__all__ = ["Decision", "Decisions", "Way"]


@dataclass(frozen=True, slots=True)
class Way:
    """An alternative to the plain run of a unit: the bytes that it frees, and the seconds that it costs."""

    choice: int
    freed_bytes: int
    extra_s: float

    @property
    def rate(self) -> float:
        """Bytes freed per extra second; 0 where it costs none."""
        return self.freed_bytes / self.extra_s if self.extra_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens at one position, and its costs.

    Attributes:
        unit: its index.
        label: what happens, in a few words.
        segment: the segment that it is recomputed with; ``None`` if it is on its own.
        choice: the index of its option, or ``REPLAY``.
        held_bytes: saved from its forward to its backward; 0 in a segment.
        plain_held_bytes: the same in the plain step.
        freed_bytes: how much less it holds than in the plain step, outputs inside a segment included.
        output_bytes: of its output.
        transient_bytes: the most scratch of its forward, replay and backward.
        forward_s: seconds of its forward in the plain step.
        backward_s: seconds of its backward in the plain step.
        extra_s: seconds beyond those of the plain step.
    """

    unit: int
    label: str
    segment: Segment | None
    choice: int
    held_bytes: int
    plain_held_bytes: int
    freed_bytes: int
    output_bytes: int
    transient_bytes: int
    forward_s: float
    backward_s: float
    extra_s: float

    @property
    def is_kept(self) -> bool:
        """Whether it runs as in the plain step."""
        return self.segment is None and self.choice == 0


class Decisions(Sequence[Decision]):
    """A plan's decisions, by position."""

    def __init__(self, plan: ModelPlan) -> None:
        self.plan = plan
        self.problem = plan.profile.problem
        self.units = additive(self.problem).units
        seconds = [0.0] * len(self.problem.units)
        for moment, duration_s in durations(plan.schedule.predicted):
            seconds[moment.unit] += duration_s
        self._all = [
            self._decide(item, leaf, seconds[leaf.unit]) for item in plan.items for leaf in leaves_of([item])
        ]

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: int) -> Decision:  # type: ignore[override]
        return self._all[index]

    def _decide(self, item: Item, leaf: Leaf, seconds: float) -> Decision:
        unit = self.units[leaf.unit]
        plain, option = unit.options[0], unit.options[leaf.option]
        segment = item if isinstance(item, Segment) else None
        held_bytes = 0 if segment else option.held_bytes
        inside_bytes = unit.output_bytes if leaf.unit < item.last else 0
        return Decision(
            unit=leaf.unit,
            label=self.plan.label(item),
            segment=segment if item.first < item.last else None,
            choice=REPLAY if segment else leaf.option,
            held_bytes=held_bytes,
            plain_held_bytes=plain.held_bytes,
            freed_bytes=plain.held_bytes - held_bytes + inside_bytes,
            output_bytes=unit.output_bytes,
            transient_bytes=max(option.scratch),
            forward_s=plain.forward_s,
            backward_s=plain.extra_s + plain.backward_s,
            extra_s=round(seconds - plain.total_s, 12) + 0.0,  # without what sums round, and never -0.0
        )

    def ways(self, unit: int) -> list[Way]:
        """The ways to run a unit that hold less than the plain one."""
        planned, profiled = self.units[unit], self.plan.profile.units[unit]
        plain = planned.options[0]
        found = [
            Way(index, plain.held_bytes - option.held_bytes, option.total_s - plain.total_s)
            for index, option in enumerate(planned.options)
        ]
        if not planned.runs_once and len(profiled.recipes) > 1:
            found.append(Way(REPLAY, plain.held_bytes, planned.lightest.forward_s + plain.again_s))
        return [way for way in found if way.freed_bytes > 0]

    @cached_property
    def kept_rate(self) -> float:
        """The highest rate among the alternatives of units that are kept; 0 if there are none."""
        ways = (way for decision in self if decision.is_kept for way in self.ways(decision.unit))
        return max((way.rate for way in ways), default=0.0)

    def peak_with(self, unit: int, choice: int) -> int | None:
        """The step's peak if one unit that is on its own ran in another way; ``None`` if it cannot."""
        try:
            simulation = simulate(self.problem, Schedule(self._swapped(unit, choice)))
        except ScheduleError:
            return None
        return max(simulation.peak_bytes, self.plan.profile.residents.optimizer_peak_bytes)

    def _swapped(self, unit: int, choice: int) -> Iterator[Action]:
        """The plan's actions with another choice for one unit."""
        option = max(choice, 0)
        keep = Forward(unit, keep=Keep.OPTION, option=option)
        first = Forward(unit, keep=Keep.INPUT if unit else Keep.NOTHING) if choice == REPLAY else keep
        has_run = False
        for action in self.plan.schedule.schedule:
            if action.unit != unit:
                yield action
            elif isinstance(action, Backward):
                if choice == REPLAY:
                    yield keep
                yield Backward(unit, option=option)
            elif not has_run:
                has_run = True
                yield first
