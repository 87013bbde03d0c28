"""The picture of memory over a step: what the plain, the planned and the measured step take, moment by moment.

Shapes are given in a box of 1000 by 1000 that the page stretches to any size; texts are placed beside them in per cent,
so that they stay readable on a phone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

from recoup.engines.recording import Points, thinned
from recoup.planning import Backward, Simulation
from recoup.plans.model_plan import ModelPlan, span_name
from recoup.plans.profile import Profile
from recoup.report.numbers import byte_ticks, second_ticks
from recoup.report.subject import Subject
from recoup.sizes import format_bytes

__all__ = ["NUM_COLOURS", "PHASES", "Area", "MemoryPicture", "Shown", "Tick", "colours_of", "moments_of"]

NUM_COLOURS = 8
PHASES = ("forward", "replay", "backward")
_MOST_MOMENTS = 1200
_MOST_LEGEND = 10
_CODE = "code"


class Shown(NamedTuple):
    """Memory from ``time_s`` until the next moment, while a unit runs."""

    time_s: float
    num_bytes: int
    unit: int
    phase: str


class Tick(NamedTuple):
    """A text beside an axis, at a share of its length in per cent."""

    percent: float
    text: str


class Area(NamedTuple):
    """A filled shape with its class of colour."""

    colour: str
    path: str


def moments_of(
    simulation: Simulation, *, beyond_bytes: int = 0, replay_s: Mapping[int, float] | None = None
) -> list[Shown]:
    """The moments in which time passes, and the peak; a forward that runs again is a replay.

    Args:
        simulation: of a schedule.
        beyond_bytes: to be added all the time.
        replay_s: by unit, how much of its backward is its replay, where that was measured as one with the backward.
    """
    timeline, replays = simulation.timeline, replay_s or {}
    shown: list[Shown] = []
    seen: set[int] = set()
    ends = [moment.time_s for moment in timeline[1:]] + [simulation.seconds]
    # The end is a sum without rounding, and may lie a hair behind the last moment.
    no_time_s = simulation.seconds * 1e-9
    for moment, end_s in zip(timeline, ends, strict=True):
        if end_s - moment.time_s <= no_time_s and moment is not simulation.peak:
            continue
        made = Shown(moment.time_s, moment.num_bytes + beyond_bytes, moment.unit, moment.phase)
        if moment.phase == "forward":
            made = made._replace(phase="replay" if moment.unit in seen else "forward")
            seen.add(moment.unit)
        elif moment.phase == "backward" and 0 < replays.get(moment.unit, 0.0) < end_s - moment.time_s:
            shown.append(made._replace(phase="replay"))
            made = made._replace(time_s=moment.time_s + replays[moment.unit])
        shown.append(made)
    return thinned(shown, _MOST_MOMENTS)


def _replays_of(plan: ModelPlan) -> dict[int, float]:
    """By unit, the seconds that its option's backward takes longer than the plain one, without a replay of its own."""
    found = {}
    for action in plan.schedule.schedule:
        if isinstance(action, Backward) and action.option:
            options = plan.profile.problem.units[action.unit].options
            if not options[action.option].extra_s:
                found[action.unit] = options[action.option].backward_s - options[0].backward_s
    return found


def colours_of(profile: Profile) -> list[str]:
    """For every position its class of colour: one for each kind, in two shades by turns; code has its own."""
    kinds: dict[int, int] = {}
    turns: dict[int, int] = {}
    colours = []
    for unit in profile.units:
        if unit.is_code:
            colours.append(_CODE)
            continue
        colour = kinds.setdefault(unit.kind, len(kinds)) % NUM_COLOURS
        turns[unit.kind] = turns.get(unit.kind, 0) + 1
        colours.append(f"u{colour} alt" if turns[unit.kind] % 2 == 0 else f"u{colour}")
    return colours


@dataclass(frozen=True)
class MemoryPicture:
    """Memory over a step, ready to draw."""

    subject: Subject

    @property
    def plan(self) -> ModelPlan:
        """The plan that is drawn."""
        return self.subject.plan

    @cached_property
    def predicted(self) -> list[Shown]:
        """The planned step. What segments hold besides their input counts all the time, as in the prediction."""
        schedule = self.plan.schedule.predicted
        beyond_bytes = self.plan.predicted_bytes - schedule.peak_bytes
        is_optimizer = self.plan.predicted_bytes == self.plan.profile.residents.optimizer_peak_bytes
        return moments_of(
            schedule,
            beyond_bytes=0 if is_optimizer else beyond_bytes,
            replay_s=_replays_of(self.plan),
        )

    @cached_property
    def plain(self) -> list[Shown]:
        """The plain step, as predicted."""
        return moments_of(self.plan.profile.plain)

    @cached_property
    def measured(self) -> Points:
        """The real step; empty if there was none."""
        seen = self.subject.verification
        return seen.timeline if seen is not None else ()

    @cached_property
    def end_s(self) -> float:
        """When the longest of the steps ends."""
        ends = [self.plan.predicted_s, self.plan.profile.plain.seconds]
        return max(ends + [point[0] for point in self.measured[-1:]]) or 1.0

    @cached_property
    def top_bytes(self) -> float:
        """The upper end of the drawing."""
        levels = [moment.num_bytes for moment in (*self.predicted, *self.plain)]
        highest = max(levels + [num_bytes for _, num_bytes in self.measured])
        budget_bytes = self.plan.budget_bytes
        # A budget far above everything would press the curves flat.
        return max(highest, budget_bytes if budget_bytes < 1.6 * highest else 0) * 1.06

    def x(self, time_s: float) -> str:
        """A time in the box."""
        return f"{time_s / self.end_s * 1000:.1f}".removesuffix(".0")

    def y(self, num_bytes: float) -> str:
        """Bytes in the box, from the top down."""
        return f"{1000 - num_bytes / self.top_bytes * 1000:.1f}".removesuffix(".0")

    @property
    def resident_y(self) -> str:
        """The top of what is always there."""
        problem = self.plan.profile.problem
        return self.y(problem.resident_bytes + problem.input_bytes)

    @property
    def budget_percent(self) -> float | None:
        """The budget's height in per cent; ``None`` if it is above the drawing."""
        percent = self.plan.budget_bytes / self.top_bytes * 100
        return round(percent, 2) if percent <= 100 else None

    @cached_property
    def areas(self) -> list[Area]:
        """The planned step: one shape for each stretch in which a unit runs."""
        colours = colours_of(self.plan.profile)
        moments = [*self.predicted, Shown(self.plan.predicted_s, 0, -1, "")]
        areas, start = [], 0
        for unit, group in groupby(moments[:-1], key=lambda moment: moment.unit):
            stop = start + len(list(group))
            steps = "".join(
                f"V{self.y(moments[index].num_bytes)}H{self.x(moments[index + 1].time_s)}"
                for index in range(start, stop)
            )
            areas.append(Area(colours[unit], f"M{self.x(moments[start].time_s)} 1000{steps}V1000Z"))
            start = stop
        return areas

    @property
    def plain_path(self) -> str:
        """The plain step as a line."""
        return self._line(self.plain, self.plan.profile.plain.seconds)

    @property
    def measured_path(self) -> str:
        """The measured step as a line; empty if there was none."""
        return self._line(self.measured, self.measured[-1][0]) if self.measured else ""

    def _line(self, points: Sequence[tuple[Any, ...]], end_s: float) -> str:
        times = [*(point[0] for point in points[1:]), end_s]
        steps = [f"V{self.y(point[1])}H{self.x(end)}" for point, end in zip(points, times, strict=True)]
        return f"M{self.x(points[0][0])} {self.y(points[0][1])}" + "".join(steps)

    @cached_property
    def phases(self) -> list[tuple[str, str, str]]:
        """The strip below: where each phase begins, how wide it is, and which it is."""
        moments = [moment for moment in self.predicted if moment.phase in PHASES]
        strip, index = [], 0
        for phase, group in groupby(moments, key=lambda moment: moment.phase):
            start_s = moments[index].time_s
            index += len(list(group))
            end_s = moments[index].time_s if index < len(moments) else self.plan.predicted_s
            width = f"{(end_s - start_s) / self.end_s * 1000:.1f}"
            strip.append((self.x(start_s), width, phase))
        return strip

    @property
    def x_ticks(self) -> list[Tick]:
        """Seconds."""
        ticks = second_ticks(0.0, self.end_s, most=8)
        return [Tick(round(time_s / self.end_s * 100, 2), text) for time_s, text in ticks]

    @property
    def y_ticks(self) -> list[Tick]:
        """Bytes."""
        ticks = byte_ticks(0.0, self.top_bytes)
        return [Tick(round(num_bytes / self.top_bytes * 100, 2), text) for num_bytes, text in ticks]

    @property
    def legend(self) -> list[tuple[str, str]]:
        """Colours and the units that have them, the first kinds only."""
        profile = self.plan.profile
        entries: dict[int, list[str]] = {}
        for unit in profile.units:
            if not unit.is_code:
                entries.setdefault(unit.kind, []).append(unit.name)
        named = [
            (f"u{index % NUM_COLOURS}", span_name(names[0], names[-1]))
            for index, names in enumerate(entries.values())
        ]
        more = len(named) - _MOST_LEGEND
        shown = named[:_MOST_LEGEND]
        if any(unit.is_code for unit in profile.units):
            shown.append((_CODE, "code between units, loss"))
        return [*shown, ("", f"and {more} more kinds")] if more > 0 else shown

    @property
    def description(self) -> str:
        """The picture in a sentence, for who cannot see it."""
        seen = self.subject.verification
        measured = f"; measured, at {format_bytes(seen.peak_bytes)}" if seen else ""
        return (
            f"Memory over one training step. The plain step peaks at {format_bytes(self.plan.profile.plain_bytes)};"
            f" the planned step at {format_bytes(self.plan.predicted_bytes)}{measured}. The budget is"
            f" {format_bytes(self.plan.budget_bytes)}."
        )

    @property
    def data(self) -> dict[str, Any]:
        """What the page needs to say what is under the pointer."""
        shown = {moment.unit for moment in (*self.predicted, *self.plain)}
        units = self.plan.profile.units
        return {
            "end": self.end_s,
            "top": self.top_bytes,
            "names": {index: units[index].name for index in sorted(shown)},
            "predicted": _compact(self.predicted, self.plan.predicted_s),
            "plain": _compact(self.plain, self.plan.profile.plain.seconds),
            "measured": [[_short(time_s), num_bytes] for time_s, num_bytes in self.measured],
        }


def _compact(moments: Sequence[Shown], end_s: float) -> list[list[Any]]:
    rows: list[list[Any]] = [[_short(m.time_s), m.num_bytes, m.unit, m.phase[:1]] for m in moments]
    return [*rows, [_short(end_s), 0, -1, ""]]


def _short(value: float) -> float:
    return float(f"{value:.6g}")
