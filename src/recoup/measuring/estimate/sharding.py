"""Parameters, gradients and optimizer state divided over ranks, as fully sharded data parallelism does.

NOTE [ Sharding ]
    1. Each unit is a group of its own: a rank holds its share of all parameters, gradients and optimizer state,
       rounded up for each.
    2. While a unit runs forward, its parameters are there in full, and those of the next unit, which are prefetched.
       While it runs backward, so are those of the unit before it, and the gradients of the unit after it, which are
       being reduced over the ranks. Its own full gradients are part of its measured backward.
    3. Parameters outside all units belong to the root, and stay in full, like their gradients.
    4. Buffers are not divided. A sample is one rank's batch, so activations stay as they are.
    5. Communication is assumed to overlap with the computation: seconds do not include it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor, nn

from recoup.errors import SampleError
from recoup.model.slices import find_module
from recoup.planning import Unit
from recoup.plans.profile import Profile, Residents
from recoup.tensors import needing_gradient, tensors_in

__all__ = ["check_ranks", "sharded"]


def check_ranks(ranks: int) -> None:
    """Refuses a number of ranks that is none.

    Raises:
        SampleError: it is no whole number of at least 1.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise SampleError(f"ranks must be a whole number of at least 1; got {ranks!r}.")


def sharded(profile: Profile, model: nn.Module, ranks: int) -> Profile:
    """The profile of one of several ranks, by NOTE [ Sharding ].

    Args:
        profile: of the step on one device that holds everything.
        model: that was measured.
        ranks: over which it is divided.
    """
    if ranks == 1:
        return profile
    groups = [
        [] if unit.module is None else list(find_module(model, unit.module).parameters())
        for unit in profile.units
    ]
    grouped = set(tensors_in(groups))
    root = [parameter for parameter in model.parameters() if parameter not in grouped]
    # A group before the first and one behind the last, both empty.
    full = [0, *map(_num_bytes, groups), 0]
    gradients = [0, *(_num_bytes(needing_gradient(group)) for group in groups), 0]
    residents = _residents(profile.residents, model, root, ranks)
    units = []
    for index, unit in enumerate(profile.problem.units, start=1):
        forward_bytes = full[index] + full[index + 1]
        backward_bytes = full[index] + full[index - 1] + gradients[index + 1]
        units.append(_with_groups(unit, forward_bytes, backward_bytes, ranks))
    resident_bytes = residents.total_bytes + profile.accumulates * residents.gradient_bytes
    problem = replace(profile.problem, units=tuple(units)).with_resident(resident_bytes)
    return replace(profile, problem=problem, residents=residents, ranks=ranks)


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _residents(whole: Residents, model: nn.Module, root: list[nn.Parameter], ranks: int) -> Residents:
    parameters = _num_bytes(model.parameters())
    buffer_bytes = max(0, whole.parameter_bytes - parameters)
    root_bytes = _num_bytes(root) + _num_bytes(needing_gradient(root))
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
