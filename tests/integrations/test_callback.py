from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recoup.errors import SampleError
from recoup.integrations.callback import FittingCallback


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_static_graph_is_left_out(one_rank: None) -> None:
    """A callback can fit neither before the model is wrapped nor after the first training step."""
    model, x = DistributedDataParallel(nn.Linear(4, 4), static_graph=True), torch.ones(2, 4)
    with pytest.raises(SampleError, match=r"^RecoupCallback fits before .* leave static_graph=True out\.$"):
        FittingCallback("1GiB").fit_batches(model, lambda batch: model(batch).sum().backward(), [x])
