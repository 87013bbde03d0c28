"""How fine the chain solver works: by fixed estimates, never by the clock, so that plans are reproducible."""

from __future__ import annotations

from recoup.planning.solvers.chain.runs import Run

__all__ = ["choose_levels", "choose_run_levels", "estimate_s", "is_affordable"]

_MAX_LEVELS = 4000
_MIN_LEVELS = 400
# What the rows of one table may take.
_TABLE_BYTES = 96 * 2**20
# Measured on two cores: a part's overhead, and one sum and minimum of one cut at one level.
_PART_S = 45e-6
_CUT_S = 1.3e-9
# A plan may need four tables: two to find schedules, one to prove a bound, one at the edge of feasibility.
_NUM_TABLES = 4
# Those of one unit, a run and one unit. Where fewer can be run, finer levels gain less than they cost.
_USUAL_KINDS = 3


def estimate_s(num_units: int, *, num_levels: int) -> float:
    """Seconds to fill one table of unequal units, roughly.

    >>> 0.2 < estimate_s(100, num_levels=500) < 0.5
    True
    """
    return _PART_S * num_units**2 / 2 + _CUT_S * num_levels * num_units**3 / 6


def is_affordable(num_units: int, *, time_limit_s: float) -> bool:
    """Whether tables for all parts of a chain of unequal units fit into a time limit."""
    return _NUM_TABLES * estimate_s(num_units, num_levels=_MIN_LEVELS) <= time_limit_s


def choose_levels(num_units: int, *, time_limit_s: float) -> int:
    """As many levels as a share of the time limit and the memory for one table allow.

    >>> choose_levels(10, time_limit_s=10.0), choose_levels(100, time_limit_s=10.0)
    (4000, 1258)
    """
    # A row and its shifted copy, eight bytes a level, for half of all pairs of units.
    num_levels = min(_MAX_LEVELS, max(_MIN_LEVELS, _TABLE_BYTES // (8 * num_units**2)))
    while (
        num_levels > _MIN_LEVELS and _NUM_TABLES * estimate_s(num_units, num_levels=num_levels) > time_limit_s
    ):
        num_levels = max(_MIN_LEVELS, num_levels * 4 // 5)
    return num_levels


def choose_run_levels(run: Run, *, num_kinds: int, time_limit_s: float) -> int:
    """The same for a chain with a long run of equal units; 0 if no useful number of levels is affordable."""
    level_s = _CUT_S * max(num_kinds, _USUAL_KINDS) * run.length**2 / 2
    num_levels = min(_MAX_LEVELS, int(time_limit_s / (_NUM_TABLES + 2) / level_s))
    return num_levels if num_levels >= _MIN_LEVELS else 0
