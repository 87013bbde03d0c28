"""Parameters that are gathered when they are needed (FSDP2): their bytes in a planning problem.

NOTE [ Gathered parameters ]
    1. A group of parameters is gathered as a whole. One inside a unit is there while that unit runs; any other one,
       such as the root's, from the beginning of the step to its end.
    2. A forward: the buffer in which a group was gathered lives until the next one is gathered.
    3. A backward: a group's buffer is there when the backward of the group after it begins (prefetch). The buffer in
       which gradients are reduced lives until the next group's gradients are reduced.
    4. When a unit's backward ends, its gradients are copied into that buffer, beside the share that stays.
    5. A group that stays gathered between forward and backward is a value with this lifetime. One that does not is a
       value from its replay in a segment to its backward: it is not gathered twice.
    6. With replicas (hybrid sharding), the buffer in which their shares are summed up stays until the backward ends.
    7. Shards in host memory are copied to the device, gathered there, and the copies freed. The share of the gradients
       is made on the device, and does not stay there.
    8. Gradients of groups outside units stay in full until the backward ends, when they are reduced.
    9. Solvers cannot tell which units a plan replays in a row, and would count all of them (``additive_numbers``):
       there is a problem without such segments, which is exact, and one with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from recoup.measuring.problem.positions import Position
from recoup.model.sharded import ShardGroup
from recoup.planning import Problem, Unit
from recoup.planning.lifetimes import Lifetime, Phase, Use
from recoup.tensors import num_bytes_of

__all__ = ["with_shards"]

_NAME = "gathered parameters"


@dataclass(frozen=True)
class _Gathered:
    """The groups of one position, in bytes."""

    parameters: int = 0
    buffer: int = 0
    full: int = 0
    gradients: int = 0
    reduced: int = 0
    shard: int = 0
    left: int = 0
    copied: int = 0
    stays: bool = False


def with_shards(
    problem: Problem,
    positions: Sequence[Position],
    groups: Sequence[ShardGroup],
    *,
    resident_bytes: int,
    in_segments: bool,
) -> Problem:
    """The problem of one rank, by NOTE [ Gathered parameters ].

    Args:
        problem: of the step with all parameters there, in full.
        positions: of the step.
        groups: of parameters.
        resident_bytes: that are there for the whole step: of parameters, this rank's shards.
        in_segments: whether units with parameters of their own may be replayed together.
    """
    inside = [_inside(position, groups) for position in positions]
    found = [_sum(own) for own in inside]
    outer = _sum([group for group in groups if not any(group in own for own in inside)])
    units = [
        _unit(unit, index, found, outer, runs_once=bool(inside[index]) and not in_segments)
        for index, unit in enumerate(problem.units)
    ]
    values = [*problem.other_values, *_values(found, outer)]
    return Problem(units, resident_bytes=resident_bytes, links=problem.links, values=values)


def _inside(position: Position, groups: Sequence[ShardGroup]) -> list[ShardGroup]:
    modules: set[nn.Module] = set(position.seen.module.modules()) if position.seen else set()
    return [group for group in groups if modules.issuperset(group.modules)]


def _sum(groups: Sequence[ShardGroup]) -> _Gathered:
    return _Gathered(
        sum(group.gathered_bytes for group in groups),
        sum(group.buffer_bytes for group in groups),
        sum(num_bytes_of(p) for group in groups for p in group.parameters if p.requires_grad),
        sum(group.gradient_bytes for group in groups),
        sum(group.reduced_bytes for group in groups),
        sum(group.shard_bytes for group in groups),
        sum(group.gradient_shard_bytes + group.all_reduced_bytes for group in groups),
        sum(group.copied_bytes for group in groups),
        all(group.stays for group in groups),
    )


def _values(found: Sequence[_Gathered], outer: _Gathered) -> list[Lifetime]:
    values = [Lifetime(_NAME, outer.parameters, made=None, stays=True)] if outer.parameters else []
    for index, own in enumerate(found):
        if own.parameters:
            made = Use(Phase.FIRST if own.stays else Phase.REPLAY, index)
            read = (Use(Phase.BACKWARD, index),)
            values.append(Lifetime(_NAME, own.parameters, made=made, read=read, in_scratch=True))
    return values


def _unit(unit: Unit, index: int, found: Sequence[_Gathered], outer: _Gathered, *, runs_once: bool) -> Unit:
    own = found[index]
    is_tail = index == len(found) - 1
    before = next((one for one in reversed(found[:index]) if one.parameters), _Gathered())
    after = next((one for one in found[index + 1 :] if one.parameters), _Gathered())
    # The buffer of the group that was gathered last; before the first, the outer ones.
    buffer = own.buffer or (before if before.parameters else outer).buffer
    forward_bytes = own.parameters + (0 if is_tail else buffer)
    gathering_bytes = (max(own.parameters, before.buffer) if own.copied else 0) + own.buffer + own.copied
    prefetched_bytes = 0 if before.stays else before.buffer
    backward_bytes = own.parameters + prefetched_bytes + after.reduced
    ending_bytes = own.gradients + own.reduced + own.shard + prefetched_bytes
    prefetching_bytes = backward_bytes + max(own.copied, before.copied)
    if index == 0:
        ending_bytes = max(ending_bytes, outer.reduced + outer.shard + own.left)
    options = [
        replace(
            option,
            scratch=option.scratch._replace(
                forward=max(option.scratch.forward + forward_bytes, gathering_bytes),
                backward=max(option.scratch.backward + backward_bytes, prefetching_bytes, ending_bytes),
            ),
        )
        for option in unit.options
    ]
    outer_bytes = unit.parameter_gradient_bytes - own.full
    share = outer.gradients / outer.full if outer.full else 1.0
    return replace(
        unit,
        options=tuple(options),
        parameter_gradient_bytes=own.left + max(0, round(share * outer_bytes)),
        runs_once=unit.runs_once or runs_once,
    )
