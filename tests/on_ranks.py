"""Checks that several processes run together, over gloo on the CPU."""

from __future__ import annotations

import gc
import itertools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn

import recoup
from recoup.engines import racing
from recoup.errors import RecoupWarning
from recoup.plans.profile import Profile

WIDTH, NUM_BLOCKS = 32, 5
_is_thorough = False


def on_ranks(num_ranks: int, *checks: Callable[[int], None], is_thorough: bool = False) -> None:
    """Runs checks one after the other in fresh processes, which can import what is directly in ``tests``."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(_run, (num_ranks, store.port, checks, is_thorough), nprocs=num_ranks)


def _run(
    rank: int, num_ranks: int, port: int, checks: tuple[Callable[[int], None], ...], is_thorough: bool
) -> None:
    global _is_thorough
    _is_thorough = is_thorough
    torch.set_num_threads(1)
    warnings.simplefilter("error", RecoupWarning)
    gc.collect()
    gc.freeze()  # as in conftest.py
    racing._MOST_ROUNDS = 2  # of such short steps five are timed, each of which waits for all ranks
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    try:
        for check in checks:
            check(rank)
            if dist.is_initialized():
                dist.barrier()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    # Threads of gloo's may outlive their group, and end the process with an error when it exits.
    os._exit(0)


def combined(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """All combinations where checks are thorough; otherwise as few as have every value of each."""
    if _is_thorough:
        return list(itertools.product(*values))
    number = max(map(len, values))
    return [tuple(own[index % len(own)] for own in values) for index in range(number)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__()
        self.first = nn.Linear(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.last = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x)
        return out


def make_model(num_blocks: int = NUM_BLOCKS) -> Net:
    torch.manual_seed(0)
    return Net(num_blocks)


def batch_of(rank: int, size: int = 128) -> Tensor:
    return torch.randn(size, 16, generator=torch.Generator().manual_seed(rank))


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def between(profile: Profile, share: float) -> int:
    """A budget between the smallest and what the plain step takes."""
    smallest = recoup.minimum_budget(profile)
    return int(smallest + share * (profile.plain_bytes - smallest))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name.removeprefix("module."): local(p.grad)
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
