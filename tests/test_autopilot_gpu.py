"""The autopilot where the allocator itself runs out of memory: part of a GPU's memory is taken away in mid-step."""

from __future__ import annotations

import copy
import gc
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup.fitting import Fitted
from recoup.piloting import Autopilot
from recoup.torch_private import TorchDispatchMode

pytestmark = pytest.mark.gpu

NUM_STEPS, NUM_BLOCKS, WIDTH, NUM_ROWS = 4, 12, 1024, 8192


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + nn.functional.dropout(y, 0.1, self.training)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x).square().mean()


class Cutting(TorchDispatchMode):
    """Takes memory away at an operation: the process may reserve only so many bytes from then on."""

    def __init__(self, operation: int = -1, limit_bytes: int = 0) -> None:
        super().__init__()
        self.operation, self.limit_bytes, self.num_operations = operation, limit_bytes, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operations += 1
        if self.num_operations == self.operation:
            torch.cuda.empty_cache()  # else blocks in the cache might do
            total_bytes = torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction(self.limit_bytes / total_bytes)
        return func(*args, **(kwargs or {}))


def train(fitted: Fitted, batches: list[Tensor], mode: Cutting) -> tuple[list[Tensor], Autopilot]:
    model = fitted.model
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters())
    seen: list[Tensor] = []
    with recoup.autopilot(fitted, optimizer=optimizer) as pilot:
        for batch in batches:

            def run(batch: Tensor = batch) -> Tensor:
                with mode:
                    loss: Tensor = model(batch)
                    loss.backward()
                    return loss.detach()

            optimizer.zero_grad()
            seen.append(pilot.step(run))
            optimizer.step()
    seen += [value.detach().clone() for value in model.state_dict().values()]
    seen.append(torch.cuda.get_rng_state())
    return seen, pilot


def on_host(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.cpu() for tensor in tensors]


def test_memory_that_goes_away_in_mid_step() -> None:
    """20 times: the same losses, parameters, buffers and random state as with all the memory, and nothing leaks."""
    torch.manual_seed(0)
    start = Net().cuda()
    batches = [torch.randn(NUM_ROWS, WIDTH, device="cuda") for _ in range(NUM_STEPS)]
    model = copy.deepcopy(start)
    optimizer = torch.optim.AdamW(model.parameters())
    profile = recoup.measure(model, batches[0], optimizer=optimizer)
    smallest = recoup.minimum_budget(profile)
    budget = int(smallest + 0.8 * (profile.plain_bytes - smallest))
    fitted = recoup.fit(model, batches[0], budget=budget, optimizer=optimizer, race=False)
    assert fitted.verification is not None
    assert fitted.verification.gradients == "bit-equal"
    counting = Cutting()
    expected, pilot = train(fitted, batches, counting)
    assert not pilot.events
    expected = on_host(expected)
    chosen, lived, num_failed, plan_s = random.Random(0), set(), 0, []
    high = fitted.plan.predicted_bytes
    # Above the smallest budget by what fragmentation may take.
    low = int(smallest + 0.3 * (high - smallest))
    del model, optimizer, pilot
    number = 0
    # A cut late in a step may leave enough room for the rest: go on until 20 runs have failed.
    while num_failed < 20:
        number += 1
        assert number <= 60, "hardly any run fails"
        fresh = replace(fitted, model=recoup.apply(copy.deepcopy(start), fitted.plan))
        gc.collect()
        torch.cuda.empty_cache()
        # Beside the step's own bytes live the first model, batches of other steps, and free parts of their blocks.
        others_bytes = torch.cuda.memory_reserved() - sum(p.nbytes for p in fresh.model.parameters())
        cut_bytes = chosen.randint(low, int(0.95 * high)) + others_bytes
        try:
            found, pilot = train(
                fresh, batches, Cutting(chosen.randint(1, counting.num_operations), cut_bytes)
            )
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert all(map(torch.equal, on_host(found), expected)), number
        num_failed += bool(pilot.events)
        plan_s += [event.plan_s for event in pilot.events]
        for event in pilot.events:
            print(number, event)
        del fresh, found, pilot
        gc.collect()
        lived.add(torch.cuda.memory_allocated())
    assert len(lived) == 1, "something leaks"
    print(f"{num_failed} of {number} runs ran out of memory; plans took at most {1000 * max(plan_s):.0f} ms")
