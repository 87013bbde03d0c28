"""The picture of the frontier: the best seconds for every budget, this plan, and what people do by hand."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from recoup.plans.model_plan import ModelPlan, frontier
from recoup.plans.profile import Profile
from recoup.report.by_hand import ByHand, recipes_by_hand
from recoup.report.chart import BOX, Axis, Curve, padded
from recoup.report.numbers import byte_ticks, format_seconds, format_share, share_ticks
from recoup.sizes import format_bytes

__all__ = ["Mark", "TradeoffPicture", "make_tradeoff", "plans_beside"]

_MANY_UNITS = 200
_FEW_BUDGETS = 6


@dataclass(frozen=True, slots=True)
class Mark:
    """A point with its place in per cent from the left and from the bottom, and what it says."""

    letter: str
    name: str
    peak_bytes: int
    seconds: float
    left: float
    bottom: float
    fits: bool
    slower: str

    @property
    def tip(self) -> str:
        """The point in a line."""
        return f"{self.name}: {format_bytes(self.peak_bytes)}, {format_seconds(self.seconds)} ({self.slower})"


@dataclass(frozen=True)
class TradeoffPicture:
    """The frontier, ready to draw."""

    plan: ModelPlan
    plans: tuple[ModelPlan, ...]
    by_hand: list[ByHand]

    @cached_property
    def plain_s(self) -> float:
        """Seconds of the plain step."""
        return self.plan.profile.plain.seconds or 1.0

    @cached_property
    def shown(self) -> list[ModelPlan]:
        """The plans that are drawn, without those that are far slower than all recipes: the rest would be flat."""
        known = [self.plan.predicted_s, *(recipe.seconds for recipe in self.by_hand)]
        most_s = self.plain_s + max(2.0 * (max(known) - self.plain_s), 0.25 * self.plain_s)
        return [plan for plan in self.plans if plan.predicted_s <= most_s]

    @property
    def hidden(self) -> tuple[ModelPlan, ...]:
        """The plans that are not drawn."""
        return self.plans[: len(self.plans) - len(self.shown)]

    @cached_property
    def axes(self) -> tuple[Axis, Axis]:
        """Bytes and seconds, as far as there is something to draw; seconds have ticks at shares of the plain step."""
        ours = [*self.shown, self.plan]
        sizes = [plan.predicted_bytes for plan in ours] + [recipe.peak_bytes for recipe in self.by_hand]
        times = [plan.predicted_s for plan in ours] + [recipe.seconds for recipe in self.by_hand]
        if self.plan.budget_bytes < 1.3 * max(sizes):
            sizes.append(self.plan.budget_bytes)
        (least, most), (fastest_s, slowest_s) = padded(sizes), padded(times)
        shares = share_ticks(fastest_s / self.plain_s - 1, slowest_s / self.plain_s - 1)
        return (
            Axis(0.0, BOX, least, most, byte_ticks(least, most, most=6)),
            Axis(
                BOX, 0.0, fastest_s, slowest_s, [((1 + share) * self.plain_s, text) for share, text in shares]
            ),
        )

    @property
    def line(self) -> str:
        """The frontier: between two plans, the one with fewer bytes is the one to use.

        It begins at the lightest plan, or at the upper edge where lighter plans are beyond the drawing.
        """
        if not self.shown:
            return ""
        x, y = self.axes
        points = [(plan.predicted_bytes, plan.predicted_s) for plan in self.shown]
        return Curve(points, x.high).path(x, y, begin=y.high if self.hidden else None)

    @property
    def beyond(self) -> Mark | None:
        """Where the frontier leaves the drawing, and the lightest plan there; ``None`` if it does not."""
        if not self.hidden or not self.shown:
            return None
        lightest = self.hidden[0]
        name = "lightest plan, beyond the plot"
        mark = self._mark("▲", name, lightest.predicted_bytes, lightest.predicted_s)
        return replace(mark, left=self.axes[0].percent(self.shown[0].predicted_bytes), bottom=100.0)

    @property
    def points(self) -> list[Mark]:
        """The plans on the frontier."""
        return [self._mark("", "best plan", plan.predicted_bytes, plan.predicted_s) for plan in self.shown]

    @property
    def chosen(self) -> Mark:
        """This plan."""
        return self._mark("", "this plan", self.plan.predicted_bytes, self.plan.predicted_s)

    @property
    def recipes(self) -> list[Mark]:
        """What people do by hand, lettered."""
        pairs = zip(string.ascii_uppercase, self.by_hand, strict=False)
        return [self._mark(letter, one.name, one.peak_bytes, one.seconds) for letter, one in pairs]

    def _mark(self, letter: str, name: str, peak_bytes: int, seconds: float) -> Mark:
        (x, y), overhead = self.axes, seconds / self.plain_s - 1
        return Mark(
            letter,
            name,
            peak_bytes,
            seconds,
            left=x.percent(peak_bytes),
            bottom=y.percent(seconds),
            fits=peak_bytes <= self.plan.budget_bytes,
            slower=f"{'+' * (overhead >= 0.0005)}{format_share(overhead)}",
        )

    @property
    def budget_percent(self) -> float | None:
        """The budget's place from the left; ``None`` if it is outside."""
        percent = self.axes[0].percent(self.plan.budget_bytes)
        return percent if 0 <= percent <= 100 else None

    @property
    def description(self) -> str:
        """The picture in words, for screen readers."""
        if not self.plans:
            return "The frontier has no points."
        lightest, fastest = self.plans[0], self.plans[-1]
        return (
            f"The frontier runs from {format_bytes(lightest.predicted_bytes)} at"
            f" {format_seconds(lightest.predicted_s)} to {format_bytes(fastest.predicted_bytes)} at"
            f" {format_seconds(fastest.predicted_s)}. {self.chosen.tip}."
        )


def make_tradeoff(plan: ModelPlan) -> TradeoffPicture:
    """Plans for the whole range of budgets, which takes several seconds for a thousand units."""
    profile = plan.profile
    recipes = recipes_by_hand(profile)
    return TradeoffPicture(plan, plans_beside(profile, recipes), recipes)


def plans_beside(profile: Profile, recipes: Sequence[ByHand]) -> tuple[ModelPlan, ...]:
    """The frontier, with plans at the recipes' own peaks: without those, a recipe could look better than it."""
    peaks = [recipe.peak_bytes for recipe in recipes]
    if len(profile.units) <= _MANY_UNITS:
        found = [*frontier(profile), *frontier(profile, budgets=peaks)]
    else:
        # Preparing the solvers takes longest: only once.
        low, high = min(peaks), max(peaks)
        between = [low + (high - low) * index // _FEW_BUDGETS for index in range(1, _FEW_BUDGETS)]
        found = [*frontier(profile, budgets=[*peaks, *between])]
    best: list[ModelPlan] = []
    for plan in sorted(found, key=lambda plan: (plan.predicted_bytes, plan.predicted_s)):
        if not best or plan.predicted_s < best[-1].predicted_s:
            best.append(plan)
    return tuple(best)
