"""The command line: parses, calls the public functions, prints."""

from recoup.cli.main import main

__all__ = ["main"]
