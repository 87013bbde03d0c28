"""A lower bound on the seconds of any schedule under a budget, by relaxation.

Look at the moment when the backward starts. Every unit either holds the results of an option there, or holds
nothing and will have to run its forward again (or to run an option that needs only its input). Its output is
there, or will have to be made again for the next unit's backward; a unit that runs once must have both there,
its output and what an option holds. All that is there must fit. Who holds what
is then a multiple-choice knapsack, and its linear relaxation is solved by sorting (Sinha and Zoltners, The
multiple-choice knapsack problem, 1979). Every legal schedule satisfies the relaxation, whatever it drops,
replays or moves: bytes that may leave over a link count as none, and inputs that an option may free as free.
"""

from __future__ import annotations

import math
from itertools import pairwise

from recoup.planning.additive_numbers import additive
from recoup.planning.problem import Option, Problem, Unit
from recoup.planning.solvers.base import ALL_SCHEDULES, Bound

__all__ = ["Relaxation", "relaxed_bound"]


def relaxed_bound(problem: Problem, budget_bytes: int) -> Bound:
    """The bound that holds for every schedule, nested, moved or otherwise.

    >>> unit = Unit.keep_or_recompute("a", forward_s=1, backward_s=2, held_bytes=100, output_bytes=0)
    >>> [relaxed_bound(Problem([unit]), budget_bytes).seconds for budget_bytes in (0, 50, 100)]
    [4.0, 3.5, 3.0]
    """
    return Relaxation(problem).bound(budget_bytes)


class Relaxation:
    """The knapsack of a problem, for any number of budgets."""

    def __init__(self, problem: Problem) -> None:
        problem = additive(problem, is_bound=True)
        last = problem.units[-1]
        self._least_bytes = problem.resident_bytes + problem.input_bytes + last.gradient_bytes
        self._least_bytes -= sum(
            max(option.freed_input_bytes for option in unit.options) for unit in problem.units
        )
        self._most_s: list[float] = []
        steps: list[tuple[float, int]] = []
        for unit in problem.units:
            hull = _hull(_choices(unit, is_last=unit is last))
            self._least_bytes += hull[0][0]
            self._most_s.append(hull[0][1])
            for (bytes_a, seconds_a), (bytes_b, seconds_b) in pairwise(hull):
                steps.append(((seconds_a - seconds_b) / (bytes_b - bytes_a), bytes_b - bytes_a))
        self._steps = sorted(steps, reverse=True)

    def bound(self, budget_bytes: int) -> Bound:
        """The bound for a budget."""
        room, seconds = budget_bytes - self._least_bytes, list(self._most_s)
        for rate, num_bytes in self._steps:
            taken = min(max(room, 0), num_bytes)
            seconds.append(-rate * taken)
            room -= taken
        return Bound(math.fsum(seconds), schedules=ALL_SCHEDULES)


def _choices(unit: Unit, *, is_last: bool) -> list[tuple[int, float]]:
    """Bytes at the start of the backward, and the least seconds that go with them."""
    forward_s = min(option.forward_s for option in unit.options)
    total_s = min(option.total_s for option in unit.options)
    direct = [option.extra_s + option.backward_s for option in unit.options if not option.needs_forward]
    # The last output is not read again; another one may be elsewhere.
    output_bytes = 0 if is_last or unit.output_links else unit.output_bytes
    output_s = 0.0 if is_last else forward_s
    if unit.runs_once:
        return [(_held_bytes(option) + output_bytes, option.total_s) for option in unit.options]
    choices = [
        (output_bytes, forward_s + min([total_s, *direct])),
        (0, forward_s + min([total_s, *(seconds + output_s for seconds in direct)])),
    ]
    for option in unit.options:
        held_bytes = _held_bytes(option)
        choices += [(held_bytes + output_bytes, option.total_s), (held_bytes, option.total_s + output_s)]
    return choices


def _held_bytes(option: Option) -> int:
    """What an option holds that cannot leave over a link."""
    return 0 if option.held_links else option.held_bytes


def _hull(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The lower convex hull of bytes against seconds, from the fewest bytes to the fewest seconds."""
    hull: list[tuple[int, float]] = []
    for num_bytes, seconds in sorted(points):
        if hull and (num_bytes == hull[-1][0] or seconds >= hull[-1][1]):
            continue
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], (num_bytes, seconds)):
            hull.pop()
        hull.append((num_bytes, seconds))
    return hull


def _is_above(left: tuple[int, float], middle: tuple[int, float], right: tuple[int, float]) -> bool:
    """Whether ``middle`` is not below the line from ``left`` to ``right``."""
    share = (middle[0] - left[0]) / (right[0] - left[0])
    return middle[1] >= left[1] + share * (right[1] - left[1])
