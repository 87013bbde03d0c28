"""Processes that fit one model together: they exchange values, decisions and errors."""

from recoup.ranks.group import ALONE, SAME_STEP, Ranks, find_ranks

__all__ = ["ALONE", "SAME_STEP", "Ranks", "find_ranks"]
