"""A measured step, from which a profile can be made for either kind of training loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from recoup.devices.meter import Meter
from recoup.measuring.problem.costs import StepCosts
from recoup.measuring.problem.lifetimes import encode
from recoup.measuring.problem.positions import positions_of
from recoup.measuring.problem.shards import with_shards
from recoup.model.accumulation import UNREDUCED
from recoup.model.calls import class_of_module
from recoup.model.conditions import Conditions
from recoup.model.recipe import KEEP, Recipe
from recoup.model.sharded import ShardGroup, adds_in_place
from recoup.planning import Problem
from recoup.plans.profile import Profile, ProfiledUnit, Residents

__all__ = ["Measured"]


@dataclass(frozen=True)
class Measured:
    """A measured step.

    Attributes:
        model: that was measured.
        meter: of its device.
        costs: the measured bytes and seconds.
        unsafe: by unit name, why it must be kept.
        names: of the units.
        conditions: what the model was called with.
        uncaptured: by unit name, why a unit runs eagerly beside captured ones.
        engine: that units run on, where they can.
        groups: parameters that are gathered when they are needed.
        loss_is_outside: whether a function makes the loss from the model's output.
    """

    model: nn.Module
    meter: Meter
    costs: StepCosts
    unsafe: Mapping[str, str]
    names: Mapping[nn.Module, str]
    conditions: Conditions | None
    uncaptured: Mapping[str, str] = field(default_factory=dict)
    engine: str = "eager"
    groups: Sequence[ShardGroup] = ()
    loss_is_outside: bool = False

    def profile(self, holds_output: bool, *, in_segments: bool = True) -> Profile:
        """The profile for a loop that holds the model's output through the backward, or does not.

        Args:
            holds_output: whether it does.
            in_segments: for units that gather their parameters, whether they may be replayed together.
        """
        costs = replace(self.costs, holds_output=holds_output)
        tail = costs.structure.tail
        largest = sorted(tail.output, key=lambda number: tail.output[number], reverse=True)
        return Profile(
            class_of_module(self.model).__name__,
            self.meter.device_name,
            self._units(costs),
            self._problem(costs, in_segments),
            self._residents(costs),
            costs.accumulates,
            self.meter.is_estimate,
            device_bytes=self.meter.total_bytes(),
            holds_output=holds_output,
            output_bytes=sum(map(self.meter.rounded, tail.output.values())),
            output_names=", ".join(dict.fromkeys(tail.names[number] for number in largest[:3])),
            conditions=self.conditions,
            engine=self.engine,
        )

    def _residents(self, costs: StepCosts) -> Residents:
        if not self.groups:
            return costs.residents
        sharded = {id(parameter) for group in self.groups for parameter in group.parameters}
        others = [p for p in self.model.parameters() if p.requires_grad and id(p) not in sharded]
        gradient_bytes = sum(group.gradient_shard_bytes for group in self.groups)
        gradient_bytes += sum(p.nbytes for p in others)
        transient_bytes = costs.residents.optimizer_transient_bytes
        if costs.accumulates == UNREDUCED:
            # The optimizer finds them reduced.
            freed_bytes = sum(group.waiting_bytes - group.gradient_shard_bytes for group in self.groups)
            gradient_bytes += freed_bytes
            transient_bytes = max(0, transient_bytes - freed_bytes)
        return replace(
            costs.residents, gradient_bytes=gradient_bytes, optimizer_transient_bytes=transient_bytes
        )

    def _problem(self, costs: StepCosts, in_segments: bool) -> Problem:
        if not self.groups:
            return encode(costs)
        residents = self._residents(costs)
        resident_bytes = residents.total_bytes + bool(costs.accumulates) * residents.gradient_bytes
        positions = positions_of(costs)
        # Whether a backward finds gradients in full.
        accumulates = costs.accumulates == UNREDUCED and adds_in_place(self.groups)
        return with_shards(
            encode(replace(costs, accumulates=accumulates)),
            positions,
            self.groups,
            resident_bytes=resident_bytes,
            accumulates=costs.accumulates,
            in_segments=in_segments,
            loss_is_outside=self.loss_is_outside,
        )

    def _units(self, costs: StepCosts) -> tuple[ProfiledUnit, ...]:
        kinds: dict[Any, int] = {}
        num_calls: dict[nn.Module, int] = {}
        units = []
        for position in positions_of(costs):
            if position.call is None or position.seen is None:
                units.append(ProfiledUnit(position.name, None, 0, -1, (KEEP,)))
                continue
            module = position.seen.module
            number = num_calls[module] = num_calls.get(module, -1) + 1
            units.append(
                ProfiledUnit(
                    position.name,
                    self.names[module],
                    number,
                    kinds.setdefault(position.seen.kind, len(kinds)),
                    tuple(option.recipe for option in costs.options[position.call]),
                    self.unsafe.get(position.name, ""),
                    num_parts=len(list(module.children())),
                    num_stored=tuple(
                        _num_stored(option.recipe, position.seen.num_saved)
                        for option in costs.options[position.call]
                    ),
                    uncaptured=self.uncaptured.get(position.name, ""),
                )
            )
        return tuple(units)


def _num_stored(recipe: Recipe, num_saved: Mapping[str, int]) -> int:
    """Tensors that a recipe's replays store, given those that a unit (``""``) and the modules inside it save."""
    inside = sum(num_saved.get(name, 0) for name in recipe.inner)
    return inside + num_saved[""] if recipe.whole or recipe == KEEP else inside
