"""Which calls of a span are checkpointed again within its replay."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from recoup.errors import CheckpointError

__all__ = ["Group", "check_groups"]


@dataclass(frozen=True, slots=True)
class Group:
    """Calls ``first`` to ``last`` of a span, numbered from 0, and the groups inside them.

    >>> 2 in Group(1, 3)
    True
    """

    first: int
    last: int
    groups: tuple[Group, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last:
            raise CheckpointError(
                f"A group has calls from first to last, numbered from 0; got {self.first} to {self.last}."
            )
        check_groups(self.groups)
        if self.groups and (self.groups[0].first < self.first or self.groups[-1].last > self.last):
            raise CheckpointError(
                f"Groups inside calls {self.first} to {self.last} have calls outside of these."
            )

    def __contains__(self, call: int) -> bool:
        """Whether a call is one of the group's."""
        return self.first <= call <= self.last


def check_groups(groups: tuple[Group, ...]) -> None:
    """Raises unless groups follow each other.

    >>> check_groups((Group(0, 2), Group(2, 3)))
    Traceback (most recent call last):
    recoup.errors.CheckpointError: Groups follow each other; got calls 0 to 2, then 2 to 3.
    """
    for left, right in pairwise(groups):
        if right.first <= left.last:
            raise CheckpointError(
                f"Groups follow each other; got calls {left.first} to {left.last}, then {right.first} to {right.last}."
            )
