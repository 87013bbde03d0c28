from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import recoup
from recoup.errors import ApplyError, SampleError
from recoup.policies import EveryN


def mlp() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class TestFSDP1:
    @pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
    @pytest.mark.parametrize("is_outer", [True, False])
    def test_refused_wherever_a_model_is_given(self, one_rank: None, is_outer: bool) -> None:
        wrapped = FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))
        model, x = wrapped if is_outer else nn.Sequential(nn.Linear(8, 8), wrapped), torch.ones(2, 8)
        says = (
            r"contains, a FullyShardedDataParallel \(FSDP1\), which is not supported.*fully_shard \(FSDP2\)"
        )
        runs: list[Callable[[], object]] = [
            lambda: recoup.fit(model, x, budget="1GiB", loss=torch.sum),
            lambda: recoup.measure(model, x, loss=torch.sum),
            lambda: recoup.audit(model, x, loss=torch.sum),
        ]
        for run in runs:
            with pytest.raises(SampleError, match=says):
                run()
        with pytest.raises(ApplyError, match=says):
            recoup.apply(model, EveryN(2))


def test_compiled_blocks_of_a_sharded_model(one_rank: None) -> None:
    """Only the eager engine refuses them; the others plan them, as ``tests/ranks`` checks."""
    model, x = mlp(), torch.ones(2, 8)
    for block in model:
        block.compile()
        fully_shard(block)
    fully_shard(model)
    with pytest.raises(SampleError, match=r"more modules are compiled.*for engine='auto' or 'compiled'"):
        recoup.fit(model, x, budget="1GiB", loss=torch.sum, engine="eager")


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_model_is_refused_and_a_traced_one_is_not() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)), torch.randn(2, 3)
    with pytest.raises(SampleError, match=r"scripted as a whole .* give the model that was scripted"):
        recoup.fit(torch.jit.script(model), x, budget="1GiB", loss=torch.sum)
    assert recoup.fit(torch.jit.trace(model, x), x, budget="1GiB", loss=torch.sum).plan.keeps_everything
