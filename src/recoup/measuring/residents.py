"""Bytes that are allocated for the whole step: parameters, optimizer state, the sample, other models."""

from __future__ import annotations

from recoup.devices.meter import Meter, device_of
from recoup.measuring.optimizer.cost import OptimizerCost
from recoup.model.optimizer_state import all_state_storages, state_bytes_of
from recoup.model.step import TrainingStep
from recoup.plans.profile import Residents
from recoup.tensors import needing_gradient, num_bytes_of, on_device, storages_of

__all__ = ["find_residents"]


def find_residents(
    step: TrainingStep, optimizer: OptimizerCost, meter: Meter, allocated_bytes: int
) -> Residents:
    """What is allocated for the whole step.

    Args:
        step: that is measured.
        optimizer: the cost of its optimizers.
        meter: of its device.
        allocated_bytes: before the first pass, where the meter sees residents.
    """
    model = step.model
    parameters = storages_of([*on_device(model.parameters()), *model.buffers()])
    parameter_bytes = sum(parameters.values())
    if meter.sees_residents:
        # Read now: the user's step may have made the state meanwhile.
        state_bytes = state_bytes_of(*step.optimizers)
        other_bytes = max(0, allocated_bytes - parameter_bytes - state_bytes)
    else:
        others = [tensor for one in step.reached.modules for tensor in (*one.parameters(), *one.buffers())]
        residents = parameters | storages_of((step.given, others)) | _inputs(step)
        rounded_bytes = sum(map(meter.rounded, residents.values()))
        other_bytes = rounded_bytes - parameter_bytes + meter.workspace_bytes
    buckets = step.buckets
    # Gradients that are views of buckets are counted as gradients.
    other_bytes -= buckets.num_bytes * (meter.sees_residents and buckets.is_allocated)
    other_bytes += meter.rounded(buckets.num_bytes) * (not buckets.are_gradients)
    # A step of the user's holds by itself what the optimizer's does.
    closure_bytes = optimizer.closure_bytes if step.step is None else 0
    return Residents(
        parameter_bytes,
        optimizer.state_bytes + optimizer.missing_bytes,
        other_bytes + closure_bytes,
        sum(map(num_bytes_of, needing_gradient(list(model.parameters())))),
        optimizer.transient_bytes - closure_bytes,
    )


def _inputs(step: TrainingStep) -> dict[int, int]:
    """Bytes by storage of what the step's code reads, beside what is counted as something else."""
    device = device_of(step.model, step.given)
    found = storages_of([tensor for tensor in step.inputs if tensor.device == device])
    for storage in (*all_state_storages(step.optimizers), *step.shards.storages()):
        found.pop(storage._cdata, None)
    return found
