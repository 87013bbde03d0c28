"""Bytes of sharded parameters in a problem, for settings that need a GPU to be run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from recoup.measuring.measure import begin_measurement, measure_step
from recoup.measuring.measured import Measured
from recoup.model.step import TrainingStep
from recoup.tensors import on_device, working_device


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


def test_shards_in_host_memory(measured: Measured) -> None:
    """Gradients leave nothing on the device, and copies of shards are there while they are gathered."""
    num_bytes = 4 * (64 * 64 + 64)
    on_host = [replace(group, offloads=True, copied_bytes=4 * 64 * 64) for group in measured.groups]
    kept, offloaded = (one.profile(True) for one in (measured, replace(measured, groups=on_host)))
    assert kept.residents.gradient_bytes == 3 * num_bytes
    assert offloaded.residents.gradient_bytes == 0
    units = offloaded.problem.units[:3]
    assert [unit.parameter_gradient_bytes for unit in kept.problem.units[:3]] == [num_bytes] * 3
    assert [unit.parameter_gradient_bytes for unit in units] == [0] * 3
    # The batch is tiny: nothing in these units takes as much as the copy of a weight, which is there before it.
    made_bytes = 2 * 4 * 2 * 64  # the linear layer's result, which is held, and the unit's own
    assert [unit.options[0].scratch.forward for unit in units] == [num_bytes + 4 * 64 * 64 - made_bytes] * 3


def test_what_is_there_when_gradients_are_reduced(measured: Measured) -> None:
    """First the gradients and their buffer, then that and their share, but nothing that the unit held."""
    num_bytes, held_bytes, gradient_bytes = 4 * (64 * 64 + 64), 2 * 4 * 2 * 64, 4 * 2 * 64

    def scratch(**changes: int) -> int:
        groups = [replace(group, **changes) for group in measured.groups]
        return replace(measured, groups=groups).profile(True).problem.units[1].options[0].scratch.backward

    # While it runs: parameters and gradients, and the buffer of the unit after it.
    assert scratch() == 3 * num_bytes + gradient_bytes
    assert scratch(gradient_bytes=3 * num_bytes) == 4 * num_bytes + gradient_bytes - held_bytes
    assert scratch(sharing_bytes=3 * num_bytes) == 4 * num_bytes + gradient_bytes - held_bytes


def test_groups_that_are_gathered_ahead(measured: Measured) -> None:
    """Their buffers: of the group before by default, of others where the user says so."""
    num_bytes = 4 * (64 * 64 + 64)

    def scratch(**changes: Any) -> list[tuple[int, int]]:
        groups = [replace(group, buffer_bytes=num_bytes, **changes) for group in measured.groups]
        units = replace(measured, groups=groups).profile(True).problem.units[:3]
        return [(unit.options[0].scratch.forward, unit.options[0].scratch.backward) for unit in units]

    usual = scratch()
    # The groups are numbered in the order in which they are gathered.
    ahead = scratch(ahead_in_forward=(0, 1, 2), ahead_in_backward=(0, 1, 2))
    num_more = [
        [(one - two) // num_bytes for one, two in zip(*pair, strict=True)]
        for pair in zip(ahead, usual, strict=True)
    ]
    assert num_more == [[2, 0], [1, 0], [0, 1]]


def test_replicas_that_are_summed_up(measured: Measured) -> None:
    """The buffer of a sum over replicas lives beside the gradients, unless it becomes one."""
    num_bytes = 4 * (64 * 64 + 64)
    for becomes_share, more_bytes in ((False, 100), (True, 0)):
        groups = [
            replace(group, all_reduced_bytes=100, becomes_share=becomes_share) for group in measured.groups
        ]
        units = replace(measured, groups=groups).profile(True).problem.units[:3]
        assert [unit.parameter_gradient_bytes for unit in units] == [num_bytes + more_bytes] * 3


def test_the_device_of_a_shard_in_host_memory() -> None:
    """Is that of its mesh."""
    shard: Any = SimpleNamespace(device=torch.device("cpu"), device_mesh=SimpleNamespace(device_type="cuda"))
    with patch.object(torch, "get_device_module", return_value=SimpleNamespace(current_device=lambda: 1)):
        assert working_device(shard) == torch.device("cuda", 1)
        assert on_device([shard, plain := torch.zeros(2)])[0] is plain
