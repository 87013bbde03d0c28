"""What processes that train one model together check, for ``tests/ranks``."""

from __future__ import annotations

import gc
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from handmade import actions_of, keep, replay, segment
from on_ranks import (
    NUM_BLOCKS,
    WIDTH,
    Block,
    Net,
    assert_same,
    batch_of,
    between,
    combined,
    gradients,
    local,
    loss_of,
    make_model,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import recoup
from recoup.checkpointing.sampling import sampling
from recoup.devices.meter import CpuMeter, Timing
from recoup.engines.racing import Finisher
from recoup.engines.real_steps import RealSteps
from recoup.errors import BudgetError, FitError, SampleError
from recoup.measuring.measure import begin_measurement, measure_step
from recoup.model.sharded import Shards
from recoup.model.step import TrainingStep
from recoup.planning import Schedule
from recoup.plans import rivals
from recoup.plans.by_hand import plan_by_hand, recomputable_units, recomputing
from recoup.plans.largest import largest_profile
from recoup.plans.model_plan import ModelPlan
from recoup.plans.tree import leaves_of
from recoup.policies import EveryN, UniformSegments
from recoup.ranks import find_ranks, meetings

DOCS = Path(__file__).resolve().parent.parent / "docs"


def _assert_one_plan(fitted: recoup.Fitted) -> None:
    plans: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(plans, fitted.plan.to_json())
    assert len(set(plans)) == 1


def _fit(model: nn.Module, batch: Tensor, share: float = 0.4, **more: Any) -> recoup.Fitted:
    """Fits to a budget that is the same on all ranks: the first rank's."""
    plain = make_model()
    profile = recoup.measure(plain, batch, loss=loss_of)
    budget = between(profile, share) + profile.residents.gradient_bytes
    return recoup.fit(model, batch, budget=find_ranks().largest(budget), loss=loss_of, **more)


_CALLS = {"blocks": 0, "fails_at": 0}
_FORWARD = Block.forward
_MOST_CALLS = "recompute every unit"


def _with_the_most_calls(profile: recoup.Profile, budget_bytes: int) -> tuple[str, ModelPlan]:
    """A rival that is no faster than the usual recipe wherever seconds are real."""
    every = recomputing(profile, recomputable_units(profile))
    return _MOST_CALLS, plan_by_hand(profile, every, budget_bytes)


def _count_calls(block: Block, x: Tensor) -> Tensor:
    _CALLS["blocks"] += 1
    if _CALLS["blocks"] == _CALLS["fails_at"]:
        raise torch.OutOfMemoryError("no room for a block")
    return _FORWARD(block, x)


@contextmanager
def _clock(rank: int, fails_at: int = 0) -> Iterator[None]:
    """Steps that are timed take seconds by their calls of blocks, and some run out of memory at one of these calls.

    Rank 0 is fast, the faster the fewer calls there are. The other ranks are slow, the slower the fewer there are.
    Their steps are so long that two rounds would be enough, and those of rank 0 so short that it would run five.
    """

    def time_step(meter: CpuMeter, run: Callable[[], Any]) -> Timing:
        _CALLS.update(blocks=0, fails_at=fails_at)
        try:
            run()
        finally:
            _CALLS["fails_at"] = 0
        return Timing(1.0 - 0.02 * _CALLS["blocks"] if rank else 0.001 * _CALLS["blocks"], 0.0)

    with (
        patch.object(Block, "forward", _count_calls),
        patch.object(CpuMeter, "time_step", time_step),
        patch.multiple(rivals, _MOST_SLOWER=math.inf, usual_plan=_with_the_most_calls),
        patch.dict(_CALLS),
    ):
        yield


def _assert_slowest_decided(fitted: recoup.Fitted) -> None:
    """After a fit with `_clock`: one outcome on all ranks, which rank 0 by itself would not have found."""
    found = _assert_one_race(fitted)
    assert [name for name, one in found.items() if one.is_kept] == [_MOST_CALLS]
    assert found[_MOST_CALLS].seconds == 1.0 - 0.02 * 2 * NUM_BLOCKS
    assert found["the planner's choice"].seconds > found[_MOST_CALLS].seconds


def _assert_without_the_slowest(fitted: recoup.Fitted) -> None:
    """The same where the plan with the most calls did not fit the memory of some rank."""
    found = _assert_one_race(fitted)
    assert found[_MOST_CALLS].seconds == math.inf
    assert sum(one.is_kept for one in found.values()) == 1
    assert not found[_MOST_CALLS].is_kept


def _assert_one_race(fitted: recoup.Fitted) -> dict[str, Finisher]:
    assert fitted.verification is not None
    finishers = fitted.verification.race
    assert all(found == finishers for found in find_ranks().gathered(finishers))
    assert all(f"{one.name} " in " ".join(str(fitted).split()) for one in finishers)
    return {one.name: one for one in finishers}


def _train(model: nn.Module, batch: Tensor, num_steps: int = 2) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        optimizer.step()
    return gradients(model)


def exchanges(rank: int) -> None:
    """Values and errors, in whatever order ranks fail."""
    ranks = find_ranks()
    assert ranks.gathered(rank) == list(range(ranks.size))
    assert (ranks.largest(rank), ranks.smallest(rank)) == (ranks.size - 1, 0)
    assert ranks.from_first(lambda: f"made by {rank}") == "made by 0"

    def fail(error: Exception, meanwhile: Callable[[], Any] = lambda: None, **more: Any) -> None:
        with ranks.together(**more):
            if rank == 1:
                raise error
            meanwhile()

    with pytest.raises(BudgetError, match="too small") as caught:
        fail(BudgetError("too small", budget_bytes=1, smallest_bytes=2, unit="blocks.0"))
    assert (caught.value.smallest_bytes, caught.value.unit) == (2, "blocks.0")
    # Rank 1 fails in the block around the others' next exchange, and later exchanges are in step again.
    with pytest.raises(KeyError, match="early"):
        fail(KeyError("early"), lambda: ranks.largest(0))
    with pytest.raises(ValueError, match="first"), ranks.together():
        ranks.from_first(lambda: int("first"))
    assert ranks.gathered(rank) == list(range(ranks.size))
    # Nobody is aborted who is slow while no rank has failed, or comes soon after one has.
    with patch.multiple(meetings, _POLL_S=0.01, _GRACE_S=0.1):
        with ranks.together(communicates=True):
            time.sleep(0.5 if rank == 0 else 0.0)
        with pytest.raises(KeyError, match="soon"):
            fail(KeyError("soon"), communicates=True)
    assert ranks.gathered(rank) == list(range(ranks.size))
    assert find_ranks(together=False).size == 1


def wrapped_after_fitting(rank: int) -> None:
    """One plan, the wrapper's buckets counted, the gradients of the unfitted model."""
    batch = batch_of(rank)
    reference = _train(DistributedDataParallel(make_model()), batch)
    model = make_model()
    before = _fit(model, batch)
    _assert_one_plan(before)
    assert not before.plan.keeps_everything
    residents = before.profile.residents
    assert residents.other_bytes == batch.nbytes + residents.gradient_bytes
    assert before.plan.predicted_bytes == before.verification.peak_bytes <= before.plan.budget_bytes
    assert_same(_train(DistributedDataParallel(model), batch), reference)


def wrapped_before_fitting(rank: int) -> None:
    """The same plan, under the same names."""
    batch = batch_of(rank)
    reference = _train(DistributedDataParallel(make_model()), batch)
    before = _fit(make_model(), batch, verify=False)
    wrapped = DistributedDataParallel(make_model())
    with _clock(rank):
        after = _fit(wrapped, batch)
    _assert_one_plan(after)
    _assert_slowest_decided(after)
    assert after.model is wrapped
    assert after.profile.residents == before.profile.residents
    assert [unit.name for unit in after.profile.units] == [unit.name for unit in before.profile.units]
    assert after.plan.predicted_bytes == after.verification.peak_bytes
    assert after.verification.gradients == "bit-equal"
    assert_same(_train(wrapped, batch), reference)
    assert recoup.verify(wrapped, after.plan, batch, loss=loss_of).gradients == "bit-equal"
    # A plan for the model is a plan for its wrapper.
    other = recoup.apply(DistributedDataParallel(make_model()), before.plan)
    assert_same(_train(other, batch), reference)


def a_rival_fails(rank: int) -> None:
    """On one rank alone: no rank keeps it."""
    batch, model = batch_of(rank), make_model()
    with _clock(rank, fails_at=2 * NUM_BLOCKS if rank == 1 else 0):
        fitted = _fit(model, batch)
    _assert_one_plan(fitted)
    _assert_without_the_slowest(fitted)


def wrapped_while_measured(rank: int) -> None:
    """Measuring, auditing and policies leave the wrapper as it was: it reduces the gradients of the next step."""
    batch = batch_of(rank)
    for settings in ({}, {"gradient_as_bucket_view": True}):
        reference = _train(DistributedDataParallel(make_model(), **settings), batch)
        model = DistributedDataParallel(make_model(), **settings)
        profile = recoup.measure(model, batch, loss=loss_of)
        inner = recoup.measure(model.module, batch, loss=loss_of, accumulates=bool(settings))
        assert [unit.name for unit in profile.units] == [unit.name for unit in inner.units]
        buckets = 0 if settings else profile.residents.gradient_bytes
        assert profile.residents.other_bytes == inner.residents.other_bytes + buckets
        assert profile.plain_bytes == inner.plain_bytes + buckets
        recoup.audit(model, batch, loss=loss_of)
        recoup.remove(recoup.apply(model, EveryN(2), sample=batch))
        assert_same(_train(model, batch), reference)
        fitted = recoup.fit(model, batch, budget=find_ranks().largest(between(profile, 0.4)), loss=loss_of)
        assert fitted.verification is not None
        assert fitted.verification.gradients == "bit-equal"


class _Skipping(Net):
    """Skips blocks at random: with any numbers some of them."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if torch.rand(()).item() >= 0.5:
                x = block(x)
        out: Tensor = self.last(x)
        return out


def layers_skipped_at_random(rank: int) -> None:
    """Ranks draw other numbers, and measure the same layers."""
    torch.manual_seed(0)
    model = _Skipping(14)
    torch.manual_seed(5 + rank)
    fitted = recoup.fit(model, batch_of(rank), budget="1GiB", loss=loss_of)
    _assert_one_plan(fitted)
    assert len({unit.module for unit in fitted.profile.units if unit.module}) > 10


def batches_of_several_sizes(rank: int) -> None:
    """Each rank runs under the plan for its own batch; sharded models are refused."""
    samples = [batch_of(0, rows) for rows in (32, 64, 128)]
    own = [batch_of(rank, 128 if rank == 0 else 40), batch_of(rank, 20 if rank == 0 else 100)]

    def train(model: nn.Module) -> dict[str, Tensor]:
        for batch in own:
            loss_of(model(batch)).backward()
        return gradients(model)

    reference = train(DistributedDataParallel(make_model()))
    profile = recoup.measure(make_model(), samples[-1], loss=loss_of)
    budget = find_ranks().largest(between(profile, 0.2) + 2 * profile.residents.gradient_bytes)
    model = make_model()
    fitted = recoup.fit(model, samples=samples, budget=budget, loss=loss_of, accumulates=True)
    assert fitted.by_size is not None
    assert not fitted.plan.keeps_everything
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, fitted.by_size.to_json())
    assert len(set(found)) == 1
    assert_same(train(DistributedDataParallel(model)), reference)
    with pytest.raises(SampleError, match="parameters are divided over ranks"):
        recoup.fit(_shard(make_model()), samples=samples, budget=budget, loss=loss_of)


def data_parallel_settings(rank: int) -> None:
    """A static graph, gradients that are views of buckets, unused parameters, accumulation without reductions."""
    batch = batch_of(rank)
    reference = _train(DistributedDataParallel(make_model(), static_graph=True), batch, num_steps=3)
    wrapped = DistributedDataParallel(make_model(), static_graph=True)
    with pytest.raises(SampleError, match="static_graph=True learns the graph from its first backward"):
        _fit(wrapped, batch)
    _train(wrapped, batch, num_steps=1)
    fitted = _fit(wrapped, batch)
    assert_same(_train(wrapped, batch), reference)
    model = recoup.apply(make_model(), fitted.plan)
    assert_same(_train(DistributedDataParallel(model, static_graph=True), batch, num_steps=3), reference)

    settings = {"gradient_as_bucket_view": True}
    reference = _train(DistributedDataParallel(make_model(), **settings), batch)
    wrapped = DistributedDataParallel(make_model(), **settings)
    fitted = _fit(wrapped, batch, share=0.6)
    assert fitted.profile.accumulates
    assert fitted.profile.residents.other_bytes == batch.nbytes
    assert_same(_train(wrapped, batch), reference)

    def with_unused() -> Net:
        model = make_model()
        model.unused = nn.Linear(4, 4)
        return model

    settings = {"find_unused_parameters": True}
    reference = _train(DistributedDataParallel(with_unused(), **settings), batch)
    model = with_unused()
    _fit(model, batch, verify=False)
    assert_same(_train(DistributedDataParallel(model, **settings), batch), reference)

    def accumulate(model: DistributedDataParallel) -> dict[str, Tensor]:
        with model.no_sync():
            loss_of(model(batch)).backward()
        loss_of(model(batch)).backward()
        return gradients(model)

    wrapped = DistributedDataParallel(make_model())
    fitted = _fit(wrapped, batch, share=0.6, accumulates=True)
    assert fitted.profile.accumulates
    assert_same(accumulate(wrapped), accumulate(DistributedDataParallel(make_model())))


def _shard(model: Net, mesh: Any = None, **settings: Any) -> Net:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)
    return model


_SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"reshard_after_forward": False},
    {"reshard_after_forward": True},
    {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
)


def _train_counting(model: nn.Module, batch: Tensor) -> tuple[dict[str, Tensor], int]:
    """The gradients, and how often parameters were gathered."""
    num_gathers = 0
    gather = _fsdp_param_group.foreach_all_gather

    def counting(*args: Any) -> Any:
        nonlocal num_gathers
        num_gathers += 1
        return gather(*args)

    with patch.object(_fsdp_param_group, "foreach_all_gather", counting):
        found = _train(model, batch)
    return found, num_gathers


def sharded_after_planning(rank: int) -> None:
    """Whole units and segments under FSDP2: the gradients of the unfitted model, with as many gathers."""
    batch = batch_of(rank)
    fitted = _fit(make_model(), batch)
    for settings in _SETTINGS:
        expected, num_gathers = _train_counting(_shard(make_model(), **settings), batch)
        assert num_gathers >= 2 * (NUM_BLOCKS + 1)
        for plan in (fitted.plan, UniformSegments(2)):
            before = _shard(recoup.apply(make_model(), plan), **settings)
            after = recoup.apply(_shard(make_model(), **settings), plan)
            for model in (before, after):
                found, number = _train_counting(model, batch)
                assert_same(found, expected)
                assert number == num_gathers


def gathered_as_drawn(rank: int) -> None:
    """The picture of the page on ranks shows what a real step does."""
    sys.path.insert(0, str(DOCS))
    try:
        import draw_gathers
    finally:
        sys.path.remove(str(DOCS))
    drawn = json.loads(draw_gathers.EVENTS.read_text(encoding="utf-8"))
    assert {
        title: [list(event) for event in events] for title, events in draw_gathers.record_all().items()
    } == drawn


def sharded_before_planning(rank: int) -> None:
    """`fit` after `fully_shard`: the predicted peak, the gradients and gathers of the unfitted model."""
    batch = batch_of(rank)
    for settings in _SETTINGS[:2] + _SETTINGS[3:]:
        # A rival that fails in the middle of its backward leaves nothing behind.
        fails = "offload_policy" in settings
        expected, num_gathers = _train_counting(_shard(make_model(), **settings), batch)
        model = _shard(make_model(), **settings)
        profile = recoup.measure(model, batch, loss=loss_of)
        budget = find_ranks().largest(between(profile, 0.4))
        with _clock(rank, fails_at=2 * NUM_BLOCKS if fails else 0):
            fitted = recoup.fit(model, batch, budget=budget, loss=loss_of)
        _assert_one_plan(fitted)
        check = _assert_without_the_slowest if fails else _assert_slowest_decided
        check(fitted)
        assert not fitted.plan.keeps_everything
        assert fitted.verification.gradients == "bit-equal"
        assert fitted.plan.predicted_bytes == pytest.approx(fitted.verification.peak_bytes, rel=0.01)
        assert fitted.plan.profile.residents.parameter_bytes == sum(
            local(p).untyped_storage().nbytes() for p in model.parameters()
        )
        found, number = _train_counting(model, batch)
        assert_same(found, expected)
        assert number == num_gathers
        # Made for a Net, on an FSDPNet or a Net.
        other = _shard(recoup.apply(make_model(), fitted.plan), **settings)
        assert_same(_train_counting(other, batch)[0], expected)


def _gather_two_ahead(model: Net) -> Net:
    blocks = list(model.blocks)
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
        block.set_modules_to_backward_prefetch(blocks[max(0, index - 2) : index][::-1])
    model.set_modules_to_forward_prefetch(blocks[:2])
    model.set_modules_to_backward_prefetch(blocks[:-3:-1])
    return model


def _make_frozen() -> Net:
    """But for norms and the last layer: what is gathered sets the peak already in the forward."""
    model = make_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "last" in name)
    return model


def _shard_children(model: Net) -> Net:
    """So that the root has no parameters of its own."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model.first, model.last):
        fully_shard(layer, mesh=mesh)
    return _gather_two_ahead(_shard(model, mesh))


def sharded_with_small_batches(rank: int) -> None:
    """Parameters and gradients set the peak, to the byte: whatever is gathered ahead, stays, or has another dtype."""
    stays, mixed = _SETTINGS[1], _SETTINGS[3]
    for model in (
        _shard_children(make_model()),
        _shard_children(_make_frozen()),
        _shard(_make_frozen(), **mixed),
    ):
        fitted = recoup.fit(model, batch_of(rank, size=2), budget="1GiB", loss=loss_of)
        assert fitted.plan.predicted_bytes == fitted.verification.peak_bytes
    ways = (_gather_two_ahead, lambda model: model)
    for settings, prepare in combined(({}, stays, mixed, stays | mixed), ways):
        batch, model = batch_of(rank, size=2), prepare(_shard(make_model(), **settings))
        fitted = recoup.fit(model, batch, budget="1GiB", loss=loss_of)
        assert fitted.verification.gradients == "bit-equal"
        assert fitted.plan.predicted_bytes == fitted.verification.peak_bytes, settings
        expected, num_gathers = _train_counting(prepare(_shard(make_model(), **settings)), batch)
        found, number = _train_counting(recoup.apply(model, UniformSegments(2)), batch)
        assert_same(found, expected)
        assert number == num_gathers


def _accumulated_peak(model: Net, batch: Tensor, *, is_reducing: bool) -> int:
    """Of three micro-batches, of which those before the last reduce gradients, or do not."""
    living = {local(p).untyped_storage() for p in model.parameters()} | {batch.untyped_storage()}
    meter, shards = CpuMeter(), Shards(model)
    meter.waits = True
    with meter.watching():
        meter.follow(shards.storages())
        before_bytes = meter.begin()
        for is_last in (False, False, True):
            model.set_requires_gradient_sync(is_last or is_reducing)
            gc.collect()
            output = model(batch)
            loss_of(output).backward()
            del output
        peak_bytes = meter.peak_bytes() - before_bytes
    model.zero_grad()
    return peak_bytes + sum(storage.nbytes() for storage in living)


def sharded_and_accumulating(rank: int) -> None:
    """Shares of the gradients are there from the start, or all of them; parameters get gradients of their own too."""
    stays, mixed = _SETTINGS[1], _SETTINGS[3]
    for settings, accumulates, size in combined(({}, stays, mixed), ("unreduced", True), (2, 64)):
        batch, model = batch_of(rank, size), _shard(make_model(), **settings)
        profile = recoup.measure(model, batch, loss=loss_of, accumulates=accumulates)
        for budget in (recoup.minimum_budget(profile), profile.plain_bytes):
            fitted = recoup.fit(
                model,
                batch,
                budget=find_ranks().largest(budget),
                loss=loss_of,
                accumulates=accumulates,
                race=False,
            )
            predicted = fitted.plan.predicted_bytes
            assert predicted == pytest.approx(fitted.verification.peak_bytes, rel=1e-3), settings
            assert fitted.plan.keeps_everything or predicted < profile.plain_bytes
            assert fitted.verification.gradients == "bit-equal"
            peak_bytes = _accumulated_peak(model, batch, is_reducing=accumulates is True)
            largest_bytes = find_ranks().largest(peak_bytes)
            assert largest_bytes == pytest.approx(fitted.verification.peak_bytes, rel=0.01)
            recoup.remove(model)
    # Gradients that wait to be reduced could not be put back.
    batch, model = batch_of(rank, 64), _shard(make_model())
    for is_reducing, said in ((False, "does not reduce gradients"), (True, "wait to be reduced")):
        model.set_requires_gradient_sync(is_reducing)
        with pytest.raises(SampleError, match=said):
            recoup.fit(model, batch, budget="1GiB", loss=loss_of, accumulates=True)
        model.set_requires_gradient_sync(False)
        loss_of(model(batch)).backward()

    def accumulate(model: Net) -> dict[str, Tensor]:
        for is_reducing in (False, True):
            model.set_requires_gradient_sync(is_reducing)
            loss_of(model(batch)).backward()
        return gradients(model)

    expected, model = accumulate(_shard(make_model())), _shard(make_model())
    _fit(model, batch, accumulates="unreduced")
    assert_same(accumulate(model), expected)
    # A step that turns reductions off by itself.
    model, found = _shard(make_model()), {}

    def step() -> None:
        model.zero_grad()
        found.update(accumulate(model))

    profile = recoup.measure(model, step=step)
    assert profile.accumulates == "unreduced"
    fitted = recoup.fit(model, step=step, budget=find_ranks().largest(between(profile, 0.5)))
    assert fitted.verification.gradients == "bit-equal"
    assert fitted.verification.peak_bytes <= fitted.plan.budget_bytes
    step()
    assert_same(found, expected)
    with pytest.raises(SampleError, match="accumulates must be True, False or 'unreduced'; got 'sometimes'"):
        recoup.fit(model, batch, budget="1GiB", loss=loss_of, accumulates="sometimes")


class _Decoder(nn.Module):
    """Whose head is the last parameter of its root, and may share its weight with the embedding."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(300, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 300, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


_KEPT = {"reshard_after_forward": False}
_WAYS: dict[str, tuple[bool, list[tuple[list[str], dict[str, bool]]]]] = {
    "as transformers": (False, [(["embed"], {}), (["norm", "head"], _KEPT)]),
    "tied": (True, [(["norm", "embed", "head"], _KEPT)]),
    "gathered twice": (False, [(["norm", "head"], {})]),
    "one by one": (False, [(["embed"], {}), (["norm"], {}), (["head"], {})]),
    "the root": (False, []),
}


def _shard_decoder(way: str, **settings: Any) -> _Decoder:
    is_tied, groups = _WAYS[way]
    model, mesh = _Decoder(is_tied=is_tied), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **settings)
    for names, others in groups:
        fully_shard([model.get_submodule(name) for name in names], mesh=mesh, **settings | others)
    return fully_shard(model, mesh=mesh, **settings)


def _assert_exact(rank: int, make: Callable[[], nn.Module], *, size: int, accumulates: Any = False) -> None:
    """The predicted peak of the plain step."""
    tokens = torch.randint(300, (size, 16), generator=torch.Generator().manual_seed(rank))
    fitted = recoup.fit(make(), tokens, budget="1GiB", loss=loss_of, accumulates=accumulates, race=False)
    assert fitted.plan.predicted_bytes == fitted.verification.peak_bytes
    assert fitted.verification.gradients == "bit-equal"


def sharded_in_groups(rank: int) -> None:
    """Modules of several units that are gathered as one, or by themselves, or with the root: to the byte."""
    steps = ((False, 1), (False, 24), ("unreduced", 1))
    for settings, way, (accumulates, size) in combined(({}, _SETTINGS[3]), tuple(_WAYS), steps):
        _assert_exact(rank, partial(_shard_decoder, way, **settings), size=size, accumulates=accumulates)


def sharded_with_a_root_that_is_freed(rank: int) -> None:
    """After its forward, as all others: it is not there while the loss is computed."""
    for way, size in combined(("gathered twice", "the root"), (1, 24)):
        _assert_exact(rank, partial(_shard_decoder, way, **_SETTINGS[2]), size=size)


def _second_dimension(parameter: nn.Parameter) -> Shard:
    return Shard(min(1, parameter.ndim - 1))


def sharded_along_the_second_dimension(rank: int) -> None:
    """Gathered parameters, and gradients before they are reduced, are copied once more: to the byte."""
    along: dict[str, Any] = {"shard_placement_fn": _second_dimension}
    for settings in ({}, _KEPT, _SETTINGS[3]):
        batch, model = batch_of(rank, size=2), _shard(make_model(), **along, **settings)
        fitted = recoup.fit(model, batch, budget="1GiB", loss=loss_of, race=False)
        assert fitted.plan.predicted_bytes == fitted.verification.peak_bytes
        assert fitted.verification.gradients == "bit-equal"
    for way, accumulates in (("gathered twice", "unreduced"), ("one by one", True), ("the root", False)):
        _assert_exact(rank, partial(_shard_decoder, way, **along), size=1, accumulates=accumulates)
    _assert_exact(rank, partial(_shard_decoder, "gathered twice", **along, **_SETTINGS[2]), size=1)
    batch, model = batch_of(rank), _shard(make_model(), **along)
    budget = find_ranks().largest(between(recoup.measure(model, batch, loss=loss_of), 0.4))
    fitted = recoup.fit(model, batch, budget=budget, loss=loss_of, race=False)
    assert not fitted.plan.keeps_everything
    assert fitted.plan.predicted_bytes == pytest.approx(fitted.verification.peak_bytes, rel=0.01)
    expected, num_gathers = _train_counting(_shard(make_model(), **along), batch)
    found, number = _train_counting(model, batch)
    assert_same(found, expected)
    assert number == num_gathers


def sharded_with_more_buffers(rank: int) -> None:
    """In which gradients are reduced: as many of them are held as the user says, to the byte."""
    if not hasattr(FSDPModule, "set_reduce_scatter_max_input_buffers"):
        return  # until torch 2.12

    def make(number: int, **settings: Any) -> nn.Module:
        model = _shard_decoder("one by one", **settings)
        model.set_reduce_scatter_max_input_buffers(number)
        return model

    for number, accumulates in ((2, False), (99, False), (2, "unreduced")):
        _assert_exact(rank, partial(make, number), size=1, accumulates=accumulates)
    _assert_exact(rank, partial(make, 3, **_SETTINGS[3]), size=1)


def _shard_lasting(model: Net, **settings: Any) -> Net:
    _shard(model, **settings).set_reshard_after_backward(False)
    return model


def _train_micro_batches(model: Net, batch: Tensor) -> dict[str, Tensor]:
    """Of which the last alone frees parameters after its backward, as in a pipeline."""
    for is_last in (False, False, True):
        model.set_reshard_after_backward(is_last)
        model.set_is_last_backward(is_last)
        loss_of(model(batch)).backward()
    found = {name: gradient.clone() for name, gradient in gradients(model).items()}
    model.zero_grad()
    return found


def sharded_with_lasting_parameters(rank: int) -> None:
    """They stay gathered after a backward, and the next micro-batch begins with them: to the byte."""
    steps = ((2, False), (64, False), (2, True), (2, "unreduced"))
    for settings, (size, accumulates) in combined(({}, _KEPT, _SETTINGS[3]), steps):
        batch, model = batch_of(rank, size), _shard_lasting(make_model(), **settings)
        fitted = recoup.fit(model, batch, budget="1GiB", loss=loss_of, accumulates=accumulates, race=False)
        assert fitted.plan.predicted_bytes == fitted.verification.peak_bytes
        assert fitted.verification.gradients == "bit-equal"
        # Nothing of the fit's own steps stays gathered.
        assert all(type(parameter).__name__ == "DTensor" for parameter in model.parameters())
        if accumulates is True:
            model.set_is_last_backward(True)
            peak_bytes = find_ranks().largest(_accumulated_peak(model, batch, is_reducing=True))
            assert peak_bytes == pytest.approx(fitted.plan.predicted_bytes, rel=0.01)

    def make(way: str) -> nn.Module:
        model = _shard_decoder(way)
        model.set_reshard_after_backward(False)
        return model

    for way in ("tied", "gathered twice", "the root"):
        _assert_exact(rank, partial(make, way), size=1)
    # After a micro-batch that has left them gathered, and before one.
    batch, models = batch_of(rank, size=2), [_shard_lasting(make_model()) for _ in range(2)]
    loss_of(models[0](batch)).backward()
    after, before = (recoup.measure(model, batch, loss=loss_of, accumulates=True) for model in models)
    assert after.residents == before.residents
    assert after.plain_bytes == before.plain_bytes
    fitted = [
        recoup.fit(model, batch, budget="1GiB", loss=loss_of, accumulates=True, race=False)
        for model in models
    ]
    assert fitted[0].plan.predicted_bytes == fitted[1].plan.predicted_bytes
    # Some of them.
    batch, model = batch_of(rank, size=2), _gather_two_ahead(_shard(make_model()))
    for block in model.blocks[::2]:
        block.set_reshard_after_backward(False)
    fitted = recoup.fit(model, batch, budget="1GiB", loss=loss_of, race=False)
    assert fitted.plan.predicted_bytes == fitted.verification.peak_bytes
    batch, model = batch_of(rank), _shard_lasting(make_model())
    profile = recoup.measure(model, batch, loss=loss_of, accumulates=True)
    budget = find_ranks().largest(between(profile, 0.4))
    fitted = recoup.fit(model, batch, budget=budget, loss=loss_of, accumulates=True)
    assert not fitted.plan.keeps_everything
    assert fitted.plan.predicted_bytes == pytest.approx(fitted.verification.peak_bytes, rel=0.01)
    expected = _train_micro_batches(_shard(make_model()), batch)
    assert_same(_train_micro_batches(model, batch), expected)
    # A step that says so by itself, for its micro-batches before the last.
    model = _shard(make_model())
    small = batch_of(rank, size=2)
    shown = recoup.measure(model, step=lambda: _train_micro_batches(model, small))
    freed = recoup.measure(_shard(make_model()), small, loss=loss_of, accumulates=True)
    assert shown.plain_bytes > 1.2 * freed.plain_bytes


def sharded_to_larger_shards(rank: int) -> None:
    """Between forward and backward, with an integer for ``reshard_after_forward``: to the byte."""
    settings: dict[str, Any] = {"reshard_after_forward": 2}
    ways = ((2, _gather_two_ahead), (64, lambda model: model))
    for more, (size, prepare) in combined(({}, _SETTINGS[3]), ways):
        batch, model = batch_of(rank, size), prepare(_shard(make_model(), **settings, **more))
        fitted = recoup.fit(model, batch, budget="1GiB", loss=loss_of, race=False)
        assert fitted.plan.predicted_bytes == fitted.verification.peak_bytes
        assert fitted.verification.gradients == "bit-equal"
    for way, accumulates in (("gathered twice", True), ("one by one", "unreduced"), ("the root", False)):
        make = partial(_shard_decoder, way, **settings, **_SETTINGS[3])
        _assert_exact(rank, make, size=1, accumulates=accumulates)
    batch, model = batch_of(rank), _shard(make_model(), **settings)
    budget = find_ranks().largest(between(recoup.measure(model, batch, loss=loss_of), 0.4))
    fitted = recoup.fit(model, batch, budget=budget, loss=loss_of, race=False)
    assert not fitted.plan.keeps_everything
    assert fitted.plan.predicted_bytes == pytest.approx(fitted.verification.peak_bytes, rel=0.01)
    expected, num_gathers = _train_counting(_shard(make_model(), **settings), batch)
    found, number = _train_counting(model, batch)
    assert_same(found, expected)
    assert number == num_gathers
    # Of a run that ended in between, nothing stays.
    model = _shard(make_model(), **settings)
    shards = Shards(model)
    model(batch)
    shards.put_back()
    kept = [one._sharded_post_forward_param_data for group in shards._groups for one in group.fsdp_params]
    assert kept == [None] * len(kept)
    assert_same(_train(model, batch), expected)


def sharded_inside_units(rank: int) -> None:
    """A unit's parameters are gathered in several groups, of which some may stay: what is predicted is safe."""

    def make(**settings: Any) -> Net:
        model, mesh = make_model(), init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block.up, mesh=mesh, **settings)
            fully_shard(block.down, mesh=mesh, **settings)
        return _shard(model, mesh)

    fitted = recoup.fit(
        make(reshard_after_forward=False), batch_of(rank, size=2), budget="1GiB", loss=loss_of, race=False
    )
    assert fitted.verification.peak_bytes <= fitted.plan.predicted_bytes
    batch, model = batch_of(rank), make()
    budget = find_ranks().largest(between(recoup.measure(model, batch, loss=loss_of), 0.3))
    fitted = recoup.fit(model, batch, budget=budget, loss=loss_of, race=False)
    assert not fitted.plan.keeps_everything
    assert fitted.verification.gradients == "bit-equal"
    assert fitted.verification.peak_bytes <= fitted.plan.predicted_bytes <= budget
    expected, num_gathers = _train_counting(make(), batch)
    found, number = _train_counting(model, batch)
    assert_same(found, expected)
    assert number == num_gathers


def _captures(rank: int, make: Callable[[], nn.Module], share: float) -> None:
    """Captured units read gathered parameters, whatever becomes of these after the forward."""
    batch, model = batch_of(rank), make()
    profile = recoup.measure(model, batch, loss=loss_of, engine="captured")
    least_bytes = recoup.minimum_budget(profile)
    budget = find_ranks().largest(int(least_bytes + share * (profile.plain_bytes - least_bytes)))
    fitted = recoup.fit(model, batch, budget=budget, loss=loss_of, engine="captured", race=False)
    assert any(fitted.plan.recipe(leaf).cut is not None for leaf in leaves_of(fitted.plan.items))
    assert not fitted.plan.keeps_everything
    assert fitted.verification.gradients == "bit-equal"
    assert fitted.plan.predicted_bytes == pytest.approx(fitted.verification.peak_bytes, rel=0.01)
    expected, num_gathers = _train_counting(make(), batch)
    found, number = _train_counting(model, batch)
    assert_same(found, expected)
    assert number == num_gathers


def sharded_and_captured(rank: int) -> None:
    _captures(rank, lambda: _shard(make_model(), **_SETTINGS[3]), 0.5)


def sharded_and_captured_in_every_setting(rank: int) -> None:
    for settings, share in itertools.product(_SETTINGS, (0.0, 0.5)):
        _captures(rank, partial(lambda own: _shard(make_model(), **own), settings), share)
        _captures(rank, partial(lambda own: _shard(_make_frozen(), **own), settings), share)
    _captures(rank, lambda: _shard(_make_frozen(), **_SETTINGS[1] | _SETTINGS[3]), 0.0)
    _captures(rank, lambda: _shard_children(make_model()), 0.5)
    _captures(rank, lambda: _parallelize(make_model()), 0.5)


def compiled_and_sharded(rank: int) -> None:
    """The usual order: blocks are compiled, then sharded, then the model is fitted."""

    def make(settings: dict[str, Any]) -> Net:
        model = make_model()
        for block in model.blocks:
            block.compile()
        return _shard(model, **settings)

    batch = batch_of(rank)
    for settings in (_SETTINGS[0], _SETTINGS[4]):
        profile = recoup.measure(_shard(make_model(), **settings), batch, loss=loss_of)
        expected, num_gathers = _train_counting(make(settings), batch)
        model = make(settings)
        fitted = recoup.fit(
            model, batch, budget=find_ranks().largest(between(profile, 0.4)), loss=loss_of, race=False
        )
        assert fitted.plan.profile.engine == "compiled"
        assert not fitted.plan.keeps_everything
        assert fitted.plan.predicted_bytes == pytest.approx(fitted.verification.peak_bytes, rel=0.01)
        found, number = _train_counting(model, batch)
        for name, gradient in expected.items():
            torch.testing.assert_close(local(found[name]), local(gradient), rtol=1e-4, atol=1e-6)
        assert number == num_gathers
        recoup.remove(model)
        assert all(block._compiled_call_impl is not None for block in model.blocks)


def does_not_fit_the_device(rank: int) -> None:
    """A sharded model, in the middle of a backward on all ranks: it trains as before."""
    batch, model, record = batch_of(rank), _shard(make_model()), RealSteps._record

    def record_failing(steps: RealSteps, left_out: Any) -> Any:
        _CALLS.update(blocks=0, fails_at=NUM_BLOCKS + 2)
        return record(steps, left_out)

    budget = find_ranks().largest(recoup.minimum_budget(recoup.measure(model, batch, loss=loss_of)))
    with (
        _clock(rank),
        patch.object(RealSteps, "_record", record_failing),
        pytest.raises(torch.OutOfMemoryError, match="no room for a block"),
    ):
        recoup.fit(model, batch, budget=budget, loss=loss_of)
    assert_same(_train(model, batch), _train(_shard(make_model()), batch))


def sharded_over_replicas(rank: int) -> None:
    """Hybrid sharding: the buffer of an all-reduce stays until the backward ends, unless it is the gradient itself."""
    batch = batch_of(rank, size=16)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    policies = MixedPrecisionPolicy(param_dtype=torch.bfloat16), MixedPrecisionPolicy()
    for policy, accumulates in combined(policies, (False, True, "unreduced")):
        model = _shard(make_model(), mesh, mp_policy=policy)
        fitted = recoup.fit(model, batch, budget="1GiB", loss=loss_of, accumulates=accumulates)
        assert fitted.plan.predicted_bytes == pytest.approx(fitted.verification.peak_bytes, rel=0.01)
        if accumulates is False:
            _assert_one_plan(fitted)
            assert fitted.verification.gradients == "bit-equal"
            expected = _train(_shard(make_model(), mesh, mp_policy=policy), batch)
            assert_same(_train(model, batch), expected)
    # Shares that wait to be summed up over replicas could not be put back.
    model = _shard(make_model(), mesh)
    for sums, said in ((False, "does not sum gradients over replicas"), (True, "wait to be reduced")):
        model.set_requires_all_reduce(sums)
        with pytest.raises(SampleError, match=said):
            recoup.fit(model, batch, budget="1GiB", loss=loss_of, accumulates=True)
        model.set_requires_all_reduce(False)
        loss_of(model(batch)).backward()


def a_sharded_step_of_the_users(rank: int) -> None:
    """It trains the model, which is as before afterwards."""
    batch = batch_of(rank)
    model = _shard(make_model())
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        optimizer.step()

    profile = recoup.measure(model, step=step, optimizer=optimizer)
    before = [local(p).clone() for p in model.parameters()]
    fitted = recoup.fit(
        model, step=step, budget=find_ranks().largest(between(profile, 0.5)), optimizer=optimizer
    )
    assert not fitted.plan.keeps_everything
    assert fitted.plan.predicted_bytes == pytest.approx(fitted.verification.peak_bytes, rel=0.01)
    assert all(map(torch.equal, map(local, model.parameters()), before))
    assert not optimizer.state


def sharded_in_segments(rank: int) -> None:
    """Gathered parameters of a segment that is replayed are there until their own backward; and optimizer state."""
    batch = batch_of(rank, size=512)
    model = _shard(make_model(12))
    optimizer = torch.optim.AdamW(model.parameters())
    step = TrainingStep(model, batch, loss=loss_of, optimizer=optimizer, ranks=find_ranks())
    measured = measure_step(begin_measurement(step, units=None), accumulates=False, unsafe={})
    profile = largest_profile(find_ranks().gathered(measured.profile(True, in_segments=True)))
    shards = sum(local(p).untyped_storage().nbytes() for p in model.parameters())
    assert profile.residents.optimizer_bytes == pytest.approx(2 * shards, rel=0.01)
    assert [unit.name for unit in profile.units] == [
        "first",
        *(f"blocks.{i}" for i in range(12)),
        "last",
        "loss",
    ]
    nested = segment(keep(1), segment(keep(2, 3)), keep(4))
    for items in (
        [*keep(0), segment(keep(1, 2, 3)), segment(keep(4, 5, 6)), *keep(7, 8, 9, 10, 11, 12, 13, 14)],
        [*keep(0), nested, *replay(5, 6, 7), segment(keep(8, 9)), *keep(10, 11, 12, 13, 14)],
    ):
        plan = plan_by_hand(profile, Schedule(actions_of(items)))
        recoup.apply(model, plan)
        peak_bytes = RealSteps(step, profile).record().peak_bytes
        assert plan.predicted_bytes == pytest.approx(peak_bytes, rel=0.01), plan.describe_units()


def _parallelize(model: Net) -> Net:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def tensor_parallel(rank: int) -> None:
    """Units with parameters and activations that are divided over ranks: their replays keep placements."""
    batch = batch_of(0)
    expected = _train(_parallelize(make_model()), batch)
    model = _parallelize(make_model())
    profile = recoup.measure(model, batch, loss=loss_of)
    held = sum(local(p).nbytes for p in model.parameters())
    assert profile.residents.gradient_bytes == held < sum(p.nbytes for p in model.parameters())
    with _clock(rank):
        fitted = recoup.fit(model, batch, budget=find_ranks().largest(between(profile, 0.4)), loss=loss_of)
    _assert_one_plan(fitted)
    _assert_slowest_decided(fitted)
    assert not fitted.plan.keeps_everything
    assert fitted.verification.gradients == "bit-equal"
    assert fitted.plan.predicted_bytes == pytest.approx(fitted.verification.peak_bytes, rel=0.01)
    assert_same(_train(model, batch), expected)
    # Arguments and outputs of these units are divided; and a span that feeds one the output of another.
    for policy in (EveryN(2), UniformSegments(2)):
        model = recoup.apply(_parallelize(make_model()), policy, units=["blocks.*.up", "blocks.*.down"])
        with sampling("always"):
            assert_same(_train(model, batch), expected)
    profile = recoup.measure(
        _parallelize(make_model()), batch, loss=loss_of, units=["blocks.*.up", "blocks.*.down"]
    )
    assert profile.residents.gradient_bytes == held


def a_step_of_the_users(rank: int) -> None:
    """It calls the wrapper, which reduces nothing while one rank may run other steps than another."""
    batch = batch_of(rank)
    wrapped = DistributedDataParallel(make_model())

    def step() -> None:
        loss_of(wrapped(batch)).backward()

    profile = recoup.measure(make_model(), batch, loss=loss_of)
    budget = between(profile, 0.4) + profile.residents.gradient_bytes
    fitted = recoup.fit(wrapped, step=step, budget=find_ranks().largest(budget))
    _assert_one_plan(fitted)
    assert_same(_train(wrapped, batch), _train(DistributedDataParallel(make_model()), batch))


def unequal_ranks(rank: int) -> None:
    """The largest batch decides; other models, and errors on one rank, are errors on all."""
    model = make_model()
    fitted = _fit(model, batch_of(rank, size=96 + 32 * rank))
    _assert_one_plan(fitted)
    alone = make_model()
    largest = recoup.measure(alone, batch_of(rank, size=96 + 32 * (dist.get_world_size() - 1)), loss=loss_of)
    found, expected = fitted.profile.problem.units, largest.problem.units
    assert [unit.options[0].held_bytes for unit in found] == [unit.options[0].held_bytes for unit in expected]
    assert fitted.plan.predicted_bytes == fitted.verification.peak_bytes

    def failing(output: Tensor) -> Tensor:
        if rank == 1:
            raise ZeroDivisionError("on rank 1 only")
        return loss_of(output)

    model = make_model()
    with pytest.raises(FitError, match="on rank 1 only"):
        recoup.fit(model, batch_of(rank), budget="1GiB", loss=failing)
    assert not any("forward" in vars(module) for module in model.modules())
    with pytest.raises(FitError, match=r"Rank 1 calls 'last' where rank 0 calls 'blocks\.2'"):
        recoup.fit(make_model(3 - min(rank, 1)), batch_of(rank), budget="1GiB", loss=loss_of)
    with pytest.raises(BudgetError, match="budget"):
        recoup.fit(make_model(), batch_of(rank), budget=10**5 * (10 - 9 * rank), loss=loss_of)
    # Alone, ranks fit what they like.
    fitted = recoup.fit(make_model(3 - rank % 2), batch_of(rank), budget="1GiB", loss=loss_of, together=False)
    assert fitted.profile.residents.other_bytes == batch_of(rank).nbytes


class _Failing(nn.Module):
    """Fails when it is told to."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.fails = inner, False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ZeroDivisionError("on rank 1 only")
        out: Tensor = self.inner(x)
        return out


def runs_out_of_memory_while_calls_are_watched(rank: int) -> None:
    """One rank alone, between collectives of its units: it does not begin again while the other waits in them.

    To be run last: the process group is aborted.
    """
    model, original, calls = _parallelize(make_model()), nn.functional.layer_norm, itertools.count(1)

    def layer_norm(*args: Any, **kwargs: Any) -> Tensor:
        if next(calls) == 3 and rank == 1:
            raise torch.OutOfMemoryError("on rank 1 only")
        return original(*args, **kwargs)

    begin = time.monotonic()
    with (
        patch.multiple(meetings, _POLL_S=0.1, _GRACE_S=0.5),
        patch.object(nn.functional, "layer_norm", layer_norm),
        pytest.raises(FitError, match=r"^Rank 1 failed: OutOfMemoryError: on rank 1 only"),
    ):
        recoup.fit(model, batch_of(0), budget="1GiB", loss=loss_of)
    assert time.monotonic() - begin < 30
    dist.destroy_process_group()


def fails_in_a_real_step(rank: int) -> None:
    """One rank alone, before it gathers parameters: the others do not wait for it, and all raise its error.

    To be run last: the process group is aborted.
    """
    model = make_model()
    failing = model.blocks[2] = _Failing(model.blocks[2])
    record = RealSteps._record

    def record_failing(steps: RealSteps, left_out: Any) -> Any:
        failing.fails = rank == 1
        return record(steps, left_out)

    _shard(model)
    begin = time.monotonic()
    with (
        patch.multiple(meetings, _POLL_S=0.1, _GRACE_S=0.5),
        patch.object(RealSteps, "_record", record_failing),
        pytest.raises(FitError, match=r"^Rank 1 failed: ZeroDivisionError: on rank 1 only\n.* aborted"),
    ):
        recoup.fit(model, batch_of(rank), budget="1GiB", loss=loss_of)
    assert time.monotonic() - begin < 30
    assert not any("forward" in vars(module) for module in model.modules())
    assert dist.get_rank() == rank
    with pytest.raises(RuntimeError, match=r"pair closure|Connection"):
        dist.barrier()
    dist.destroy_process_group()
