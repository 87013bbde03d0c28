"""Spans as the tests use them: called like `checkpoint`, and nested by numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from recoup.checkpointing import Group, Span


def caller(span: Span) -> Callable[..., Any]:
    """A span as models and functions here take it: like `checkpoint`."""
    return lambda fn, *args, **kwargs: span.call(fn, args, kwargs)


def nested(levels: list[int], num_calls: int = 32) -> tuple[Group, ...]:
    """Groups of ``levels[0]`` calls, in each groups of ``levels[1]`` calls, and so on."""
    return _nested(levels, 0, num_calls - 1)


def _nested(levels: list[int], first: int, last: int) -> tuple[Group, ...]:
    if not levels:
        return ()
    ends = [(begin, min(begin + levels[0] - 1, last)) for begin in range(first, last + 1, levels[0])]
    return tuple(Group(begin, end, _nested(levels[1:], begin, end)) for begin, end in ends)
