"""From arguments to an exit code: 0 if all went well, 1 where something does not fit, 2 for bad input."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from recoup.cli.parser import parse
from recoup.errors import (
    CommandError,
    EncodingError,
    HardwareError,
    LossError,
    RecoupError,
    RecoupWarning,
    SampleError,
    SizeError,
    UnitError,
)

__all__ = ["main"]

_NOT_DONE, _BAD_INPUT = 1, 2
_INTERRUPTED = 130  # what shells report for a process that Ctrl-C ended
# Errors in what the command line names: a factory, what it returns, a file, a GPU, units, a size.
_INPUT_ERRORS = (CommandError, EncodingError, HardwareError, LossError, SampleError, SizeError, UnitError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: what follows ``recoup`` on the command line; the process's own unless given.

    Returns:
        The exit code.

    Raises:
        SystemExit: with 2 for a wrong command line, with 0 after ``--help`` and ``--version``.
    """
    options = parse(arguments)
    # Only now: the commands import torch.
    commands = import_module("recoup.cli.commands")
    try:
        with _warnings_in_one_line(options.quiet):
            getattr(commands, options.command)(options)
        sys.stdout.flush()
    except RecoupError as error:
        code = _BAD_INPUT if isinstance(error, _INPUT_ERRORS) else _NOT_DONE
        return _fail(str(error), options.debug, code=code)
    except BrokenPipeError:
        # The reader of our output has closed the pipe; without this the interpreter reports that again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NOT_DONE
    except OSError as error:
        return _fail(str(error), options.debug, code=_BAD_INPUT)
    except KeyboardInterrupt:
        return _fail("interrupted", options.debug, code=_INTERRUPTED)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":
            raise
        return _fail(f"out of memory: {error}", options.debug)
    return 0


@contextmanager
def _warnings_in_one_line(quiet: bool) -> Iterator[None]:
    """Shows our own warnings as errors are shown, without the line of code that they come from."""
    show_others = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        *rest: Any,
        **options: Any,
    ) -> None:
        if not issubclass(category, RecoupWarning):
            show_others(message, category, filename, lineno, *rest, **options)
        elif not quiet:
            print("recoup: warning:", *str(message).split(), file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _fail(text: str, debug: bool, *, code: int = _NOT_DONE) -> int:
    if debug:
        traceback.print_exc()
    print("recoup:", *text.split(), file=sys.stderr)
    return code
