"""What is said where a library is not installed."""

from __future__ import annotations

__all__ = ["not_installed"]


def not_installed(library: str) -> ImportError:
    """The error for a missing library, with the command that installs it.

    >>> str(not_installed("lightning"))
    "recoup.integrations.lightning needs lightning: pip install 'recoup[lightning]'"
    """
    return ImportError(f"recoup.integrations.{library} needs {library}: pip install 'recoup[{library}]'")
