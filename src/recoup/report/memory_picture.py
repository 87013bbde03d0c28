"""The picture of memory over a step: what the plain, the planned and the measured step take, moment by moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from recoup.engines.recording import thinned
from recoup.planning import Backward, Moment, Problem, Schedule, Simulation
from recoup.plans.model_plan import ModelPlan, span_name
from recoup.plans.profile import Profile
from recoup.report.chart import BOX, Axis, Curve
from recoup.report.numbers import byte_ticks, second_ticks
from recoup.report.subject import Subject
from recoup.sizes import format_bytes

__all__ = ["MemoryPicture", "Shown", "colours_of", "durations", "moments_of", "replays_in_backward"]

_NUM_COLOURS = 8
_PHASES = ("forward", "replay", "backward")
_MOST_MOMENTS = 1200
_MOST_LEGEND = 10
_CODE = "code"


class Shown(NamedTuple):
    """Memory from ``time_s`` until the next moment, while a unit runs."""

    time_s: float
    num_bytes: int
    unit: int
    phase: str


def durations(simulation: Simulation) -> Iterator[tuple[Moment, float]]:
    """Every moment with the seconds until the next one."""
    timeline = simulation.timeline
    ends = [*(moment.time_s for moment in timeline[1:]), simulation.seconds]
    for moment, end_s in zip(timeline, ends, strict=True):
        yield moment, end_s - moment.time_s


def moments_of(simulation: Simulation, *, replay_s: Mapping[int, float] | None = None) -> list[Shown]:
    """The moments in which time passes, and the peak; a forward that runs again is a replay.

    Args:
        simulation: of a schedule.
        replay_s: what `replays_in_backward` found.
    """
    replays = replay_s or {}
    shown: list[Shown] = []
    seen: set[int] = set()
    # The end is an exact sum, and may differ from the last moment by rounding.
    no_time_s = simulation.seconds * 1e-9
    for moment, duration_s in durations(simulation):
        if duration_s <= no_time_s and moment is not simulation.peak:
            continue
        made = Shown(moment.time_s, moment.num_bytes, moment.unit, moment.phase)
        if moment.phase == "forward":
            made = made._replace(phase="replay" if moment.unit in seen else "forward")
            seen.add(moment.unit)
        elif moment.phase == "backward" and 0 < replays.get(moment.unit, 0.0) < duration_s:
            shown.append(made._replace(phase="replay"))
            made = made._replace(time_s=moment.time_s + replays[moment.unit])
        shown.append(made)
    return thinned(shown, _MOST_MOMENTS)


def replays_in_backward(problem: Problem, schedule: Schedule) -> dict[int, float]:
    """By unit, the seconds of its backward that are a replay, where an option was measured with both as one."""
    found = {}
    for action in schedule:
        if isinstance(action, Backward) and action.option:
            options = problem.units[action.unit].options
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
        colour = kinds.setdefault(unit.kind, len(kinds)) % _NUM_COLOURS
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
    def predicted(self) -> Curve:
        """The planned step."""
        found, replay_s = self.plan.schedule, replays_in_backward(self.problem, self.plan.schedule.schedule)
        moments = moments_of(found.predicted, replay_s=replay_s)
        return Curve(moments, self.plan.predicted_s)

    @property
    def problem(self) -> Problem:
        """The numbers that were planned with."""
        return self.plan.profile.problem

    @cached_property
    def plain(self) -> Curve:
        """The plain step, as predicted."""
        plain = self.plan.profile.plain
        return Curve(moments_of(plain), plain.seconds)

    @cached_property
    def measured(self) -> Curve | None:
        """The real step, if there was one."""
        seen = self.subject.verification
        return Curve(seen.timeline, seen.timeline[-1][0]) if seen and seen.timeline else None

    @cached_property
    def axes(self) -> tuple[Axis, Axis]:
        """Seconds and bytes, up to the longest step and to the highest level."""
        curves = [curve for curve in (self.predicted, self.plain, self.measured) if curve]
        highest = max(point[1] for curve in curves for point in curve.points)
        budget_bytes = self.plan.budget_bytes
        # Not up to a budget far above everything: the curves would be flat.
        top_bytes = max(highest, budget_bytes if budget_bytes < 1.6 * highest else 0) * 1.06
        end_s = max(curve.end for curve in curves) or 1.0
        return (
            Axis(0.0, BOX, 0.0, end_s, second_ticks(0.0, end_s, most=8)),
            Axis(BOX, 0.0, 0.0, top_bytes, byte_ticks(0.0, top_bytes)),
        )

    @property
    def areas(self) -> list[tuple[str, str]]:
        """Class and shape of each filled area: what runs in the planned step, and what is always there below it."""
        colours = [f"area {colour}" for colour in colours_of(self.plan.profile)]
        always_bytes = self.problem.resident_bytes + self.problem.input_bytes
        parts = [(colours[unit], part) for unit, part in self.predicted.parts(lambda moment: moment.unit)]
        parts.append(("resident", Curve([(0.0, always_bytes)], self.plan.predicted_s)))
        return [(colour, part.area(*self.axes)) for colour, part in parts]

    @property
    def lines(self) -> list[tuple[str, str]]:
        """Class and shape of each line."""
        curves = {"plain": self.plain, "measured": self.measured}
        return [(name, curve.path(*self.axes)) for name, curve in curves.items() if curve]

    @property
    def phases(self) -> list[tuple[str, str, str]]:
        """The strip below: where each phase begins, how wide it is, and which it is."""
        x, _ = self.axes
        moments = [moment for moment in self.predicted.points if moment.phase in _PHASES]
        parts = Curve(moments, self.predicted.end).parts(lambda moment: moment.phase)
        spans = [(phase, part.points[0].time_s, part.end) for phase, part in parts]
        return [
            (f"{x.at(start):.1f}", f"{x.at(end) - x.at(start):.1f}", phase) for phase, start, end in spans
        ]

    @property
    def budget_percent(self) -> float | None:
        """The budget's height in per cent; ``None`` if it is above the drawing."""
        percent = self.axes[1].percent(self.plan.budget_bytes)
        return percent if percent <= 100 else None

    @property
    def legend(self) -> list[tuple[str, str]]:
        """Colours and the units that have them, the first kinds only."""
        profile = self.plan.profile
        entries: dict[int, list[str]] = {}
        for unit in profile.units:
            if not unit.is_code:
                entries.setdefault(unit.kind, []).append(unit.name)
        named = [
            (f"u{index % _NUM_COLOURS}", span_name(names[0], names[-1]))
            for index, names in enumerate(entries.values())
        ]
        shown = named[:_MOST_LEGEND]
        if any(unit.is_code for unit in profile.units):
            shown.append((_CODE, "code between units, loss"))
        more = len(named) - _MOST_LEGEND
        return [*shown, ("", f"and {more} more kinds")] if more > 0 else shown

    @property
    def description(self) -> str:
        """The picture in words, for screen readers."""
        seen = self.subject.verification
        measured = f"; measured, at {format_bytes(seen.peak_bytes)}" if seen else ""
        return (
            f"Memory over one training step. The plain step peaks at {format_bytes(self.plan.profile.plain_bytes)};"
            f" the planned step at {format_bytes(self.plan.predicted_bytes)}{measured}. The budget is"
            f" {format_bytes(self.plan.budget_bytes)}."
        )

    @property
    def data(self) -> dict[str, Any]:
        """What the page's script shows for the place under the pointer."""
        x, y = self.axes
        shown = {moment.unit for moment in (*self.predicted.points, *self.plain.points)}
        units = self.plan.profile.units
        return {
            "end": x.high,
            "top": y.high,
            "names": {index: units[index].name for index in sorted(shown)},
            "predicted": _compact([*self.predicted.points, Shown(self.predicted.end, 0, -1, "")]),
            "plain": _compact([*self.plain.points, Shown(self.plain.end, 0, -1, "")]),
            "measured": _compact(self.measured.points) if self.measured else [],
        }


def _compact(points: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
    """Points with fewer digits, and phases by their first letters."""
    return [[float(f"{point[0]:.6g}"), *point[1:3], *(phase[:1] for phase in point[3:])] for point in points]
