"""One rank over NCCL: predicted peaks against the allocator's own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import recoup

pytestmark = pytest.mark.gpu


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.fixture
def _one_rank() -> Iterator[None]:
    dist.init_process_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    yield
    dist.destroy_process_group()


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(1024) for _ in range(8)), nn.Linear(1024, 16)).cuda()


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


def shard(model: nn.Sequential, **settings: Any) -> nn.Sequential:
    mesh = init_device_mesh("cuda", (1,))
    for block in model[:-1]:
        fully_shard(block, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)
    return model


def check(model: nn.Module, engine: str = "auto", *, compiles: bool = False) -> recoup.Fitted:
    batch = torch.randn(4096, 1024, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    profile = recoup.measure(model, batch, loss=loss_of, optimizer=optimizer)
    if compiles:
        for block in model.children():
            block.compile()
    smallest = recoup.minimum_budget(profile)
    budget = int(smallest + 0.4 * (profile.plain_bytes - smallest))
    fitted = recoup.fit(model, batch, budget=budget, loss=loss_of, optimizer=optimizer, engine=engine)
    assert not fitted.plan.keeps_everything
    seen = fitted.verification
    assert seen is not None
    # Generated code rounds as it is fused.
    assert seen.gradients.startswith("bit-equal") or fitted.plan.profile.engine == "compiled"
    assert fitted.plan.predicted_bytes == pytest.approx(seen.peak_bytes, rel=0.03)
    for _ in range(3):
        torch.cuda.synchronize()
        # DistributedDataParallel makes new buckets after its first step; NCCL's watchdog lets go of the old ones later.
        time.sleep(0.5)
        torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        optimizer.step()
    torch.cuda.synchronize()
    assert fitted.plan.predicted_bytes == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.03)
    return fitted


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("settings", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_data_parallel_over_nccl(settings: dict[str, Any]) -> None:
    check(DistributedDataParallel(make_model(), **settings))


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"reshard_after_forward": False},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    ],
    ids=["default", "stays gathered", "bfloat16"],
)
def test_sharded_over_nccl(settings: dict[str, Any]) -> None:
    check(shard(make_model(), **settings))


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize(
    "settings", [{}, {"reshard_after_forward": False}], ids=["default", "stays gathered"]
)
def test_captured_and_sharded_over_nccl(settings: dict[str, Any]) -> None:
    profile = check(shard(make_model(), **settings), "captured").profile
    assert not any(unit.uncaptured for unit in profile.units)


@pytest.mark.usefixtures("_one_rank")
def test_compiled_and_sharded_over_nccl() -> None:
    assert check(shard(make_model()), compiles=True).plan.profile.engine == "compiled"


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize(
    "settings",
    [
        {"offload_policy": CPUOffloadPolicy()},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {
            "offload_policy": CPUOffloadPolicy(),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        },
    ],
    ids=["pinned", "not pinned", "bfloat16"],
)
def test_shards_in_host_memory_over_nccl(settings: dict[str, Any]) -> None:
    """Parameters, gradients and optimizer state do not count: only what is gathered and reduced on the device."""
    model = shard(make_model(), **settings)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    residents = check(model).profile.residents
    assert (residents.parameter_bytes, residents.gradient_bytes, residents.optimizer_bytes) == (0, 0, 0)
