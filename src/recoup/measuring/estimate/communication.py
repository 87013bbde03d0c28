"""Seconds of communication that computing does not hide.

NOTE [ Overlap ]
    1. FSDP2 gathers the parameters of the next unit while one runs forward, and those of the unit before while it runs
       backward; gradients of the unit after it are reduced meanwhile. All of it goes over the same links, in turn.
    2. A phase thus takes the longer one of computing and of what is communicated beside it. Under an option with a
       replay, that replay hides communication too.
    3. Nothing hides the gather of the model's own parameters (those outside all units), nor that of the unit that the
       step begins with; nor, at the end of the step, the reductions of their gradients.
    4. Code between units hides nothing. Code before the first unit hides that unit's gather, and code behind the last
       one the gather for its backward.
    5. Units that are replayed together are taken to gather once more than they do, if computing does not hide it.
    6. DDP gathers nothing. Gradients of a unit are summed up while the unit before it runs backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from recoup.measuring.estimate.cluster import Cluster
from recoup.planning import Problem, Unit

__all__ = ["Group", "with_communication"]


@dataclass(frozen=True)
class Group:
    """Parameters that are communicated together, in full.

    Attributes:
        parameter_bytes: of all of them.
        gradient_bytes: of the gradients of those that are trained.
    """

    parameter_bytes: int = 0
    gradient_bytes: int = 0


@dataclass(frozen=True)
class _Seconds:
    """Of one group: gathering it forward and backward, and reducing its gradients."""

    gather_s: float = 0.0
    gather_again_s: float = 0.0
    reduce_s: float = 0.0


def with_communication(problem: Problem, groups: Sequence[Group], root: Group, cluster: Cluster) -> Problem:
    """The problem with phases as long as their communication, by NOTE [ Overlap ].

    Args:
        problem: of one rank.
        groups: for each position of the step; empty ones for code.
        root: parameters outside all units.
        cluster: with the speed of its links.
    """
    found = [_seconds(group, cluster) for group in groups]
    outer, last = _seconds(root, cluster), len(groups) - 1
    filled = [index for index, group in enumerate(groups) if group.parameter_bytes]
    units = []
    for index, unit in enumerate(problem.units):
        is_group, is_first = index in filled, index == 0
        after = next((found[other] for other in filled if other > index), _Seconds())
        before = next((found[other] for other in reversed(filled) if other < index), _Seconds())
        beside_forward_s = after.gather_s if is_group or is_first else 0.0
        beside_backward_s = (before.gather_again_s if is_group or index == last else 0.0) + (
            after.reduce_s if is_group or is_first else 0.0
        )
        first_s = outer.gather_s + found[0].gather_s if is_first else 0.0
        final_s = outer.reduce_s + found[0].reduce_s if is_first else 0.0
        units.append(_longer(unit, beside_forward_s, beside_backward_s, first_s, final_s))
    return replace(problem, units=tuple(units))


def _seconds(group: Group, cluster: Cluster) -> _Seconds:
    if cluster.kind == "ddp":
        # Reduced, then gathered.
        return _Seconds(reduce_s=cluster.collective_s(2 * group.gradient_bytes))
    gather_s = cluster.collective_s(group.parameter_bytes)
    again_s = gather_s if cluster.reshard_after_forward else 0.0
    return _Seconds(gather_s, again_s, cluster.collective_s(group.gradient_bytes))


def _longer(unit: Unit, forward_s: float, backward_s: float, first_s: float, final_s: float) -> Unit:
    options = tuple(
        replace(
            option,
            forward_s=first_s + max(option.forward_s, forward_s),
            backward_s=max(option.backward_s, backward_s - option.extra_s) + final_s,
        )
        for option in unit.options
    )
    return replace(unit, options=options)
