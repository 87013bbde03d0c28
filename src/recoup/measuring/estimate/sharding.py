"""Parameters, gradients and optimizer state divided over ranks, as fully sharded data parallelism does.

NOTE [ Sharding ]
    1. Each unit is a group of its own: a rank holds its share of all parameters, gradients and optimizer state,
       rounded up for each.
    2. While a unit runs forward its parameters are there in full, and those of the next unit, which are fetched
       meanwhile. While it runs backward, so are those of the unit before it, and the gradients of the unit after it,
       which are being added up over the ranks. Its own full gradients are in its measured backward already.
    3. Parameters outside all units belong to the root, and stay in full, as their gradients do.
    4. Buffers are not divided; a sample is one rank's batch, so activations stay as they are.
    5. What ranks send each other is taken to happen beside the computation: seconds do not include it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor, nn

from recoup.errors import SampleError
from recoup.model.slices import find_module
from recoup.planning import Option, Problem, Unit
from recoup.plans.profile import Profile, Residents

__all__ = ["check_ranks", "sharded"]


def check_ranks(ranks: int) -> None:
    """Refuses what is no number of ranks.

    Raises:
        SampleError: it is none.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise SampleError(f"ranks must be a whole number of at least 1; got {ranks!r}.")


def sharded(profile: Profile, model: nn.Module, ranks: int) -> Profile:
    """What one of several ranks needs, by NOTE [ Sharding ].

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
    grouped = {id(parameter) for group in groups for parameter in group}
    root = [parameter for parameter in model.parameters() if id(parameter) not in grouped]
    full = [_num_bytes(group) for group in groups]
    gradients = [_num_bytes(p for p in group if p.requires_grad) for group in groups]
    residents = _residents(profile.residents, model, root, ranks)
    units = []
    for index, unit in enumerate(profile.problem.units):
        own = full[index]
        forward_bytes = own + _at(full, index + 1)
        backward_bytes = own + _at(full, index - 1) + _at(gradients, index + 1)
        units.append(_with_groups(unit, forward_bytes, backward_bytes, ranks))
    resident_bytes = residents.total_bytes + profile.accumulates * residents.gradient_bytes
    problem = Problem(units, resident_bytes=resident_bytes)
    return replace(profile, problem=problem, residents=residents, ranks=ranks)


def _at(sizes: list[int], index: int) -> int:
    return sizes[index] if 0 <= index < len(sizes) else 0


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _residents(whole: Residents, model: nn.Module, root: list[nn.Parameter], ranks: int) -> Residents:
    parameters = _num_bytes(model.parameters())
    buffer_bytes = max(0, whole.parameter_bytes - parameters)
    root_bytes = _num_bytes(root) + _num_bytes(p for p in root if p.requires_grad)
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
    options = [
        replace(
            option,
            forward_transient_bytes=option.forward_transient_bytes + forward_bytes,
            backward_transient_bytes=option.backward_transient_bytes + backward_bytes,
        )
        for option in unit.options
    ]
    return _copied(unit, options, _share(unit.parameter_gradient_bytes, ranks))


def _copied(unit: Unit, options: list[Option], parameter_gradient_bytes: int) -> Unit:
    return Unit(
        unit.name,
        options,
        output_bytes=unit.output_bytes,
        gradient_bytes=unit.gradient_bytes,
        parameter_gradient_bytes=parameter_gradient_bytes,
        left_bytes=unit.left_bytes,
        skips=unit.skips,
        output_links=unit.output_links,
        runs_once=unit.runs_once,
    )
