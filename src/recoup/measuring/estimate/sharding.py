"""What one of several ranks holds, and how long it communicates: fully sharded (FSDP2), or everything on each (DDP).

NOTE [ Sharding ]
    1. Each unit is a group of its own: a rank holds its share of all parameters, gradients and optimizer state,
       rounded up for each.
    2. While a unit runs forward, its parameters are there in full, and those of the next unit, which are prefetched.
       While it runs backward, so are those of the unit before it, and the gradients of the unit after it, which are
       being reduced over the ranks. Its own full gradients are part of its measured backward.
    3. Parameters outside all units belong to the root, and stay in full, like their gradients.
    4. Buffers are not divided. A sample is one rank's batch, so activations stay as they are.
    5. Units that stay gathered between forward and backward are values with this lifetime; none is prefetched again.
    6. With DDP a rank holds everything, and once more all gradients, in the buckets in which they are summed up.
    7. Seconds include the communication that computing does not hide: NOTE [ Overlap ].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from recoup.measuring.estimate.cluster import Cluster
from recoup.measuring.estimate.communication import Group, with_communication
from recoup.model.slices import find_module
from recoup.planning import Lifetime, Phase, Problem, Unit, Use
from recoup.plans.profile import Profile, Residents
from recoup.tensors import needing_gradient, tensors_in

__all__ = ["sharded"]

_GATHERED = "gathered parameters"


def sharded(profile: Profile, model: nn.Module, cluster: Cluster) -> Profile:
    """The profile of one of several ranks, by NOTE [ Sharding ].

    Args:
        profile: of the step on one device that holds everything.
        model: that was measured.
        cluster: the ranks, with the speed of their links.
    """
    if cluster.ranks == 1:
        return profile
    owned = [
        [] if unit.module is None else list(find_module(model, unit.module).parameters())
        for unit in profile.units
    ]
    grouped = set(tensors_in(owned))
    outside = [parameter for parameter in model.parameters() if parameter not in grouped]
    groups, root = list(map(_group, owned)), _group(outside)
    if cluster.kind == "ddp":
        whole = profile.residents
        residents = replace(whole, other_bytes=whole.other_bytes + whole.gradient_bytes)
        problem = profile.problem
    else:
        residents = _residents(profile.residents, model, root, cluster.ranks)
        problem = _gathered(profile.problem, groups, cluster)
    resident_bytes = residents.total_bytes + bool(profile.accumulates) * residents.gradient_bytes
    problem = with_communication(problem.with_resident(resident_bytes), groups, root, cluster)
    return replace(profile, problem=problem, residents=residents, ranks=cluster.ranks)


def _group(parameters: Iterable[nn.Parameter]) -> Group:
    owned = list(parameters)
    return Group(_num_bytes(owned), _num_bytes(needing_gradient(owned)))


def _gathered(problem: Problem, groups: Sequence[Group], cluster: Cluster) -> Problem:
    """The problem with units in full while they run."""
    # A group before the first and one behind the last, both empty.
    full = [0, *(group.parameter_bytes for group in groups), 0]
    gradients = [0, *(group.gradient_bytes for group in groups), 0]
    units, values = [], list(problem.values)
    for index, unit in enumerate(problem.units):
        own, before, after = full[index + 1], full[index], full[index + 2]
        prefetched = before if cluster.reshard_after_forward else 0
        backward_bytes = own + prefetched + gradients[index + 2]
        units.append(_with_groups(unit, own + after, backward_bytes, cluster.ranks))
        if own and not cluster.reshard_after_forward:
            made, read = Use(Phase.FIRST, index), (Use(Phase.BACKWARD, index),)
            values.append(Lifetime(_GATHERED, own, made=made, read=read, in_scratch=True))
    return replace(problem, units=tuple(units), values=tuple(values))


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _residents(whole: Residents, model: nn.Module, root: Group, ranks: int) -> Residents:
    parameters = _num_bytes(model.parameters())
    buffer_bytes = max(0, whole.parameter_bytes - parameters)
    root_bytes = root.parameter_bytes + root.gradient_bytes
    return Residents(
        buffer_bytes + _share(parameters, ranks),
        _share(whole.optimizer_bytes, ranks),
        whole.other_bytes + root_bytes,
        _share(whole.gradient_bytes, ranks),
        _share(whole.optimizer_transient_bytes, ranks),
    )


def _share(num_bytes: int, ranks: int) -> int:
    return -(-num_bytes // ranks)


def _with_groups(unit: Unit, forward_bytes: int, backward_bytes: int, ranks: int) -> Unit:
    options = tuple(
        replace(
            option,
            scratch=option.scratch._replace(
                forward=option.scratch.forward + forward_bytes,
                backward=option.scratch.backward + backward_bytes,
            ),
        )
        for option in unit.options
    )
    return replace(
        unit, options=options, parameter_gradient_bytes=_share(unit.parameter_gradient_bytes, ranks)
    )
