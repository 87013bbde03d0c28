"""From arguments to an exit code: 0 if all went well, 1 for an error of ours, 2 for a wrong command line."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from recoup.cli.parser import parse
from recoup.errors import RecoupError

__all__ = ["main"]

_INTERRUPTED = 130  # what shells report for a process that Ctrl-C ended


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
        getattr(commands, options.command)(options)
        sys.stdout.flush()
    except RecoupError as error:
        return _fail(str(error), options.debug)
    except BrokenPipeError:
        # Whoever read our output has seen enough; the interpreter must not complain about it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(str(error), options.debug)
    except KeyboardInterrupt:
        return _fail("interrupted", options.debug, code=_INTERRUPTED)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":
            raise
        return _fail(f"out of memory: {error}", options.debug)
    return 0


def _fail(text: str, debug: bool, *, code: int = 1) -> int:
    if debug:
        traceback.print_exc()
    print("recoup:", *text.split(), file=sys.stderr)
    return code
