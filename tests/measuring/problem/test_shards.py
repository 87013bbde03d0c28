"""Bytes of sharded parameters in a problem, beside those that steps on ranks show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from recoup.measuring.measure import begin_measurement, measure_step
from recoup.measuring.measured import Measured
from recoup.model.step import TrainingStep


@pytest.fixture
def measured() -> Iterator[Measured]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)))
    mesh = init_device_mesh("cpu", (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    step = TrainingStep(model, torch.zeros(2, 64), loss=torch.sum)
    yield measure_step(begin_measurement(step, units=None), accumulates=False, unsafe={})
    dist.destroy_process_group()


def test_replicas_that_are_summed_up(measured: Measured) -> None:
    """The buffer of a sum over replicas lives beside the gradients."""
    groups = [replace(group, all_reduced_bytes=100) for group in measured.groups]
    units = replace(measured, groups=groups).profile(True).problem.units[:3]
    assert [unit.parameter_gradient_bytes for unit in units] == [4 * (64 * 64 + 64) + 100] * 3
