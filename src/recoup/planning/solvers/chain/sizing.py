"""How fine the chain solver works: by fixed estimates, never by the clock, so that plans are reproducible."""

from __future__ import annotations

__all__ = ["choose_levels", "is_affordable"]

_MAX_LEVELS = 4000
_MIN_LEVELS = 400
# What the rows of one table may take.
_TABLE_BYTES = 96 * 2**20
# Measured on two cores: a part's overhead, and one sum and minimum of one cut at one level.
_PART_S = 45e-6
_CUT_S = 1.3e-9
# A plan may need four tables: two to find schedules, one to prove a bound, one at the edge of feasibility.
_NUM_TABLES = 4


def is_affordable(num_units: int, *, num_levels: int = _MIN_LEVELS, time_limit_s: float) -> bool:
    """Whether tables for all parts of a chain fit into a time limit.

    >>> is_affordable(200, time_limit_s=10.0), is_affordable(300, time_limit_s=10.0)
    (True, False)
    """
    table_s = _PART_S * num_units**2 / 2 + _CUT_S * num_levels * num_units**3 / 6
    return _NUM_TABLES * table_s <= time_limit_s


def choose_levels(num_units: int, *, time_limit_s: float) -> int:
    """As many levels as a share of the time limit and the memory for one table allow.

    >>> choose_levels(10, time_limit_s=10.0), choose_levels(100, time_limit_s=10.0)
    (4000, 1258)
    """
    # A row and its shifted copy, eight bytes a level, for half of all pairs of units.
    num_levels = min(_MAX_LEVELS, max(_MIN_LEVELS, _TABLE_BYTES // (8 * num_units**2)))
    while num_levels > _MIN_LEVELS and not is_affordable(
        num_units, num_levels=num_levels, time_limit_s=time_limit_s
    ):
        num_levels = max(_MIN_LEVELS, num_levels * 4 // 5)
    return num_levels
