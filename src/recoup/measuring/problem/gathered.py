"""Bytes that one position of a step gathers, and those of the values that it makes and reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from recoup.model.accumulation import UNREDUCED, Accumulates
from recoup.model.sharded import ShardGroup
from recoup.planning import Problem
from recoup.planning.lifetimes import Phase
from recoup.tensors import num_bytes_of

__all__ = ["Gathered", "Passing", "gathered_by"]


@dataclass(frozen=True)
class Gathered:
    """The groups of one position, in bytes: sums of what `ShardGroup` says of each.

    Attributes:
        parameters: that are gathered.
        staying: of these, what stays between forward and backward.
        lasting: of these, what stays after the backward.
        always: of these, what does both.
    """

    parameters: int = 0
    staying: int = 0
    lasting: int = 0
    always: int = 0
    buffer: int = 0
    full: int = 0
    gradients: int = 0
    reduced: int = 0
    sharing: int = 0
    left: int = 0
    copied: int = 0
    copied_again: int = 0
    resharded: int = 0
    resharding: int = 0
    reordered: int = 0
    reordered_gradient: int = 0
    waiting: int = 0

    @property
    def reducing(self) -> int:
        """Beside gradients that wait."""
        copying_bytes = (0 if self.waiting else self.gradients) + self.reordered_gradient
        return self.reduced + max(copying_bytes, self.sharing - self.waiting)


def gathered_by(groups: Iterable[ShardGroup], *, accumulates: Accumulates) -> Gathered:
    """The sum over some groups."""
    found, is_unreduced = list(groups), accumulates == UNREDUCED
    has_shares = bool(accumulates) and not is_unreduced

    def total(see: Callable[[ShardGroup], int]) -> int:
        return sum(map(see, found))

    return Gathered(
        parameters=total(lambda group: group.gathered_bytes),
        staying=total(lambda group: group.stays * group.gathered_bytes),
        lasting=total(lambda group: group.lasts * group.gathered_bytes),
        always=total(lambda group: group.stays * group.lasts * group.gathered_bytes),
        buffer=total(lambda group: group.buffer_bytes),
        full=sum(num_bytes_of(p) for group in found for p in group.parameters if p.requires_grad),
        gradients=total(lambda group: 0 if is_unreduced and group.adds_in_place else group.gradient_bytes),
        reduced=total(lambda group: group.reduced_bytes),
        sharing=total(lambda group: group.made_bytes(is_unreduced=is_unreduced)),
        left=total(lambda group: group.left_bytes(accumulates=has_shares)),
        copied=total(lambda group: group.copied_bytes),
        copied_again=total(lambda group: group.copied_again_bytes),
        resharded=total(lambda group: group.resharded_bytes),
        resharding=total(lambda group: group.resharding_bytes),
        reordered=total(lambda group: group.reordered_bytes),
        reordered_gradient=total(
            lambda group: group.waiting(group.reordered_gradient_bytes, is_unreduced=is_unreduced)
        ),
        waiting=total(lambda group: group.waiting_bytes) if is_unreduced else 0,
    )


class Passing(NamedTuple):
    """Bytes of the values that a unit makes and reads.

    Attributes:
        made: by its forward.
        read: by its backward alone, which frees them on its way.
        input_gradients: made by its backward.
        output_gradients: read by its backward.
    """

    made: int
    read: int
    input_gradients: int
    output_gradients: int

    @classmethod
    def of(cls, problem: Problem, unit: int) -> Passing:
        """Those of a problem's unit."""
        made = read = input_gradients = output_gradients = 0
        for value in problem.other_values:
            makes = value.made is not None and value.made.unit == unit
            readers = {use.unit for use in value.read if use.phase is Phase.BACKWARD}
            if value.made is not None and value.made.phase is Phase.BACKWARD:
                input_gradients += value.num_bytes if makes else 0
                output_gradients += value.num_bytes if unit in readers else 0
            else:
                made += value.num_bytes if makes and not value.in_scratch else 0
                read += value.num_bytes if readers == {unit} and not value.stays else 0
        return cls(made, read, input_gradients, output_gradients)
