"""The picture of plans by size: peaks and seconds along one axis, and what happens to every unit at which size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from recoup.plans.by_hand import plan_by_hand
from recoup.plans.by_size.plans import PlansBySize, SizeRange
from recoup.plans.model_plan import ModelPlan, span_name
from recoup.report.by_size import PER, RealStep, axes_in_words, real_steps, treatments
from recoup.report.chart import BOX, Axis, Line, padded, round_values
from recoup.report.numbers import byte_ticks, second_ticks
from recoup.report.subject import Subject
from recoup.sizes import format_bytes

__all__ = ["Place", "SizePicture", "Strip", "make_size_picture"]

_MOST_STRIPS = 60
_FEW, _MANY = 2, 5
"""Places to look at in a range, and in the first one, which is the longest."""
_HIGHEST = 1.6
"""Up to how many budgets the plain step's peak is drawn."""
_WORDS = {
    "keep": "kept",
    "part": "recomputed in part",
    "recompute": "recomputed",
    "segment": "recomputed in a segment",
}


class Place(NamedTuple):
    """A size, with predictions: under its plan, for the plain step, and under the plan for the largest batch."""

    size: int
    peak_bytes: int
    per_thousand_s: float
    plain_bytes: int
    largest_per_thousand_s: float


class Strip(NamedTuple):
    """Neighbouring units that are treated alike at every size; parts are places, widths, kinds and words."""

    name: str
    parts: Sequence[tuple[str, str, str, str]]


@dataclass(frozen=True)
class SizePicture:
    """Plans along one axis, ready to draw."""

    plans: PlansBySize
    steps: Sequence[RealStep]

    @cached_property
    def ranges(self) -> list[tuple[int, int, SizeRange]]:
        """First and last size of each range, from the smallest size that was measured."""
        low, found = self.plans.profiles.sizes[0][0], []
        for one in self.plans.ranges:
            if one.up_to[0] >= low:
                found.append((low, one.up_to[0], one))
                low = one.up_to[0] + 1
        return found

    @cached_property
    def places(self) -> list[Place]:
        """Sizes at which curves have corners, in order: both ends of each range, and some of the first between."""
        found = []
        for index, (low, high, one) in enumerate(self.ranges):
            number = _FEW if index else _MANY
            sizes = {low + (high - low) * part // (number - 1) for part in range(number)}
            found += [self._place(size, one) for size in sorted(sizes)]
        return found

    def _place(self, size: int, own: SizeRange) -> Place:
        profile, budget_bytes = self.plans.profiles.at((size,)), self.plans.budget_bytes
        largest = plan_by_hand(profile, self.plans.plan.schedule.schedule, budget_bytes)
        chosen = own.plan if size == own.up_to[0] else self.plans.plan_at((size,))
        return Place(
            size,
            chosen.predicted_bytes,
            PER * chosen.predicted_s / size,
            profile.plain_bytes,
            PER * largest.predicted_s / size,
        )

    @cached_property
    def x(self) -> Axis:
        """Sizes, from the smallest that was measured to the largest."""
        low, high = self.places[0].size, self.places[-1].size
        ticks = [(value, f"{value:g}") for value in round_values(low, high, most=8)]
        return Axis(0.0, BOX, low, high, ticks)

    @cached_property
    def bytes_axis(self) -> Axis:
        """Up to the highest peak, or to the budget."""
        budget_bytes = self.plans.budget_bytes
        peaks = [place.peak_bytes for place in self.places] + [step.seen.peak_bytes for step in self.steps]
        plain_bytes = min(max(place.plain_bytes for place in self.places), _HIGHEST * budget_bytes)
        top_bytes = max(*peaks, plain_bytes, budget_bytes if budget_bytes < 2 * max(peaks) else 0) * 1.06
        return Axis(BOX, 0.0, 0.0, top_bytes, byte_ticks(0.0, top_bytes))

    @cached_property
    def seconds_axis(self) -> Axis:
        """Seconds per 1,000, as far as there is something to draw."""
        low_s, high_s = padded(
            [s for place in self.places for s in (place.per_thousand_s, place.largest_per_thousand_s)]
        )
        return Axis(BOX, 0.0, low_s, high_s, second_ticks(low_s, high_s, most=4))

    @property
    def peaks(self) -> list[tuple[str, str]]:
        """Class and shape of each line of bytes."""
        plain = [(place.size, place.plain_bytes) for place in self.places]
        ours = [(place.size, place.peak_bytes) for place in self.places]
        return [
            (name, Line(points).path(self.x, self.bytes_axis))
            for name, points in (("plain", plain), ("best", ours))
        ]

    @property
    def seconds(self) -> list[tuple[str, str]]:
        """Class and shape of each line of seconds."""
        largest = [(place.size, place.largest_per_thousand_s) for place in self.places]
        ours = [(place.size, place.per_thousand_s) for place in self.places]
        return [
            (name, Line(points).path(self.x, self.seconds_axis))
            for name, points in (("plain", largest), ("best", ours))
        ]

    @property
    def marks(self) -> list[tuple[float, float, RealStep]]:
        """Real steps, with their places in per cent from the left and from the bottom."""
        return [
            (self.x.percent(step.size[0]), self.bytes_axis.percent(step.seen.peak_bytes), step)
            for step in self.steps
        ]

    @property
    def budget_percent(self) -> float | None:
        """The budget's height in per cent; ``None`` if it is above the drawing."""
        percent = self.bytes_axis.percent(self.plans.budget_bytes)
        return percent if percent <= 100 else None

    @cached_property
    def _all_strips(self) -> list[Strip]:
        units = self.plans.profiles.largest.units
        by_range = [treatments(one.plan) for _, _, one in self.ranges]
        columns = list(zip(*by_range, strict=True))
        calls = [index for index, unit in enumerate(units) if not unit.is_code]
        found = []
        for kinds, group in groupby(calls, key=lambda index: columns[index]):
            members = list(group)
            name = span_name(units[members[0]].name, units[members[-1]].name)
            found.append(Strip(name, list(self._parts(kinds))))
        return found

    def _parts(self, kinds: Sequence[str]) -> Iterator[tuple[str, str, str, str]]:
        for kind, group in groupby(zip(kinds, self.ranges, strict=True), key=lambda pair: pair[0]):
            members = [pair[1] for pair in group]
            low, high = members[0][0], members[-1][1]
            # Up to where the next range begins, so that no gap is left.
            start, end = self.x.at(low), self.x.at(min(high + 1, self.x.high))
            yield f"{start:.1f}", f"{end - start:.1f}", kind, f"{low} to {high}: {_WORDS[kind]}"

    @property
    def strips(self) -> list[Strip]:
        """The first groups of units, in the order of the step."""
        return self._all_strips[:_MOST_STRIPS]

    @property
    def num_hidden(self) -> int:
        """How many groups are not drawn."""
        return len(self._all_strips) - len(self.strips)

    @property
    def axis_name(self) -> str:
        """What the sizes are."""
        return axes_in_words(self.plans)

    @property
    def plan(self) -> ModelPlan:
        """For the largest batch."""
        return self.plans.plan

    @property
    def description(self) -> str:
        """The picture in words, for screen readers."""
        first, last = self.places[0], self.places[-1]
        return (
            f"Predicted peak by {self.axis_name}: {format_bytes(first.peak_bytes)} at {first.size},"
            f" {format_bytes(last.peak_bytes)} at {last.size}, under {len(self.ranges)} plans. The budget is"
            f" {format_bytes(self.plans.budget_bytes)}."
        )


def make_size_picture(subject: Subject) -> SizePicture | None:
    """The picture for a subject; ``None`` unless there are several sizes along one axis."""
    plans = subject.by_size
    if plans is None or len(plans.profiles.axes) > 1:
        return None
    return SizePicture(plans, real_steps(subject))
