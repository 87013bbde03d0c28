"""The autopilot where plans differ by the size of the batch: a failure lowers the budget of all sizes."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import GPT, plainly
from slowly import slow_but
from test_autopilot import Counting, Loop, assert_same, live_bytes, logged, seen
from torch import Tensor, nn

import recoup
from recoup.errors import BudgetError, RecoupWarning
from recoup.fitting import Fitted
from recoup.measuring import MemoryTracker
from recoup.piloting import Autopilot
from recoup.plans.by_size.plans import PlansBySize

LENGTHS = (32, 12, 24, 4, 28, 20)
LONGEST = (32,)


def make_subject() -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(1)
    batches = [torch.randint(11, (4, length)) for length in LENGTHS]
    return GPT(plainly, num_blocks=4), batches


@pytest.fixture(scope="module")
def subject() -> Fitted:
    """A fit for a budget in the middle: its plans are applied to copies."""
    model, batches = make_subject()
    profile = recoup.measure(model, batches[0], accumulates=True)
    budget = (recoup.minimum_budget(profile) + profile.plain_bytes) // 2
    fitted = recoup.fit(
        model, samples=[batches[3], batches[1], batches[0]], budget=budget, accumulates=True, race=False
    )
    plans = plans_of(fitted)
    assert plans.plan_for((4,)).keeps_everything
    assert not plans.plan.keeps_everything
    return fitted


def plans_of(fitted: Fitted) -> PlansBySize:
    assert fitted.by_size is not None
    return fitted.by_size


def fitted_copy(subject: Fitted) -> tuple[Fitted, list[Tensor]]:
    model, batches = make_subject()
    recoup.apply(model, plans_of(subject))
    return replace(subject, model=model), batches


def train(
    fitted: Fitted, batches: list[Tensor], mode: Any = None, **more: Any
) -> tuple[dict[str, Any], Autopilot]:
    """Three micro-batches of different lengths for each step of the optimizer."""
    model = fitted.model
    torch.manual_seed(7)
    random.seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pilot = recoup.autopilot(fitted, optimizer=optimizer, **more)
    losses = []

    def run(batch: Tensor) -> Tensor:
        with mode if mode is not None else nullcontext():
            loss: Tensor = model(batch)
            loss.backward()
            return loss.detach()

    for number, batch in enumerate(batches):
        losses.append(pilot.step(lambda batch=batch: run(batch)))
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return seen(model, losses), pilot


def tightest_bytes(plans: PlansBySize, size: tuple[int, ...]) -> int:
    return plans.within(0).plan_for(size).predicted_bytes


@pytest.mark.parametrize("num_times", slow_but([15], [15, 60]))
def test_an_error_at_any_operation_of_any_length(subject: Fitted, num_times: int) -> None:
    counting = Counting()
    expected, pilot = train(*fitted_copy(subject), counting)
    assert (pilot.events, pilot.by_size) == ([], subject.by_size)
    plans, chosen = plans_of(subject), random.Random(3)
    resident_bytes = subject.profile.residents.total_bytes
    changes, batches, num_bytes = set(), set(), set()
    for number in range(num_times):
        failing = Counting(chosen.randint(1, counting.num_operations))
        usable_bytes = chosen.randint(tightest_bytes(plans, LONGEST), plans.plan.predicted_bytes)
        room = MemoryTracker(limit_bytes=usable_bytes - resident_bytes)
        found, pilot = train(*fitted_copy(subject), failing, tracker=room)
        assert_same(found, expected)
        [event] = pilot.events
        assert event.reason == f"injected at operation {failing.fail_at.pop()}"
        assert event.before is plans.plan_at(size_of(event.batch))
        assert event.after.predicted_bytes <= event.usable_bytes
        is_same = event.after is event.before
        assert is_same == (event.before.predicted_bytes <= event.usable_bytes)
        assert (pilot.by_size is plans) == is_same
        changes.add(is_same)
        batches.add(event.batch)
        del found, pilot, event, room
        if number % 5 == 3:
            num_bytes.add(live_bytes())
    assert changes == {False, True}
    assert len(batches) > 2
    assert len(num_bytes) == 1, "something leaks"


def size_of(batch: str) -> tuple[int]:
    name, _, value = batch.partition(" = ")
    assert name == "tokens.shape[1]"
    return (int(value),)


def test_a_cut_in_the_middle_and_room_again(subject: Fitted) -> None:
    uncut = Loop(*fitted_copy(subject))
    uncut.run(24)
    expected = seen(uncut.fitted.model, uncut.losses)
    loop = Loop(*fitted_copy(subject), patience=3)
    pilot, first = loop.pilot, plans_of(loop.fitted)
    cut_bytes = (tightest_bytes(first, LONGEST) + first.plan.predicted_bytes) // 2
    with logged() as lines:
        loop.run(6)
        loop.limit(cut_bytes)
        loop.run(12)
        # One budget for all lengths, below what is usable: each was too long at most once.
        assert pilot.by_size is not None
        assert pilot.by_size.budget_bytes <= cut_bytes < first.budget_bytes
        assert {event.kind for event in pilot.events} == {"out of memory"}
        assert len(pilot.events) == 1
        loop.limit(first.plan.predicted_bytes + 20_000)
        loop.run(6)
    assert pilot.by_size is first
    assert [event.kind for event in pilot.events] == ["out of memory", "room"]
    assert_same(seen(loop.fitted.model, loop.losses), expected)
    cut, back = lines
    assert cut.startswith("WARNING step 7: out of memory (")
    assert ") at tokens.shape[1] = 32; " in cut
    assert ": new plans for " in cut
    assert back.startswith("INFO step 21: room (in each of 3 steps) at tokens.shape[1] = ")


def test_a_batch_that_fits_no_schedule_is_refused_and_shorter_ones_go_on(subject: Fitted) -> None:
    fitted, batches = fitted_copy(subject)
    loop = Loop(fitted, batches)
    plans = plans_of(fitted)
    loop.limit((tightest_bytes(plans, (12,)) + tightest_bytes(plans, LONGEST)) // 2)
    with pytest.raises(BudgetError, match=r"no plan fits what was really free\. GPT does not fit"):
        loop.run(1)
    loop.batches = [batches[3], batches[1]]
    loop.run(2)
    assert [event.batch for event in loop.pilot.events] == ["tokens.shape[1] = 12"]


def test_a_budget_lowered_for_a_short_batch_leaves_long_ones_the_tightest_plan(subject: Fitted) -> None:
    fitted, batches = fitted_copy(subject)
    pilot = recoup.autopilot(fitted)
    left = [torch.OutOfMemoryError("again")] * 2

    def run(batch: Tensor) -> None:
        loss = fitted.model(batch)
        if left:
            raise left.pop()
        loss.backward()

    pilot.step(lambda: run(batches[3]))
    assert [event.after is event.before for event in pilot.events] == [True, False]
    assert pilot.plan.predicted_bytes < plans_of(fitted).plan_at((4,)).predicted_bytes
    with pytest.warns(RecoupWarning, match=r"No plan is predicted to fit .*tokens.shape\[1\] = 32"):
        pilot.step(lambda: run(batches[0]))
    assert pilot.plan.predicted_bytes == tightest_bytes(plans_of(fitted), LONGEST)
    assert len(pilot.events) == 2


def test_failures_in_a_row_end_with_the_smallest_plan_of_that_length(subject: Fitted) -> None:
    fitted, batches = fitted_copy(subject)
    pilot = recoup.autopilot(fitted)

    def run() -> None:
        fitted.model(batches[4])
        raise torch.OutOfMemoryError("again")

    with pytest.raises(BudgetError, match="again"):
        pilot.step(run)
    peaks = [event.after.predicted_bytes for event in pilot.events]
    assert peaks == sorted(set(peaks), reverse=True)
    assert len(peaks) >= 3
    assert peaks[-1] == tightest_bytes(plans_of(fitted), (28,))


def test_where_all_sizes_run_as_the_largest_does_there_are_smaller_plans_too(subject: Fitted) -> None:
    model, batches = make_subject()
    plans, schedule = plans_of(subject), subject.plan.schedule.schedule
    alike = PlansBySize(plans.profiles, plans.budget_bytes, [schedule], plans.known)
    recoup.apply(model, alike)
    loop = Loop(replace(subject, model=model, by_size=alike), batches)
    loop.limit((tightest_bytes(plans, LONGEST) + subject.plan.predicted_bytes) // 2)
    loop.run(len(batches))
    [event] = loop.pilot.events
    assert (event.kind, event.batch, event.before) == ("out of memory", "", subject.plan)
    assert event.after.predicted_bytes <= event.usable_bytes < subject.plan.predicted_bytes


# Plans for other budgets


def test_plans_for_another_budget_are_made_when_they_are_used(
    subject: Fitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = plans_of(subject)
    made: list[Any] = []
    make = recoup.plans.by_size.ladder.plan_by_hand

    def counted(*args: Any) -> Any:
        made.append(args)
        return make(*args)

    monkeypatch.setattr("recoup.plans.by_size.ladder.plan_by_hand", counted)
    less = plans.within(plans.plan.predicted_bytes - 1)
    assert not made
    found = less.plan_for((32,))
    assert less.plan_for((32,)) is found
    assert found.predicted_bytes <= less.budget_bytes < plans.plan.predicted_bytes
    assert len(made) == 1
    # Below where the first budget keeps everything, ranges are as fine as above.
    assert [one.up_to for one in less.ranges] == sorted({one.up_to for one in less.ranges})
    tight = plans.within(tightest_bytes(plans, LONGEST))
    assert tight.ranges[0].plan.keeps_everything
    assert tight.ranges[0].up_to < plans.ranges[0].up_to
    assert less.ranges[-1].up_to == LONGEST


def test_the_size_itself_is_looked_at_where_nothing_fits_the_end_of_its_range(subject: Fitted) -> None:
    plans = plans_of(subject)
    for size in (5, 21, 27):
        tight = plans.within(tightest_bytes(plans, (size,)))
        assert tight.plan_for((size,)).predicted_bytes == tight.budget_bytes
        assert tight.plan_for((size + 1,)).predicted_bytes > tight.budget_bytes
