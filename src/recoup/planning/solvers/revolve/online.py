"""Checkpoints for a number of steps that is not known beforehand.

Wang, Moin, Iaccarino: Minimal repetition dynamic checkpointing algorithm for unsteady adjoint calculation
(SIAM J. Sci. Comput. 31, 2009), Algorithm 1. Each checkpoint has a rank (the paper's level); one is dispensable if
a later one has a higher rank. A new checkpoint pushes out the last dispensable one; where there is none, it takes
the place of the one before it, one rank up. Departure: the reversal is not theirs but ``revolve`` on each stretch
between checkpoints, with the slots that are free by then.
"""

from __future__ import annotations

from dataclasses import dataclass

from recoup.errors import ScheduleError
from recoup.planning.actions import Action, Drop, Forward, Keep, Value
from recoup.planning.solvers.revolve import reverse_part

__all__ = ["OnlineRevolve"]

_FIRST_RANK = 1 << 62


@dataclass
class _Checkpoint:
    step: int
    rank: int


class OnlineRevolve:
    """Decides, step by step, which states to keep; then reverses whatever number of steps there were.

    Args:
        num_slots: states that may be kept at once, the input among them.
        option: index of the steps' option.
        records: whether a backward needs what its own forward recorded (else only the step's input).

    >>> from recoup.planning.schedule import trace
    >>> online = OnlineRevolve(num_slots=2)
    >>> trace(action for _ in range(4) for action in online.advance())
    'F0 F1i F2i D0y F3i D1y'
    >>> trace(online.reverse())
    'F3:0 B3 F0 F1i F2:0 B2 F1:0 B1 F0:0 B0'
    """

    def __init__(self, *, num_slots: int, option: int = 0, records: bool = True) -> None:
        if num_slots < 1:
            raise ScheduleError(f"OnlineRevolve needs at least one slot, for the input; got {num_slots}.")
        self.num_slots = num_slots
        self.option = option
        self.records = records
        self.num_steps = 0
        self._checkpoints = [_Checkpoint(0, _FIRST_RANK)]
        self._is_reversed = False

    @property
    def kept_steps(self) -> tuple[int, ...]:
        """The steps whose inputs are kept now."""
        return tuple(checkpoint.step for checkpoint in self._checkpoints)

    def advance(self) -> list[Action]:
        """The actions for one more step of the loop: its forward, and what is dropped after it."""
        self._check_open()
        step = self.num_steps
        self.num_steps += 1
        if step == 0:
            return [Forward(0)]
        if len(self._checkpoints) < self.num_slots:
            self._checkpoints.append(_Checkpoint(step, 0))
            return [Forward(step, keep=Keep.INPUT)]
        index = self._dispensable()
        if index is not None:
            dropped = self._checkpoints.pop(index)
            self._checkpoints.append(_Checkpoint(step, 0))
        elif len(self._checkpoints) > 1 and self._checkpoints[-1].step == step - 1:
            dropped = self._checkpoints.pop()
            self._checkpoints.append(_Checkpoint(step, dropped.rank + 1))
        else:
            return [Forward(step)]
        return [Forward(step, keep=Keep.INPUT), Drop(dropped.step - 1, value=Value.OUTPUT)]

    def reverse(self) -> list[Action]:
        """The actions that run all backwards. Afterwards this object has done its work."""
        self._check_open()
        if self.num_steps == 0:
            raise ScheduleError("There is nothing to reverse: call advance once for each step first.")
        self._is_reversed = True
        actions: list[Action] = []
        stop = self.num_steps
        for index, checkpoint in reversed(list(enumerate(self._checkpoints))):
            slots = self.num_slots - index
            actions += reverse_part(
                checkpoint.step, stop, num_slots=slots, option=self.option, records=self.records
            )
            stop = checkpoint.step
        return actions

    def _dispensable(self) -> int | None:
        """The last checkpoint that has a later one of a higher rank."""
        highest = -1
        for index in reversed(range(1, len(self._checkpoints))):
            rank = self._checkpoints[index].rank
            if rank < highest:
                return index
            highest = max(highest, rank)
        return None

    def _check_open(self) -> None:
        if self._is_reversed:
            raise ScheduleError("This loop has been reversed. Make a new OnlineRevolve for the next one.")
