"""Runs of equal units, and the order in which their choices are best laid out.

NOTE [ The order within a run ]
    Two neighbours are equal if they have the same choices, and if from one to the next the forward needs of
    all choices grow by the same step, and the backward needs by another (outputs pile up, parameter
    gradients are not there yet). Let *a* and *b* be the choices of two neighbours, h their held bytes, n
    their needs in the first position and d the step. Beside what is held before them,

        the order a, b reaches  max(n_a, h_a + n_b + d),      the order b, a  max(n_b, h_b + n_a + d),

    and what comes before or after does not see the order. So *a* may go first if its maximum is no higher in
    the forward and no higher in the backward. If one order of all choices has that for every pair, then
    exchanging neighbours sorts any run into it and never raises a peak: how many units take each choice is
    all that matters. Where no order serves both passes, units stay single.

    In a pass with h + d >= 0 the rule is: the largest overshoot n - h first. Holding less usually means
    overshooting more (what is not held is made again), so as a rule those that recompute come first and
    those that keep come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

from recoup.planning.solvers.select.levels import Choice, Levels

__all__ = ["EqualRun", "arrange", "find_runs"]


@dataclass(frozen=True, slots=True)
class EqualRun:
    """Neighbouring equal units.

    Attributes:
        first: its first unit.
        num_units: how many there are.
        order: positions of the choices, best first; empty for a single unit.
        forward_step_bytes: how much the forward needs grow from unit to unit.
        backward_step_bytes: the same for the backward needs.
    """

    first: int
    num_units: int
    order: tuple[int, ...] = field(default=(), kw_only=True)
    forward_step_bytes: int = field(default=0, kw_only=True)
    backward_step_bytes: int = field(default=0, kw_only=True)


def find_runs(levels: Levels) -> list[EqualRun]:
    """Cuts the units into runs, as long as possible; a unit without an equal neighbour is a run alone.

    >>> from recoup.planning.problem import Problem, Unit
    >>> units = [
    ...     Unit.keep_or_recompute(f"b{i}", forward_s=1, backward_s=2, held_bytes=9, output_bytes=1)
    ...     for i in range(5)
    ... ]
    >>> run = max(find_runs(Levels(Problem(units))), key=lambda run: run.num_units)
    >>> run.num_units, [units[0].options[position].name for position in run.order]
    (4, ['recompute', 'keep'])
    """
    runs: list[EqualRun] = []
    first = 0
    while first < levels.num_units:
        steps = _steps(levels, first)
        end = first + 1
        while steps is not None and end < levels.num_units and _steps(levels, end - 1) == steps:
            end += 1
        order = _order(levels.choices[first], steps) if steps and end > first + 1 else None
        if steps is None or order is None:
            # One unit at a time, so that a run with an order may begin at any of them.
            runs.append(EqualRun(first, 1))
            first += 1
            continue
        forward_bytes, backward_bytes = steps
        runs.append(
            EqualRun(
                first,
                end - first,
                order=order,
                forward_step_bytes=forward_bytes,
                backward_step_bytes=backward_bytes,
            )
        )
        first = end
    return runs


def arrange(levels: Levels, runs: Sequence[EqualRun], selection: Sequence[int]) -> list[int]:
    """The same choices in the best order within each run: never a higher peak, and easier to read."""
    arranged = list(selection)
    for run in runs:
        if run.order:
            span = slice(run.first, run.first + run.num_units)
            arranged[span] = sorted(arranged[span], key=run.order.index)
    return arranged


def _steps(levels: Levels, unit: int) -> tuple[int, int] | None:
    """The steps of forward and backward needs from a unit to the next, or ``None`` if they are not equal."""
    if unit + 1 >= levels.num_units:
        return None
    ones, others = levels.choices[unit], levels.choices[unit + 1]
    if len(ones) != len(others):
        return None
    steps = set()
    for one, other in zip(ones, others, strict=True):
        if (one.option, one.run, one.held_bytes, one.seconds) != (
            other.option,
            other.run,
            other.held_bytes,
            other.seconds,
        ):
            return None
        steps.add(
            (
                other.forward_need_bytes - one.forward_need_bytes,
                other.backward_need_bytes - one.backward_need_bytes,
            )
        )
    return steps.pop() if len(steps) == 1 else None


def _order(choices: list[Choice], steps: tuple[int, int]) -> tuple[int, ...] | None:
    """The order of NOTE [ The order within a run ], or ``None`` if no order serves both passes."""

    def may_precede(a: Choice, b: Choice) -> bool:
        needs = (
            (a.forward_need_bytes, b.forward_need_bytes, steps[0]),
            (a.backward_need_bytes, b.backward_need_bytes, steps[1]),
        )
        return all(
            max(n_a, a.held_bytes + n_b + step) <= max(n_b, b.held_bytes + n_a + step)
            for n_a, n_b, step in needs
        )

    wins = [sum(may_precede(a, b) for b in choices) for a in choices]
    order = sorted(range(len(choices)), key=lambda k: (-wins[k], choices[k].held_bytes, k))
    if all(may_precede(choices[a], choices[b]) for a, b in combinations(order, 2)):
        return tuple(order)
    return None
