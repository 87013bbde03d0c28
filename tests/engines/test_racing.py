"""Races: who takes part, who wins, and that a race leaves no trace. Seconds come from a clock that counts forwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup.devices.meter import CpuMeter, Timing
from recoup.engines import is_applied, real_steps
from recoup.engines.racing import Candidate, Lap, race, take_turns
from recoup.engines.real_steps import RealSteps
from recoup.errors import OverBudgetError
from recoup.model.recipe import RECOMPUTE
from recoup.model.step import TrainingStep
from recoup.plans.by_hand import plan_by_hand, recomputing, usual_plan
from recoup.plans.model_plan import ModelPlan, plan
from recoup.plans.rivals import rivals_of

NUM_BLOCKS = 6


class Block(nn.Module):
    """Its parts save unequal bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = (
            nn.Sequential(nn.Linear(16, n), nn.GELU(), nn.Linear(n, 16)) for n in (64, 32)
        )
        self.num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        COUNTED["block"] += 1
        return x + self.narrow(x + self.wide(x))


COUNTED = {"block": 0, "wide": 0}


def model_and_batch() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
    for block in model:
        block.wide.register_forward_pre_hook(_count_wide)
    return model, torch.randn(64, 16)


def _count_wide(module: nn.Module, args: Any) -> None:
    COUNTED["wide"] += 1


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], list[float]]:
    """Lets a step take so many seconds for each call of a block, and of the wide part inside one."""

    def set_clock(block_s: float, wide_s: float) -> list[float]:
        timed: list[float] = []

        def time_step(meter: CpuMeter, run: Callable[[], Any]) -> Timing:
            before = dict(COUNTED)
            run()
            num = {name: COUNTED[name] - before[name] for name in COUNTED}
            timed.append(block_s * num["block"] + wide_s * num["wide"])
            return Timing(timed[-1], 0.0)

        monkeypatch.setattr(CpuMeter, "time_step", time_step)
        return timed

    return set_clock


def profile_of(model: nn.Module, batch: Tensor) -> recoup.Profile:
    return recoup.measure(model, batch, loss=loss_of, units="*")


def by_hand(profile: recoup.Profile, units: list[int], budget: int) -> ModelPlan:
    return plan_by_hand(profile, recomputing(profile, units), budget)


def run_race(model: nn.Module, batch: Tensor, *plans: ModelPlan) -> Any:
    step = TrainingStep(model, batch, loss=loss_of)
    candidates = [Candidate(f"plan {index}", one) for index, one in enumerate(plans)]
    return race(RealSteps(step, plans[0].profile), candidates)


# Turns


def turns(*rows: list[float]) -> list[Callable[[], Timing]]:
    """Ways that take these seconds, one after the other."""
    return [partial(next, map(Timing, row, repeat(0.0))) for row in rows]


def test_ways_take_turns() -> None:
    order: list[str] = []

    def way(name: str) -> Callable[[], Timing]:
        return lambda: (order.append(name), Timing(0.25, 0.0))[1]

    times = take_turns([way("a"), way("b"), way("plain")], num_racing=2, enough_s=0.75)
    assert "".join(name[0] for name in order) == "abpabpabp"
    assert times == [(0.25,) * 3] * 3


def test_five_rounds_are_enough() -> None:
    assert take_turns(turns([0.01] * 9), num_racing=1, enough_s=1.0) == [(0.01,) * 5]


def test_a_race_has_two_rounds_however_long_a_step_takes() -> None:
    alone = take_turns(turns([2.0] * 5), num_racing=1, enough_s=1.0)
    assert alone == [(2.0,)]
    raced = take_turns(turns([2.0] * 5, [1.9] * 5), num_racing=2, enough_s=1.0)
    assert raced == [(2.0, 2.0), (1.9, 1.9)]


def test_of_two_rounds_who_loses_the_first_does_not_run_the_second() -> None:
    """To win, it would have to be faster in both. What does not race is timed in both."""
    rows = [0.2] * 5, [0.19, 0.3], [0.201, 0.1], [0.5] * 5
    times = take_turns(turns(*rows), num_racing=3, enough_s=0.4)
    assert times == [(0.2, 0.2), (0.19, 0.3), (0.201,), (0.5, 0.5)]
    # However fast the second step is, and even where the host turns out to be busy: there is no third round.
    quicker = take_turns(turns([0.08, 0.05, 0.05], [0.081, 0.04, 0.04]), num_racing=2, enough_s=0.15)
    assert quicker == [(0.08, 0.05), (0.081,)]
    # Of three rounds it may still win two.
    more = take_turns(turns([0.2] * 5, [0.201, 0.1, 0.1]), num_racing=2, enough_s=0.6)
    assert more == [(0.2,) * 3, (0.201, 0.1, 0.1)]


def test_who_is_clearly_behind_leaves_the_race() -> None:
    """The plan stays, and so does what does not race."""
    rows = [0.2] * 5, [0.12] * 5, [0.1] * 5, [0.109] * 5, [0.5] * 5
    times = take_turns(turns(*rows), num_racing=4, enough_s=9.0)
    assert [len(own) for own in times] == [5, 2, 5, 5, 5]


# Who is faster


@pytest.mark.parametrize(
    ("rival", "planned", "is_faster"),
    [
        ((1.0, 1.0), (1.2, 1.2), True),
        ((1.0, 1.0), (1.005, 1.005), False),  # noise
        ((1.0, 1.3), (1.1, 1.2), False),  # in one of two rounds
        ((1.0, 1.3, 1.0), (1.1, 1.2, 1.1), True),
        ((1.0, 1.0), (1.2, 1.2, 1.3), True),
        ((), (1.2,), False),
    ],
)
def test_a_rival_has_to_be_faster_by_more_than_noise(
    rival: tuple[float, ...], planned: tuple[float, ...], is_faster: bool
) -> None:
    assert Lap(rival).is_faster_than(Lap(planned)) == is_faster


@pytest.mark.parametrize("block_s", [0.05, 0.0])
def test_real_steps_decide(clock: Any, block_s: float) -> None:
    """Whatever was predicted: what is slow here is the call of a block, or of a part of it."""
    model, batch = model_and_batch()
    profile = profile_of(model, batch)
    most, fewer = (by_hand(profile, list(range(count)), profile.plain_bytes) for count in (5, 2))
    clock(block_s, 0.01)
    found = run_race(model, batch, most, fewer)
    assert found.winner is fewer
    assert [one.name for one in found.finishers] == ["plan 1", "plan 0"]
    # A replayed block runs its wide part again.
    each_s = block_s + 0.01
    assert [one.seconds for one in found.finishers] == pytest.approx([8 * each_s, 11 * each_s])
    assert found.plain.seconds == pytest.approx(6 * each_s)
    assert [one.is_kept for one in found.finishers] == [True, False]


def test_each_candidate_keeps_its_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step under a plan that was just applied takes longer."""
    model, batch = model_and_batch()
    profile = profile_of(model, batch)
    seen: list[tuple[str, int]] = []

    def time_step(meter: CpuMeter, run: Callable[[], Any]) -> Timing:
        root = vars(model).get("forward")
        if root is not None:
            seen.append(
                ("planned" if type(model[0].forward).__name__ == "UnitForward" else "other", id(root))
            )
        run()
        return Timing(0.01, 0.0)

    monkeypatch.setattr(CpuMeter, "time_step", time_step)
    ran = run_race(model, batch, by_hand(profile, [0, 1], 2**40), by_hand(profile, [2, 3], 2**40))
    assert [len(lap.times_s) for _, lap in ran.laps] == [5, 5]
    planned, other = ([one for name, one in seen if name == wanted] for wanted in ("planned", "other"))
    assert (len(planned), len(set(planned))) == (5, 1)
    assert (len(other), len(set(other))) == (6, 1)  # the first of which is not counted


def test_between_equals_the_plan_stays(clock: Any) -> None:
    model, batch = model_and_batch()
    profile = profile_of(model, batch)
    first, last = (by_hand(profile, units, profile.plain_bytes) for units in ([0, 1], [2, 3]))
    clock(0.1, 0.0)
    assert run_race(model, batch, first, last).winner is first
    assert run_race(model, batch, last, first).winner is last


def test_a_faster_rival_that_passes_the_budget_loses(clock: Any) -> None:
    model, batch = model_and_batch()
    profile = profile_of(model, batch)
    all_units = by_hand(profile, list(range(NUM_BLOCKS)), 0)
    budget = all_units.predicted_bytes + 100
    planned, rival = (by_hand(profile, list(range(count)), budget) for count in (NUM_BLOCKS, 1))
    clock(0.1, 0.0)
    found = run_race(model, batch, planned, rival)
    assert found.winner is planned
    assert found.finishers[0].name == "plan 1"
    assert found.finishers[0].peak_bytes > budget
    assert not found.finishers[0].is_kept


def test_a_plan_that_passes_its_budget_is_not_timed(clock: Any) -> None:
    model, batch = model_and_batch()
    profile = profile_of(model, batch)
    planned = by_hand(profile, [0], profile.residents.total_bytes)
    timed = clock(0.1, 0.0)
    found = run_race(model, batch, planned, by_hand(profile, [0, 1], profile.plain_bytes))
    assert timed == []
    assert found.winning.recorded.peak_bytes > planned.budget_bytes
    recoup.apply(model, planned)
    with pytest.raises(OverBudgetError, match="above the budget"):
        recoup.verify(model, planned, batch, loss=loss_of)


def test_a_rival_that_cannot_run_is_no_reason_to_fail(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = model_and_batch()
    profile = profile_of(model, batch)
    planned, rival = (by_hand(profile, units, profile.plain_bytes) for units in ([0, 1, 2], [4]))
    clock(0.1, 0.0)
    run = Block.forward

    def forward(block: Block, x: Tensor) -> Tensor:
        if block is model[4] and recoup.engines.is_applied(model) and "forward" in vars(block):
            raise torch.OutOfMemoryError("no room")
        return run(block, x)

    monkeypatch.setattr(Block, "forward", forward)
    found = run_race(model, batch, planned, rival)
    assert found.winner is planned
    assert found.finishers[-1].seconds == float("inf")


# Who takes part


def middle(profile: recoup.Profile) -> int:
    return (recoup.minimum_budget(profile) + profile.plain_bytes) // 2


def test_the_usual_plan_fits_and_recomputes_as_little_as_can_be() -> None:
    model, batch = model_and_batch()
    profile = profile_of(model, batch)
    budget = middle(profile)
    usual = usual_plan(profile, budget)
    assert usual is not None
    name, first = usual
    count = int(name.removeprefix("recompute the first ").split()[0])
    assert 1 < count < NUM_BLOCKS
    assert [first.recipe(leaf) == RECOMPUTE for leaf in first.items[:NUM_BLOCKS]] == [
        index < count for index in range(NUM_BLOCKS)
    ]
    assert first.predicted_bytes <= budget < by_hand(profile, list(range(count - 1)), budget).predicted_bytes
    assert usual_plan(profile, profile.residents.optimizer_peak_bytes) is None


def test_rivals_do_other_work_than_the_plan() -> None:
    model, batch = model_and_batch()
    profile = profile_of(model, batch)
    budget = middle(profile)
    usual = usual_plan(profile, budget)
    assert usual is not None
    name, first = usual
    assert name not in [rival for rival, _ in rivals_of(first)]
    # The same number of other units of the same kind.
    count = int(name.removeprefix("recompute the first ").split()[0])
    assert len({unit.kind for unit in profile.units[1:5]}) == 1
    other = by_hand(profile, [0, *range(5 - count + 1, 5)], budget)
    assert other.items != first.items
    assert rivals_of(other) == []
    assert rivals_of(by_hand(profile, list(range(NUM_BLOCKS)), budget)) == [usual]


def test_a_plan_that_keeps_everything_has_no_rivals() -> None:
    model, batch = model_and_batch()
    profile = profile_of(model, batch)
    assert rivals_of(plan(profile, 2 * profile.plain_bytes)) == []


# In a fit


def fit_in_the_middle(model: nn.Module, batch: Tensor, **options: Any) -> recoup.Fitted:
    budget = middle(profile_of(model, batch))
    return recoup.fit(model, batch, budget=budget, loss=loss_of, units="*", **options)


def test_a_fit_keeps_the_winner_and_says_so(clock: Any) -> None:
    model, batch = model_and_batch()
    clock(0.0, 0.01)  # parts that are replayed cost as much as whole blocks
    fitted = fit_in_the_middle(model, batch)
    seen = fitted.verification
    assert seen.gradients == "bit-equal"
    assert seen.peak_bytes <= fitted.plan.budget_bytes
    assert sum(one.is_kept for one in seen.race) == 1
    kept = next(one for one in seen.race if one.is_kept)
    assert kept.seconds == seen.seconds <= 1.01 * min(one.seconds for one in seen.race)
    assert kept.peak_bytes == seen.peak_bytes
    assert f"{kept.name} " in str(fitted)
    assert "Raced on real steps" in " ".join(str(fitted).split())
    assert is_applied(model)
    # What runs from now on is the winner: it takes as long as in the race.
    before = COUNTED["wide"]
    loss_of(model(batch)).backward()
    assert 0.01 * (COUNTED["wide"] - before) == pytest.approx(seen.seconds)


def test_without_a_race_the_plan_is_the_planners(clock: Any) -> None:
    model, batch = model_and_batch()
    clock(0.0, 0.01)
    fitted = fit_in_the_middle(model, batch, race=False)
    assert fitted.verification.race == ()
    assert "Raced" not in str(fitted)
    assert fitted.plan == plan(fitted.profile, fitted.plan.budget_bytes)


def test_predictions_learn_from_the_race(clock: Any) -> None:
    """A clock that knows nothing of measured seconds."""
    model, batch = model_and_batch()
    clock(0.02, 0.01)
    fitted = fit_in_the_middle(model, batch)
    seen = fitted.verification
    assert len(seen.race) > 1
    assert fitted.plan.predicted_s == pytest.approx(seen.seconds, rel=0.05)
    again = ModelPlan.from_json(fitted.plan.to_json())
    assert again == fitted.plan


def test_one_of_several_processes_does_not_race_alone(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recoup.fitting.one_fit, "num_processes", lambda: 2)
    model, batch = model_and_batch()
    clock(0.0, 0.01)
    assert fit_in_the_middle(model, batch).verification.race == ()


def test_a_race_leaves_no_trace() -> None:
    model, batch = model_and_batch()
    model.append(nn.BatchNorm1d(16))
    model.append(nn.Dropout(0.5))
    loss_of(model(batch)).backward()
    gradients = [p.grad for p in model.parameters()]
    values = [gradient.clone() for gradient in gradients]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    profile = profile_of(model, batch)
    run_race(
        model,
        batch,
        by_hand(profile, [0, 1], profile.plain_bytes),
        by_hand(profile, [0], profile.plain_bytes),
    )
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(map(torch.equal, values, gradients))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    recoup.remove(model)
    assert not any("forward" in vars(module) for module in model.modules())


# Blocks that were left over


@pytest.mark.parametrize(("left_bytes", "made_room"), [(0, False), (100, True), (10**6, False)])
def test_a_step_that_left_over_blocks_make_pass_its_budget_is_recorded_without_them(
    monkeypatch: pytest.MonkeyPatch, left_bytes: int, made_room: bool
) -> None:
    """A million bytes are too many to be left over."""
    left = {"bytes": left_bytes, "rooms": 0}
    peak_bytes, record = CpuMeter.peak_bytes, real_steps.record

    def empty_cache(meter: CpuMeter) -> None:
        left.update(bytes=0, rooms=left["rooms"] + 1)

    def recorded(meter: CpuMeter, run: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(CpuMeter, "peak_bytes", lambda meter: peak_bytes(meter) + left["bytes"])
            return record(meter, run)

    monkeypatch.setattr(CpuMeter, "keeps_blocks", True)
    monkeypatch.setattr(CpuMeter, "empty_cache", empty_cache)
    monkeypatch.setattr(real_steps, "record", recorded)
    model, batch = model_and_batch()
    profile = profile_of(model, batch)
    chosen = plan(profile, recoup.minimum_budget(profile))
    ran = run_race(model, batch, chosen)
    assert left["rooms"] == made_room
    assert ran.winning.recorded.peak_bytes == chosen.predicted_bytes + left["bytes"]
    assert bool(ran.winning.times_s) == (left["bytes"] == 0)
    if made_room:
        left.update(bytes=left_bytes, rooms=0)
        recoup.remove(model)
        options = {"loss": loss_of, "units": "*", "budget": chosen.predicted_bytes, "race": False}
        fitted = recoup.fit(model, batch, **options)
        assert fitted.verification.peak_bytes == chosen.predicted_bytes
        assert left["rooms"] == 2  # before the step was recorded again, and when the fit had ended
        left.update(bytes=left_bytes, rooms=0)
        seen = recoup.verify(model, fitted.plan, batch, loss=loss_of)
        assert seen.peak_bytes == chosen.predicted_bytes
        assert left["rooms"] == 1


def test_a_rival_is_not_refused_for_left_over_blocks(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many of them as the plan has bytes to spare, and one more than the rival has."""
    model, batch = model_and_batch()
    profile = profile_of(model, batch)
    slow, fast = by_hand(profile, [0, 1, 2], 2**40), by_hand(profile, [0, 1], 2**40)
    assert slow.predicted_bytes < fast.predicted_bytes
    budget_bytes = fast.predicted_bytes
    left, num_recorded = {"bytes": 0}, itertools.count(1)
    peak_bytes, record = CpuMeter.peak_bytes, real_steps.record

    def recorded(meter: CpuMeter, run: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(CpuMeter, "peak_bytes", lambda meter: peak_bytes(meter) + left["bytes"])
            found = record(meter, run)
        if next(num_recorded) <= 2:
            left["bytes"] = 100  # of the plan's step and of the plain one
        return found

    monkeypatch.setattr(CpuMeter, "keeps_blocks", True)
    monkeypatch.setattr(CpuMeter, "empty_cache", lambda meter: left.update(bytes=0))
    monkeypatch.setattr(real_steps, "record", recorded)
    clock(0.1, 0.0)
    plans = (replace(one, budget_bytes=budget_bytes) for one in (slow, fast))
    ran = run_race(model, batch, *plans)
    assert ran.winner.items == fast.items
    assert ran.winning.recorded.peak_bytes == fast.predicted_bytes
    assert next(num_recorded) == 6  # once with them, and twice without


def test_a_step_that_leaves_such_blocks_itself_passes_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step on an empty cache does not have them, all later ones do."""
    left = {"bytes": 0}
    peak_bytes, record = CpuMeter.peak_bytes, real_steps.record

    def recorded(meter: CpuMeter, run: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(CpuMeter, "peak_bytes", lambda meter: peak_bytes(meter) + left["bytes"])
            found = record(meter, run)
        left["bytes"] = 100
        return found

    monkeypatch.setattr(CpuMeter, "keeps_blocks", True)
    monkeypatch.setattr(CpuMeter, "empty_cache", lambda meter: left.update(bytes=0))
    monkeypatch.setattr(real_steps, "record", recorded)
    model, batch = model_and_batch()
    profile = profile_of(model, batch)
    chosen = plan(profile, recoup.minimum_budget(profile))
    left["bytes"] = 100
    ran = run_race(model, batch, chosen)
    assert ran.laps[0][1].recorded.peak_bytes == chosen.predicted_bytes + 100
