"""What a schedule is made of: small values that compare, print and know nothing of who runs them.

==========================================  =========  =====================================================
action                                      trace      meaning
==========================================  =========  =====================================================
``Forward(3)``                              ``F3``     run unit 3; its input is dropped afterwards
``Forward(3, keep=Keep.INPUT)``             ``F3i``    run it; its input stays
``Forward(3, keep=Keep.OPTION, option=1)``  ``F3:1``   run it; its input stays, and all that option 1 holds
``Backward(3, option=1)``                   ``B3``     run its backward; what only it needed is freed
``Drop(3, value=Value.OUTPUT)``             ``D3y``    free its output (``D3h``: its held bytes)
``Send(3, value=Value.HELD, link="host")``  ``S3h``    start to move to another store; not readable until back
``Fetch(3, value=Value.HELD, link="host")`` ``R3h``    start to bring it back; whoever reads it waits
``Wait(3, value=Value.HELD)``               ``W3h``    wait for the end of its last move
==========================================  =========  =====================================================
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from recoup.errors import ScheduleError

__all__ = ["Action", "Backward", "Drop", "Fetch", "Forward", "Keep", "Send", "Value", "Wait"]


class Keep(Enum):
    """What a forward leaves behind, besides its output."""

    NOTHING = "nothing"
    INPUT = "input"
    OPTION = "option"


class Value(Enum):
    """Which of a unit's values an action is about."""

    OUTPUT = "output"
    HELD = "held"

    @property
    def letter(self) -> str:
        """The value in a trace: ``y`` or ``h``."""
        return "y" if self is Value.OUTPUT else "h"


@dataclass(frozen=True, slots=True)
class Forward:
    """Runs a unit's forward; ``keep`` says what it leaves behind.

    The problem's input always stays, so for unit 0 ``Keep.NOTHING`` and ``Keep.INPUT`` do the same.

    >>> str(Forward(3)), str(Forward(3, keep=Keep.INPUT)), str(Forward(3, keep=Keep.OPTION, option=1))
    ('F3', 'F3i', 'F3:1')
    """

    unit: int
    keep: Keep = field(default=Keep.NOTHING, kw_only=True)
    option: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if (self.keep is Keep.OPTION) != (self.option is not None):
            raise ScheduleError(
                f"Forward({self.unit}): Keep.OPTION comes with an option's index and the others without;"
                f" got {self.keep} and option={self.option}."
            )

    def __str__(self) -> str:
        suffix = {Keep.NOTHING: "", Keep.INPUT: "i", Keep.OPTION: f":{self.option}"}[self.keep]
        return f"F{self.unit}{suffix}"


@dataclass(frozen=True, slots=True)
class Backward:
    """Runs a unit's backward under an option, with that option's replay first.

    >>> str(Backward(3, option=1))
    'B3'
    """

    unit: int
    option: int = field(kw_only=True)

    def __str__(self) -> str:
        return f"B{self.unit}"


@dataclass(frozen=True, slots=True)
class Drop:
    """Frees a value on the device.

    >>> str(Drop(3, value=Value.OUTPUT))
    'D3y'
    """

    unit: int
    value: Value = field(kw_only=True)

    def __str__(self) -> str:
        return f"D{self.unit}{self.value.letter}"


@dataclass(frozen=True, slots=True)
class Send:
    """Starts to move a value to another store; its device bytes are free when the move has ended.

    >>> str(Send(3, value=Value.HELD, link="host"))
    'S3h'
    """

    unit: int
    value: Value = field(kw_only=True)
    link: str = field(kw_only=True)

    def __str__(self) -> str:
        return f"S{self.unit}{self.value.letter}"


@dataclass(frozen=True, slots=True)
class Fetch:
    """Starts to bring a value back; its device bytes are taken at once.

    >>> str(Fetch(3, value=Value.HELD, link="host"))
    'R3h'
    """

    unit: int
    value: Value = field(kw_only=True)
    link: str = field(kw_only=True)

    def __str__(self) -> str:
        return f"R{self.unit}{self.value.letter}"


@dataclass(frozen=True, slots=True)
class Wait:
    """Lets the computation wait until a value's last move has ended.

    >>> str(Wait(3, value=Value.HELD))
    'W3h'
    """

    unit: int
    value: Value = field(kw_only=True)

    def __str__(self) -> str:
        return f"W{self.unit}{self.value.letter}"


Action = Forward | Backward | Drop | Send | Fetch | Wait
