"""From the chain solver's table to a schedule: follow the rows, decision by decision."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from recoup.planning.actions import Action, Backward, Forward, Keep
from recoup.planning.schedule import Schedule
from recoup.planning.solvers.chain.costs import ChainCosts, OptionCosts
from recoup.planning.solvers.chain.table import ChainTable

__all__ = ["as_schedule", "keep_everything", "read_schedule", "sweep"]

_EDGE = -1


class _Part(NamedTuple):
    """A part of the chain that is yet to be scheduled, at a level or at its edge."""

    first: int
    last: int
    level: int
    is_held: bool


class _Decision(NamedTuple):
    """How a part starts: an option of its first unit (``cut`` is 0), or a sweep up to ``cut``."""

    seconds: float
    option: int
    cut: int


def sweep(first: int, cut: int) -> list[Action]:
    """Forwards of ``first`` … ``cut - 1`` that keep only the input of ``first``.

    >>> from recoup.planning.schedule import trace
    >>> trace(sweep(0, 2)), trace(sweep(2, 5))
    ('F0 F1', 'F2i F3 F4')
    """
    head = Forward(first, keep=Keep.INPUT) if first else Forward(first)
    return [head, *(Forward(unit) for unit in range(first + 1, cut))]


def as_schedule(costs: ChainCosts, actions: Iterable[Action]) -> Schedule:
    """Actions without those of the end: see NOTE [ The end ] in ``costs``."""
    return Schedule(action for action in actions if action.unit < costs.num_units - 1)


def keep_everything(costs: ChainCosts, first: int, last: int, *, is_held: bool) -> list[Action]:
    """Forwards and backwards of a part, all under the units' fastest options."""
    chosen: list[OptionCosts] = []
    for unit in range(first, last + 1):
        options = costs.options(last, is_held=is_held)
        chosen.append((options.closing if unit == last else options.fastest)[unit])
        is_held = chosen[-1].holds_output
    actions: list[Action] = []
    for unit, option in enumerate(chosen, start=first):
        if not (unit == last and option.is_direct):
            actions.append(option.forward(unit))
    backwards = [Backward(unit, option=option.index) for unit, option in enumerate(chosen, start=first)]
    return actions + backwards[::-1]


def read_schedule(table: ChainTable, num_bytes: int) -> Schedule:
    """The schedule behind the whole chain's row at ``num_bytes`` (beyond resident bytes and input)."""
    last = table.costs.num_units - 1
    actions: list[Action] = []
    # A stack, not recursion: parts nest as deep as the chain is long.
    todo: list[_Part | Action] = [_part_with(table, 0, last, num_bytes, is_held=True)]
    while todo:
        item = todo.pop()
        if not isinstance(item, _Part):
            actions.append(item)
            continue
        first, last, level, is_held = item
        if level != _EDGE and level >= table.saturation(first, last, is_held=is_held):
            actions += keep_everything(table.costs, first, last, is_held=is_held)
        else:
            todo += reversed(_expand(table, item))
    return as_schedule(table.costs, actions)


def _part_with(table: ChainTable, first: int, last: int, num_bytes: int, *, is_held: bool) -> _Part:
    """A part at the level that exact bytes stand for, or at the edge where that is better."""
    level = min(num_bytes // table.level_bytes, table.num_levels)
    is_level = table.rows[is_held][first][last - first, level] <= table.edges[is_held][first][last - first]
    return _Part(first, last, level if is_level else _EDGE, is_held)


def _expand(table: ChainTable, part: _Part) -> list[_Part | Action]:
    """One decision: the actions and smaller parts that a part consists of."""
    first, last, level, is_held = part
    is_edge = level == _EDGE
    decision = _decide(table, part)
    if not is_edge and table.edges[is_held][first][last - first] < decision.seconds:
        return [part._replace(level=_EDGE)]
    num_bytes = int(table.floors.least[is_held][first][last - first])
    if decision.cut:
        cut = decision.cut
        if is_edge:
            right_bytes = num_bytes - int(table.costs.output_bytes[cut - 1])
            right = _part_with(table, cut, last, right_bytes, is_held=False)
            left = _part_with(table, first, cut - 1, num_bytes, is_held=True)
        else:
            right = _Part(cut, last, level - int(table.input_levels[cut]), False)
            left = _Part(first, cut - 1, level, True)
        return [*sweep(first, cut), right, left]
    option = table.costs.options(last, is_held=is_held).of[first][decision.option]
    backward = Backward(first, option=option.index)
    if first == last and option.is_direct:
        return [backward]
    forward = option.forward(first)
    if first == last:
        return [forward, backward]
    if is_edge:
        rest_bytes = num_bytes - option.kept_bytes
        rest = _part_with(table, first + 1, last, rest_bytes, is_held=option.holds_output)
    else:
        rest_level = min(level - table.level(option.kept_bytes), table.num_levels)
        rest = _Part(first + 1, last, rest_level, option.holds_output)
    return [forward, rest, backward]


def _decide(table: ChainTable, part: _Part) -> _Decision:
    """The decision behind a part's seconds; of equal ones an option goes before a cut."""
    first, last, level, is_held = part
    swept, cuts = table.costs.sweep_needs(first), np.empty(0)
    if level == _EDGE:
        num_bytes = int(table.floors.least[is_held][first][last - first])
        options = table.option_seconds(first, last, num_bytes, is_held=is_held)
        if first < last:
            cuts = table.cut_seconds(first, last, num_bytes, swept)
    else:
        own = table.costs.options(last, is_held=is_held).of[first]
        rows = [table.option_row(first, last, option, level, level + 1)[1] for option in own]
        options = [float(row[0]) if row.size else float("inf") for row in rows]
        if first < last:
            cuts = table.cut_rows(first, last, level, level + 1, swept)[:, 0] - table.costs.start_s[first]
    best = _Decision(min(options), options.index(min(options)), 0)
    if cuts.size and cuts.min() < best.seconds:
        best = _Decision(float(cuts.min()), 0, first + 1 + int(cuts.argmin()))
    return best
