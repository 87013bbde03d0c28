"""How far long work has come: a bar on a terminal, silence everywhere else.

Work says where it stands with `note`; who wants to know listens with `listening`, or shows a bar with `showing`.
Nothing is shown unless it is asked for, and rich, which draws the bar, is optional.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import TypeAlias

__all__ = ["Listener", "listening", "note", "showing"]

Listener: TypeAlias = Callable[[str, int, int], None]
"""Called with what is being done, how many of its parts are done, and how many there are."""

_listener: ContextVar[Listener | None] = ContextVar("recoup_progress", default=None)


def note(what: str, done: int, total: int) -> None:
    """Says that ``done`` of ``total`` parts of some work are done; free of cost where nobody listens.

    >>> with listening(print):
    ...     note("measuring", 1, 4)
    measuring 1 4
    >>> note("measuring", 2, 4)
    """
    listener = _listener.get()
    if listener is not None:
        listener(what, done, total)


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Calls ``listener`` for every `note` inside a ``with`` block, in this thread or task; ``None`` for nobody."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def showing(enabled: bool = True) -> Iterator[None]:
    """Shows a bar on standard error while a ``with`` block works, if that is a terminal and rich is installed.

    The bar is drawn when work says something, not by a thread: that would disturb the seconds that are measured.

    >>> with showing():
    ...     note("measuring", 1, 4)
    """
    if not enabled or not sys.stderr.isatty() or find_spec("rich") is None:
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bars:
        task = bars.add_task("starting", total=None)

        def show(what: str, done: int, total: int) -> None:
            bars.update(task, description=what, completed=done, total=total, refresh=True)

        with listening(show):
            yield
