"""What cuts joint graphs for generated code. Importing it imports the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from recoup.torch_private import partitioner_base

__all__ = ["Partitioner"]

_VERSION = 3
"""To be counted up whenever the same cut makes other graphs: caches on disk outlive the code."""


class Partitioner(partitioner_base()):  # type: ignore[misc]
    """Cuts joint graphs; caches know it by what it saves."""

    def __init__(self, partition: Callable[..., Any], saves: tuple[str, ...] | None) -> None:
        self.partition, self.saves = partition, saves

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward and the backward of a joint graph."""
        return self.partition(*args, **kwargs)

    def uuid(self) -> str:
        """What caches know it by."""
        return f"recoup {_VERSION} {self.saves}"

    def __reduce__(self) -> Any:
        return str, (self.uuid(),)
