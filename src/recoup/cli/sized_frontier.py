"""``recoup frontier --sizes``: what a step costs by budget and by the size of its batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recoup import engines
from recoup.engines import ModelPlan
from recoup.measuring import Profile
from recoup.sizes import format_bytes, parse_bytes

__all__ = ["SizedFrontier", "sized_frontier"]

_PER = 1000


class SizedFrontier:
    """The fastest plan for each budget and size.

    Attributes:
        profiles: of each size.
        budgets: in bytes, the smallest first.
        plans: for each size, in the order of the budgets; ``None`` where nothing fits.
    """

    def __init__(
        self,
        profiles: Mapping[int, Profile],
        budgets: Sequence[int],
        points: Mapping[int, Sequence[ModelPlan]],
    ) -> None:
        self.profiles, self.budgets = dict(sorted(profiles.items())), sorted(set(budgets))
        self.plans = {
            size: [_best(points[size], budget_bytes) for budget_bytes in self.budgets]
            for size in self.profiles
        }

    @property
    def figures(self) -> list[dict[str, Any]]:
        """For JSON."""
        found = []
        for size, plans in self.plans.items():
            plain = self.profiles[size].plain
            points = [
                {
                    "budget_bytes": budget_bytes,
                    "seconds": plan and plan.predicted_s,
                    "overhead": plan and plan.predicted_s / plain.seconds - 1,
                }
                for budget_bytes, plan in zip(self.budgets, plans, strict=True)
            ]
            plain_figures = {"peak_bytes": self.profiles[size].plain_bytes, "seconds": plain.seconds}
            found.append({"size": size, "plain": plain_figures, "points": points})
        return found

    def __str__(self) -> str:
        lines = ["Seconds per 1,000 of the batch's size, by budget and size:"]
        lines.append("".join(f"{text:>14}" for text in ("budget", *self.plans)))
        for index, budget_bytes in enumerate(self.budgets):
            cells = [_cell(size, plans[index]) for size, plans in self.plans.items()]
            lines.append("".join(f"{text:>14}" for text in (format_bytes(budget_bytes), *cells)))
        return "\n".join(lines)


def sized_frontier(
    profiles: Mapping[int, Profile], *, num_points: int, budgets: Sequence[str] | None
) -> SizedFrontier:
    """Plans every size for the same budgets.

    Args:
        profiles: by size.
        num_points: how many budgets, evenly spread from the smallest that fits any size to the largest plain peak.
        budgets: to look at instead.

    Raises:
        BudgetError: nothing fits, at any size.
    """
    if budgets is None:
        low = min(map(engines.minimum_budget, profiles.values()))
        high = max(profile.plain_bytes for profile in profiles.values())
        steps = max(1, num_points - 1)
        wanted = [low + (high - low) * step // steps for step in range(num_points)]
    else:
        wanted = [parse_bytes(budget) for budget in budgets]
    points = {size: engines.frontier(profile, budgets=wanted) for size, profile in profiles.items()}
    found = SizedFrontier(profiles, wanted, points)
    if all(plan is None for plans in found.plans.values() for plan in plans):
        engines.plan(profiles[min(profiles)], max(wanted))  # the error names the smallest feasible budget
    return found


def _cell(size: int, plan: ModelPlan | None) -> str:
    return "nothing fits" if plan is None else f"{_PER * plan.predicted_s / size:.4g}"


def _best(points: Sequence[ModelPlan], budget_bytes: int) -> ModelPlan | None:
    fitting = [point for point in points if point.budget_bytes <= budget_bytes]
    return min(fitting, key=lambda point: point.predicted_s, default=None)
