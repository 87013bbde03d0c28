"""A schedule: actions in time order, and its one-line trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from recoup.planning.actions import Action, Backward, Forward

__all__ = ["Schedule", "trace"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Actions in time order. Whether they are legal for a problem is for ``simulate`` to say.

    >>> from recoup.planning.actions import Backward, Forward
    >>> schedule = Schedule([Forward(0), Forward(1), Backward(1, option=0), Backward(0, option=0)])
    >>> len(schedule), str(schedule)
    (4, 'F0 F1 B1 B0')
    """

    actions: tuple[Action, ...]

    def __init__(self, actions: Iterable[Action]) -> None:
        object.__setattr__(self, "actions", tuple(actions))

    def with_options(self, numbers: Sequence[Sequence[int]]) -> Schedule:
        """The same for a problem whose units have other options: by unit and option, their numbers there.

        >>> from recoup.planning.actions import Keep
        >>> print(Schedule([Forward(0, keep=Keep.OPTION, option=1), Backward(0, option=1)]).with_options([[0, 2]]))
        F0:2 B0
        """
        return Schedule(
            replace(action, option=numbers[action.unit][action.option])
            if isinstance(action, (Forward, Backward)) and action.option is not None
            else action
            for action in self.actions
        )

    def __len__(self) -> int:
        return len(self.actions)

    def __iter__(self) -> Iterator[Action]:
        return iter(self.actions)

    def __str__(self) -> str:
        return trace(self)


def trace(actions: Iterable[Action]) -> str:
    """Writes actions on one line, for golden tests and for reading: ``"F0 F1 F2 F0 F1 B2 F0 B1 B0"``.

    The letters are explained in ``recoup.planning.actions``.

    >>> from recoup.planning.actions import Backward, Forward, Keep
    >>> trace([Forward(0, keep=Keep.OPTION, option=0), Backward(0, option=0)])
    'F0:0 B0'
    """
    return " ".join(map(str, actions))
