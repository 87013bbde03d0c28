"""Which replays of a recorded step are compared with their forwards.

NOTE [ Compared replays ]
    1. Comparing all of a deep model takes longer than its step. Units of a kind do the same: one of those that a plan
       treats alike is compared.
    2. Comparing takes memory on some devices, and training compares every unit at times: those that would come near
       the predicted peak are compared as well.
    3. Whatever another replay does differently shows in gradients, which are compared with the plain step's. Where
       they differ, a step follows that compares all replays, and names the first that differs. Where there is no
       plain step, or parameters are compared, which an optimizer may hardly have changed, all are compared at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from recoup.plans.model_plan import ModelPlan
from recoup.plans.tree import Item, Leaf, Segment

__all__ = ["replays_left_out"]

_COMPARING_BYTES = 32 << 20
"""More than comparing takes on a device, where tensors are hashed 8 MiB at a time; on the host it takes nothing."""


def replays_left_out(model: nn.Module, plan: ModelPlan, device: torch.device) -> set[nn.Module]:
    """The modules whose replays need not be compared: see NOTE [ Compared replays ]."""
    units = plan.profile.units
    compared = _near_peak(plan, takes_memory=device.type != "cpu")
    seen = set()
    for index, treated in _treatments(plan):
        if treated not in seen:
            seen.add(treated)
            compared.add(index)
    modules = dict(model.named_modules())
    inside = {
        index: set(modules[unit.module].modules())
        for index, unit in enumerate(units)
        if unit.module in modules  # slices are always compared
    }
    left_out = {module for index, own in inside.items() if index not in compared for module in own}
    # A module may be called several times, under other names.
    return left_out.difference(*(own for index, own in inside.items() if index in compared))


def _treatments(plan: ModelPlan) -> Iterator[tuple[int, tuple[int, str, bool]]]:
    """For every unit its kind, its recipe, and whether it is in a segment."""

    def walk(item: Item, is_inside: bool) -> Iterator[tuple[int, tuple[int, str, bool]]]:
        if isinstance(item, Leaf):
            yield item.unit, (plan.profile.units[item.unit].kind, plan.recipe(item).name, is_inside)
        else:
            for part in item.items:
                yield from walk(part, True)

    for item in plan.items:
        yield from walk(item, isinstance(item, Segment))


def _near_peak(plan: ModelPlan, *, takes_memory: bool) -> set[int]:
    predicted = plan.schedule.predicted
    least_bytes = predicted.peak_bytes - (_COMPARING_BYTES if takes_memory else 0)
    return {moment.unit for moment in predicted.timeline if moment.num_bytes >= least_bytes}
