"""What two ranks check that train the stages of a pipeline, for ``tests/ranks``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from on_ranks import assert_same, gradients
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
)

import recoup
from recoup.errors import FitError
from recoup.measuring import MemoryTracker

WIDTH, WORDS, ROWS, LENGTH, NUM_MICRO_BATCHES = 32, 40, 4, 16, 4


class Block(nn.Module):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, factor * WIDTH), nn.Linear(factor * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        return x + self.dropout(self.down(hidden))


def make_stage(rank: int) -> nn.Sequential:
    torch.manual_seed(rank)
    if rank == 0:
        return nn.Sequential(nn.Embedding(WORDS, WIDTH), *map(Block, (4, 2, 6, 3)))
    return nn.Sequential(*map(Block, (2, 5, 3)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))


def loss_of(output: Tensor, words: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), words.flatten())


def batch_of(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(WORDS, (NUM_MICRO_BATCHES * ROWS, LENGTH), generator=generator)


def sample_of(rank: int) -> dict[str, Any]:
    """A micro-batch in the storage of all; for the second stage, in that of all tensors that it receives."""
    buffers = torch.randn(NUM_MICRO_BATCHES + 1, ROWS, LENGTH, WIDTH)
    micro_batch = batch_of(rank).chunk(NUM_MICRO_BATCHES)[0]
    if rank == 0:
        return {"sample": micro_batch, "loss": lambda output: (output * buffers[0]).sum()}
    return {"sample": (buffers[0].requires_grad_(), micro_batch), "loss": loss_of}


def train(rank: int, module: nn.Module, schedule_class: Any, num_steps: int = 2) -> int:
    """Steps of the pipeline; returns their peak beyond parameters, gradients and batches."""
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    is_multi = schedule_class is ScheduleInterleavedZeroBubble
    batch = batch_of(rank)
    torch.manual_seed(3)  # of dropout
    with MemoryTracker() as memory:
        schedule = schedule_class([stage] if is_multi else stage, NUM_MICRO_BATCHES, loss_of)
        for _ in range(num_steps):
            if rank == 0:
                schedule.step(batch)
            else:
                schedule.step(target=batch, return_outputs=False)
    return memory.peak_bytes


def stages_of_a_pipeline(rank: int) -> None:
    """Under real schedules: gradients of the plain stages, and peaks that the plans leave room for."""
    plain = make_stage(rank)
    train(rank, plain, ScheduleGPipe)
    expected = gradients(plain)
    for schedule, in_flight, budgets in (
        (ScheduleGPipe, NUM_MICRO_BATCHES, ("1.5MB", "1.15MB")),
        (Schedule1F1B, 2 - rank, ("945KB", "480KB")),
    ):
        module = make_stage(rank)
        fitted = recoup.fit(
            module,
            **sample_of(rank),
            budget=budgets[rank],
            accumulates=True,
            in_flight=in_flight,
            holds_output=True,
            together=False,
        )
        assert not fitted.plan.keeps_everything
        assert fitted.verification is not None
        assert fitted.verification.gradients == "bit-equal"
        residents = fitted.profile.residents
        lived_bytes = residents.parameter_bytes + residents.gradient_bytes + batch_of(rank).nbytes
        peak_bytes = train(rank, module, schedule) + lived_bytes
        spare_bytes = fitted.plan.predicted_bytes - peak_bytes
        # A micro-batch has scalars, such as its loss; at the peak, two of the buffers that are counted are not in use.
        scalar_bytes, buffer_bytes = 8 * NUM_MICRO_BATCHES, 4 * ROWS * LENGTH * WIDTH
        assert -scalar_bytes <= spare_bytes <= 2 * buffer_bytes + scalar_bytes
        assert_same(gradients(module), expected)
    # Gradients of inputs and of weights are computed apart, from several replays of each micro-batch.
    train(rank, module, ScheduleInterleavedZeroBubble)
    assert_same(gradients(module), expected)


def stages_fitted_together(rank: int) -> None:
    """Stages that differ are refused; of stages that are alike, the one with the most forwards in flight counts."""
    with pytest.raises(FitError, match="a rank that trains another model is fitted with together=False"):
        recoup.fit(make_stage(rank), budget="1GiB", in_flight=2 - rank, **sample_of(rank))
    torch.manual_seed(0)
    alike = nn.Sequential(*map(Block, (4, 2, 3)))
    x = torch.randn(ROWS, LENGTH, WIDTH).requires_grad_()
    fitted = recoup.fit(
        alike, x, budget="1GiB", loss=lambda output: output.square().sum(), in_flight=2 - rank
    )
    assert fitted.profile.in_flight == 2


def a_sharded_stage(rank: int) -> None:
    """Forwards that wait hold as much as without sharding, though their gathered parameters are freed."""
    torch.manual_seed(0)
    module = nn.Sequential(*map(Block, (4, 2, 3)), nn.Linear(WIDTH, WORDS))
    mesh = init_device_mesh("cpu", (2,))
    for block in [*module][:3]:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    fitted = recoup.fit(
        module,
        torch.randn(8 * ROWS, LENGTH, WIDTH),
        budget="1GiB",
        loss=lambda output: output.square().mean(),
        accumulates="unreduced",
        in_flight=4,
        holds_output=True,
    )
    assert fitted.verification is not None
    assert fitted.plan.predicted_bytes == pytest.approx(fitted.verification.peak_bytes, rel=0.01)
