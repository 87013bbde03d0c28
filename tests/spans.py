"""Spans as the tests use them: called like `checkpoint`, and nested by numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models

from recoup import Checkpoint
from recoup.checkpointing import Span

_DEFAULT = Checkpoint()


def caller(span: Span) -> Callable[..., Any]:
    """A span as models and functions here take it: like `checkpoint`."""
    return lambda fn, *args, **kwargs: span.call(fn, args, kwargs)


def nested(levels: list[int], options: Checkpoint = _DEFAULT) -> Callable[[], Callable[..., Any]]:
    """A ``begin`` that opens a span every ``levels[0]`` calls, in it one every ``levels[1]`` calls, and so on."""

    if not levels:
        return lambda: models.plainly

    def begin() -> Callable[..., Any]:
        num_calls, span = 0, None

        def through(fn: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal num_calls, span
            if num_calls % levels[0] == 0:
                span = Span(options, nested(levels[1:], options))
            num_calls += 1
            return span.call(fn, args, kwargs)

        return through

    return begin
