"""Modules that are imported when they are first used: HiGHS and SciPy take half a second between them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from recoup.errors import PlanningError

__all__ = ["LazyModule"]


class LazyModule:
    """Stands for a module until something of it is needed.

    >>> LazyModule("math").isqrt(17)
    4
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        try:
            module = import_module(self._name)
        except ImportError as error:
            package = self._name.partition(".")[0]
            raise PlanningError(
                f"This solver needs {package}, which cannot be imported ({error}). Install it: pip install {package}"
            ) from error
        return getattr(module, attribute)
