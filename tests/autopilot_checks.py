"""What processes that train one model under the autopilot check, for ``tests/ranks``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from on_ranks import assert_same, batch_of, between, gradients, loss_of, make_model
from rank_checks import _fit, _shard
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import recoup
from recoup.errors import BudgetError, FitError
from recoup.fitting import Fitted
from recoup.measuring import MemoryTracker
from recoup.piloting import Autopilot
from recoup.ranks import find_ranks, meetings
from recoup.torch_private import TorchDispatchMode

NUM_STEPS = 3
Step = Callable[[nn.Module, Tensor], Any]


class FailAt(TorchDispatchMode):
    """Raises an out-of-memory error at an operation, once; counts operations."""

    def __init__(self, operation: int = -1) -> None:
        super().__init__()
        self.left = operation
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        self.number += 1
        if self.left == 0:
            raise torch.OutOfMemoryError("injected")
        return func(*args, **(kwargs or {}))


def _losses(model: nn.Module, batch: Tensor, mode: FailAt) -> Tensor:
    with mode:
        loss = loss_of(model(batch))
        loss.backward()
        return loss.detach()


def _train(
    model: nn.Module, batch: Tensor, pilot: Autopilot | None, mode: FailAt | None = None
) -> dict[str, Tensor]:
    """Gradients, parameters and losses after a few steps, with the autopilot or plainly."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found, mode = {}, mode or FailAt()
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        run = partial(_losses, model, batch, mode)
        found[f"loss {number}"] = run() if pilot is None else pilot.step(run)
        optimizer.step()
    found |= gradients(model)
    return found


def one_rank_fails(rank: int) -> None:
    """At any operation of any step, forward or backward: all ranks repeat it, and get what they get without."""
    batch = batch_of(rank)
    counting = FailAt()
    expected = _train(DistributedDataParallel(make_model()), batch, None)
    for settings in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        wrapped = DistributedDataParallel(make_model(), **settings)
        fitted = _fit(wrapped, batch, share=0.6)
        counting = FailAt()
        found = _train(wrapped, batch, recoup.autopilot(fitted), counting)
        assert_same(found, expected)
        number = find_ranks().smallest(counting.number)
        for part in range(1, 8):
            wrapped = recoup.apply(DistributedDataParallel(make_model(), **settings), fitted.plan)
            pilot = recoup.autopilot(_on(fitted, wrapped))
            mode = FailAt(part * number // 8 if rank == 1 else -1)
            assert_same(_train(wrapped, batch, pilot, mode), expected)
            [event] = pilot.events
            assert event.reason == ("injected" if rank == 1 else "on another rank")


def _on(fitted: Fitted, model: nn.Module) -> Fitted:
    return Fitted(model, fitted.plan, fitted.audit, fitted.verification)


def the_least_room_decides(rank: int) -> None:
    """Both ranks get the plan for what rank 1 can use; where that is too little, both say so."""
    batch = batch_of(rank)
    wrapped = DistributedDataParallel(make_model())
    fitted = _fit(wrapped, batch, share=0.6)
    smallest = recoup.minimum_budget(fitted.profile)
    usable = (smallest + fitted.plan.predicted_bytes) // 2
    room = MemoryTracker(limit_bytes=2**30 if rank == 0 else usable - fitted.profile.residents.total_bytes)
    pilot = recoup.autopilot(fitted, tracker=room)
    _train(wrapped, batch, pilot, FailAt(50 if rank == 0 else -1))
    assert pilot.events[0].usable_bytes == usable
    assert pilot.plan.predicted_bytes <= usable < fitted.plan.predicted_bytes
    plans: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(plans, pilot.plan.to_json())
    assert len(set(plans)) == 1
    if rank == 1:
        room.limit_bytes = 10
    with pytest.raises(BudgetError, match="no plan fits what was really free"):
        _train(wrapped, batch, pilot, FailAt(50 if rank == 0 else -1))


def accumulated_without_reductions(rank: int) -> None:
    """Micro-batches in the wrapper's own ``no_sync``: only the last reduces, and the first one's gradients survive."""
    batch = batch_of(rank)

    def accumulate(
        model: DistributedDataParallel, run: Callable[[Callable[[], Any]], Any]
    ) -> dict[str, Tensor]:
        with model.no_sync():
            run(lambda: loss_of(model(batch)).backward())
        mode = FailAt(90 if rank == 1 else -1)

        def last() -> None:
            with mode:
                loss_of(model(batch.flip(0))).backward()

        run(last)
        return gradients(model)

    wrapped = DistributedDataParallel(make_model())
    fitted = _fit(wrapped, batch, share=0.6, accumulates=True)
    pilot = recoup.autopilot(fitted)
    found = accumulate(wrapped, pilot.step)
    assert len(pilot.events) == 1
    plain = DistributedDataParallel(make_model())
    with plain.no_sync():
        loss_of(plain(batch)).backward()
    loss_of(plain(batch.flip(0))).backward()
    assert_same(found, gradients(plain))


def sizes_differ(rank: int) -> None:
    """Each rank has batches of its own sizes: one budget for both, whichever fails, and gradients of a plain run."""
    sizes = [(128, 40, 96), (24, 112, 64)][rank]

    def train(model: nn.Module, run: Callable[[Callable[[], Any]], Any]) -> dict[str, Tensor]:
        for size in sizes:
            run(lambda size=size: loss_of(model(batch_of(rank, size))).backward())
        return gradients(model)

    expected = train(DistributedDataParallel(make_model()), lambda step: step())
    wrapped = DistributedDataParallel(make_model())
    samples = [batch_of(0, size) for size in (24, 64, 128)]
    profile = recoup.measure(wrapped, samples[-1], loss=loss_of, accumulates=True)
    budget = find_ranks().largest(between(profile, 0.7))
    fitted = recoup.fit(wrapped, samples=samples, budget=budget, loss=loss_of, accumulates=True)
    assert fitted.by_size is not None
    least = [fitted.by_size.within(0).plan_for((size,)).predicted_bytes for size in sizes]
    residents = fitted.profile.residents
    # Gradients of earlier batches are part of the smallest peak, and not there yet in the first step.
    limit_bytes = find_ranks().largest(max(least)) - residents.total_bytes + residents.gradient_bytes + 4096
    for number, failing in ((0, 0), (1, 1), (2, 0), (2, 1)):
        wrapped = recoup.apply(DistributedDataParallel(make_model()), fitted.by_size)
        room = MemoryTracker(limit_bytes=limit_bytes)
        pilot = recoup.autopilot(replace(fitted, model=wrapped), tracker=room)
        modes = [FailAt(60 if (number, failing) == (index, rank) else -1) for index in range(len(sizes))]

        def run(step: Callable[[], Any], pilot: Autopilot = pilot, modes: list[FailAt] = modes) -> None:
            def attempt() -> None:
                with modes[pilot.num_steps]:
                    step()

            pilot.step(attempt)

        assert_same(train(wrapped, run), expected)
        [event] = pilot.events
        assert event.reason == ("injected" if rank == failing else "on another rank")
        assert (event.step, event.batch) == (number + 1, f"x.shape[0] = {sizes[number]}")
        budgets: list[Any] = [None, None]
        assert pilot.by_size is not None
        dist.all_gather_object(budgets, pilot.by_size.budget_bytes)
        assert budgets[0] == budgets[1]


def other_errors(rank: int) -> None:
    """An error on one rank ends the step on all."""
    fitted = _fit(make_model(), batch_of(rank), share=0.6)
    pilot = recoup.autopilot(fitted)

    def step() -> None:
        if rank == 1:
            raise ZeroDivisionError("on rank 1")

    with pytest.raises(ZeroDivisionError if rank == 1 else FitError, match=r"on rank 1|Another rank raised"):
        pilot.step(step)
    wrapped = DistributedDataParallel(make_model(), static_graph=True)
    with pytest.raises(FitError, match="without static_graph=True to use the autopilot"):
        recoup.autopilot(_on(fitted, wrapped))


def sharded(rank: int) -> None:
    """All ranks fail at the same operation of a model that FSDP2 shards."""
    batch = batch_of(rank)
    expected = _train(_shard(make_model()), batch, None)
    model = _shard(make_model())
    budget = find_ranks().largest(between(recoup.measure(model, batch, loss=loss_of), 0.4))
    fitted = recoup.fit(model, batch, budget=budget, loss=loss_of)
    counting = FailAt()
    assert_same(_train(model, batch, recoup.autopilot(fitted), counting), expected)
    number = find_ranks().smallest(counting.number)
    for part in range(1, 12):
        model = recoup.apply(_shard(make_model()), fitted.plan)
        pilot = recoup.autopilot(_on(fitted, model))
        assert_same(_train(model, batch, pilot, FailAt(part * number // 12)), expected)
        assert len(pilot.events) == 1
    # One rank alone, when nobody needs it any more.
    plain, model = _shard(make_model()), recoup.apply(_shard(make_model()), fitted.plan)
    loss_of(plain(batch)).backward()
    pilot, failures = recoup.autopilot(_on(fitted, model)), [rank == 1, False]

    def step() -> None:
        loss_of(model(batch)).backward()
        if failures.pop(0):
            raise torch.OutOfMemoryError("late")

    pilot.step(step)
    assert [event.reason for event in pilot.events] == ["late" if rank == 1 else "on another rank"]
    assert_same(gradients(model), gradients(plain))


def one_rank_fails_while_sharded(rank: int) -> None:
    """In the middle of a step in which the other waits for it: both raise what failed, and on which rank.

    To be run last: the process groups are aborted.
    """
    model, batch = _shard(make_model()), batch_of(rank)
    fitted = recoup.fit(model, batch, budget="1GiB", loss=loss_of)
    pilot = recoup.autopilot(fitted)
    failing = FailAt(100 if rank == 1 else -1)
    with (
        patch.multiple(meetings, _POLL_S=0.1, _GRACE_S=0.5),
        pytest.raises(
            FitError,
            match=r"^Rank 1 ran out of memory \(injected\)\. .* fit the model to a smaller budget\.\n.* aborted",
        ),
    ):
        _train(model, batch, pilot, failing)
    dist.destroy_process_group()
