"""The autopilot: steps that run out of memory are repeated, and nobody sees a difference but in the log."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import GPT, ResNet, plainly
from slowly import slow_but
from torch import Tensor, nn

import recoup
import recoup.piloting.room
from recoup.errors import BudgetError, RepeatError
from recoup.fitting import Fitted
from recoup.measuring import MemoryTracker
from recoup.piloting import Autopilot
from recoup.torch_private import TorchDispatchMode

NUM_STEPS = 4
WAYS = [
    ("gpt", "plainly"),
    ("gpt accumulating", "accumulating"),
    ("batch norm", "plainly"),
    ("batch norm accumulating", "all in one"),
]


class Counting(TorchDispatchMode):
    """Counts operations, and raises an out-of-memory error at some of them."""

    def __init__(self, *fail_at: int) -> None:
        super().__init__()
        self.fail_at, self.num_operations = set(fail_at), 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.num_operations += 1
        if self.num_operations in self.fail_at:
            del args, kwargs
            raise torch.OutOfMemoryError(f"injected at operation {self.num_operations}")
        return func(*args, **(kwargs or {}))


class WithState(nn.Module):
    """A batch-normalized net that also counts its calls, in an attribute, a list and a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.net = ResNet(plainly)
        self.num_calls, self.means, self.average = 0, [], torch.zeros(())
        self.register_buffer("noise", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.noise = self.noise + torch.rand(2)
        x = x * (1 + 0.1 * random.random())
        self.average.mul_(0.5).add_(x.detach().mean())
        out = self.net(x)
        self.means.append(float(out.detach()))
        return out


def make_subject(kind: str) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(1)
    if kind.startswith("gpt"):
        tokens = torch.randint(11, (NUM_STEPS, 4, 8))
        return GPT(plainly, num_blocks=4), list(tokens)
    return WithState(), list(torch.randn(NUM_STEPS, 4, 3, 12, 12))


@pytest.fixture(scope="module")
def plans() -> dict[str, Any]:
    """One fit of each kind: its plan, for a budget in the middle, is applied to copies."""
    return {kind: fit_subject(kind) for kind in dict(WAYS)}


def fit_subject(kind: str) -> Fitted:
    model, batches = make_subject(kind)
    accumulates = kind.endswith("accumulating")
    profile = recoup.measure(model, batches[0], accumulates=accumulates)
    budget = (recoup.minimum_budget(profile) + profile.plain_bytes) // 2
    fitted = recoup.fit(model, batches[0], budget=budget, accumulates=accumulates, race=False)
    assert not fitted.plan.keeps_everything
    return fitted


def fitted_copy(plans: dict[str, Any], kind: str) -> tuple[Fitted, list[Tensor]]:
    model, batches = make_subject(kind)
    recoup.apply(model, plans[kind].plan)
    return replace(plans[kind], model=model), batches


def train(
    fitted: Fitted, batches: list[Tensor], way: str, mode: Any = None, **more: Any
) -> tuple[dict[str, Any], Autopilot]:
    """A run of a few steps; all that could differ, and the autopilot."""
    model = fitted.model
    torch.manual_seed(7)
    random.seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    pilot = recoup.autopilot(fitted, optimizer=optimizer, **more)
    losses: list[Tensor] = []

    def run(batch: Tensor) -> Tensor:
        with mode if mode is not None else nullcontext():
            loss: Tensor = model(batch)
            loss.backward()
            return loss.detach()

    for number, batch in enumerate(batches):
        if way == "all in one":
            losses.append(pilot.step(lambda batch=batch: run(batch) + run(batch.flip(0))))
        else:
            losses.append(pilot.step(lambda batch=batch: run(batch)))
        if way != "accumulating" or number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return seen(model, losses), pilot


def seen(model: nn.Module, losses: list[Tensor]) -> dict[str, Any]:
    found: dict[str, Any] = {f"loss {i}": loss for i, loss in enumerate(losses)}
    found |= {name: value.clone() for name, value in model.state_dict().items()}
    found |= {f"grad {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    found["random"] = torch.get_rng_state()
    found["python"] = torch.tensor([random.random()], dtype=torch.float64)
    if isinstance(model, WithState):
        found["counted"] = torch.tensor([model.num_calls, len(model.means), *model.means, model.average])
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def live_bytes() -> int:
    gc.collect()
    tensors = [one for one in gc.get_objects() if isinstance(one, Tensor)]
    return sum({one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}.values())


@pytest.mark.parametrize(("kind", "way"), WAYS)
@pytest.mark.parametrize("num_times", slow_but([10], [10, 50]))
def test_an_error_at_any_operation(plans: dict[str, Any], kind: str, way: str, num_times: int) -> None:
    """At a random operation of a random step, with more or less memory left then: 200 times in make test-all."""
    counting = Counting()
    expected, pilot = train(*fitted_copy(plans, kind), way, counting)
    assert (pilot.events, pilot.summary()) == ([], f"{NUM_STEPS} steps, none out of memory.")
    plan, chosen = plans[kind].plan, random.Random(kind + way)
    missed_bytes = max(0, plans[kind].verification.peak_bytes - plan.predicted_bytes)
    resident_bytes = plan.profile.residents.total_bytes
    smallest_bytes = recoup.minimum_budget(plan.profile)
    changes, num_bytes = set(), set()
    for number in range(num_times):
        failing = Counting(chosen.randint(1, counting.num_operations))
        most_bytes = plan.predicted_bytes - 1
        usable_bytes = chosen.randint(smallest_bytes, most_bytes) if number % 3 else plan.predicted_bytes
        # Never entered, it says what is free.
        room = MemoryTracker(limit_bytes=usable_bytes - resident_bytes + missed_bytes)
        found, pilot = train(*fitted_copy(plans, kind), way, failing, tracker=room)
        assert_same(found, expected)
        [event] = pilot.events
        assert (event.kind, event.reason) == (
            "out of memory",
            f"injected at operation {failing.fail_at.pop()}",
        )
        # Gradients of earlier micro-batches are the step's own.
        own_bytes = event.usable_bytes - usable_bytes
        assert own_bytes == 0 or (way == "accumulating" and own_bytes > 0)
        assert event.after.predicted_bytes <= event.usable_bytes
        is_same = event.after is event.before
        assert is_same == (plan.predicted_bytes <= event.usable_bytes)
        changes.add(is_same)
        del found, pilot, event, room
        if number % 5 == 3:
            num_bytes.add(live_bytes())
    assert changes == {False, True}
    assert len(num_bytes) == 1, "something leaks"


# Within a limit that holds for every operation.


@contextmanager
def logged() -> Iterator[list[str]]:
    """The lines that are logged."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logger = logging.getLogger("recoup.autopilot")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


class Loop:
    """A training loop under a limit that can be cut and raised in the middle."""

    def __init__(self, fitted: Fitted, batches: list[Tensor], **more: Any) -> None:
        self.fitted, self.batches = fitted, batches
        self.tracker = MemoryTracker(limit_bytes=2**30)
        torch.manual_seed(7)
        random.seed(7)
        self.optimizer = torch.optim.SGD(fitted.model.parameters(), lr=0.1)
        self.pilot = recoup.autopilot(fitted, optimizer=self.optimizer, tracker=self.tracker, **more)
        self.losses: list[Tensor] = []

    def limit(self, usable_bytes: int) -> None:
        self.tracker.limit_bytes = usable_bytes - self.fitted.profile.residents.total_bytes
        self.tracker.reset_peak()

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            batch = self.batches[len(self.losses) % len(self.batches)]
            self.optimizer.zero_grad()
            self.losses.append(self.pilot.step(lambda batch=batch: self.step(batch)))
            self.optimizer.step()

    def step(self, batch: Tensor) -> Tensor:
        with self.tracker:
            loss: Tensor = self.fitted.model(batch)
            loss.backward()
            return loss.detach()


def test_a_cut_in_the_middle_and_room_again(plans: dict[str, Any]) -> None:
    uncut = Loop(*fitted_copy(plans, "gpt"))
    uncut.run(14)
    expected = seen(uncut.fitted.model, uncut.losses)
    loop = Loop(*fitted_copy(plans, "gpt"), patience=3)
    pilot, first = loop.pilot, loop.fitted.plan
    smallest_bytes = recoup.minimum_budget(first.profile)
    cut_bytes = (smallest_bytes + first.predicted_bytes) // 2
    with logged() as lines:
        loop.run(2)
        loop.limit(cut_bytes)
        loop.run(5)
        # The new plan holds from then on: its peak is the predicted one.
        assert [event.kind for event in pilot.events] == ["out of memory"]
        assert pilot.plan.predicted_bytes <= cut_bytes < first.predicted_bytes
        assert pilot.plan is pilot.events[0].after is not first
        loop.limit(first.predicted_bytes + 1000)
        loop.run(2)
        assert pilot.plan is not first
        loop.run(5)
        pilot.close()
        pilot.close()
    assert pilot.plan is first
    assert [event.kind for event in pilot.events] == ["out of memory", "room"]
    assert_same(seen(loop.fitted.model, loop.losses), expected)
    cut, back, summary = lines
    assert cut.startswith("WARNING step 3: out of memory (")
    assert "lost" in cut
    assert "new plan for" in cut
    assert back.startswith("INFO step 10: room (in each of 3 steps)")
    assert summary.startswith(
        "INFO 14 steps, 1 of them repeated after 1 out-of-memory error; plan changed 2 times; "
    )
    assert "7 steps ran under another plan" in summary


def test_a_faster_plan_that_fails_waits_longer_for_the_next(plans: dict[str, Any]) -> None:
    loop = Loop(*fitted_copy(plans, "gpt"), patience=2)
    first = loop.fitted.plan
    cut_bytes = (recoup.minimum_budget(first.profile) + first.predicted_bytes) // 2
    loop.limit(cut_bytes)
    loop.run(1)
    loop.limit(first.predicted_bytes + 1000)
    loop.run(2)  # back
    loop.limit(cut_bytes)
    loop.run(1)
    loop.limit(first.predicted_bytes + 1000)
    loop.run(3)
    assert [event.kind for event in loop.pilot.events] == ["out of memory", "room", "out of memory"]
    loop.run(1)
    assert [(event.kind, event.step) for event in loop.pilot.events][-1] == ("room", 8)


def test_nothing_fits(plans: dict[str, Any]) -> None:
    """The error says what to do, and the model is as before the step."""
    loop = Loop(*fitted_copy(plans, "gpt"))
    loop.run(1)
    loop.optimizer.zero_grad()
    before = {name: value.clone() for name, value in loop.fitted.model.state_dict().items()}
    state = torch.get_rng_state()
    loop.limit(recoup.minimum_budget(loop.fitted.profile) - 1)
    with pytest.raises(
        BudgetError, match=r"no plan fits what was really free.*Raise the budget, or use a smaller"
    ):
        loop.run(1)
    assert all(torch.equal(value, before[name]) for name, value in loop.fitted.model.state_dict().items())
    assert all(parameter.grad is None for parameter in loop.fitted.model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_failures_in_a_row_shrink_the_plan_to_the_smallest_and_end(plans: dict[str, Any]) -> None:
    """Whatever is said to be free: each failure after the first makes the plan smaller."""
    fitted, batches = fitted_copy(plans, "gpt")
    pilot = recoup.autopilot(fitted)

    def run() -> None:
        fitted.model(batches[0])
        raise torch.OutOfMemoryError("again")

    with pytest.raises(BudgetError, match="again"):
        pilot.step(run)
    peaks = [event.after.predicted_bytes for event in pilot.events]
    assert peaks[0] == fitted.plan.predicted_bytes
    assert peaks == sorted(set(peaks), reverse=True)
    assert len(peaks) >= 3
    assert peaks[-1] == recoup.minimum_budget(fitted.profile)


def test_other_errors_pass(plans: dict[str, Any]) -> None:
    pilot = recoup.autopilot(fitted_copy(plans, "gpt")[0])
    with pytest.raises(ZeroDivisionError):
        pilot.step(lambda: 1 // 0)
    assert not pilot.events


def test_an_optimizer_inside_the_step_is_refused_when_it_fails(plans: dict[str, Any]) -> None:
    fitted, batches = fitted_copy(plans, "gpt")
    optimizer = torch.optim.SGD(fitted.model.parameters(), lr=0.1)
    pilot = recoup.autopilot(fitted, optimizer=optimizer)

    def run() -> None:
        fitted.model(batches[0]).backward()
        optimizer.step()
        raise torch.OutOfMemoryError("late")

    with pytest.raises(RepeatError, match=r"optimizer\.step\(\) after pilot\.step"):
        pilot.step(run)


class Large(nn.Module):
    """A large buffer that only later steps change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(2**19))
        self.linear = nn.Linear(4, 4)
        self.writes = False

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            self.table.add_(1)
        return self.linear(x).square().mean()


def fail_once() -> Callable[[], None]:
    left = [1]

    def fail() -> None:
        if left:
            left.clear()
            raise torch.OutOfMemoryError("once")

    return fail


def test_large_buffers_are_copied_until_a_step_left_them_alone() -> None:
    model, x = Large(), torch.randn(3, 4)
    fitted = recoup.fit(model, x, budget="1GiB")
    pilot = recoup.autopilot(fitted)

    def step(fail: Callable[[], None] = lambda: None) -> None:
        model(x).backward()
        fail()

    model.writes = True
    fail = fail_once()
    pilot.step(lambda: step(fail))
    assert model.table[0] == 1
    pilot.step(step)
    fail = fail_once()
    pilot.step(lambda: step(fail))
    assert model.table[0] == 3
    model.writes = False
    pilot.step(step)
    model.writes = True
    fail = fail_once()
    with pytest.raises(RepeatError, match=r"changed 'table' \(2.00 MiB\) for the first time"):
        pilot.step(lambda: step(fail))


def test_gradients_that_the_step_clears_come_back() -> None:
    """Also where the step has freed them by then."""
    model, x = nn.Linear(3, 2), torch.randn(5, 3)
    pilot = recoup.autopilot(
        recoup.fit(model, x, budget="1GiB", loss=lambda y: y.square().mean(), accumulates=True)
    )
    model(x).sum().backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    fail, found = fail_once(), []

    def step() -> None:
        found.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad()
        model(x).square().mean().backward()
        fail()

    pilot.step(step)
    assert len(found) == 2
    for gradients in found:
        assert all(map(torch.equal, gradients, before))


def test_other_words_for_out_of_memory(plans: dict[str, Any]) -> None:
    pilot = recoup.autopilot(fitted_copy(plans, "gpt")[0])
    left = [RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), ValueError("else")]

    def run() -> None:
        try:
            raise KeyError("inside")
        except KeyError:
            raise left.pop(0) from None

    with pytest.raises(ValueError, match="else"):
        pilot.step(run)
    assert [event.reason for event in pilot.events] == ["CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"]


class Squeezed(recoup.piloting.room.Room):
    """An allocator that empties its cache in every step."""

    retries = 0

    def free_bytes(self) -> int:
        return 2**30

    def make_room(self) -> None:
        pass

    def num_retries(self) -> int:
        self.retries += 1
        return self.retries

    def describe_failure(self) -> str:
        return "fragmented"


def test_pressure_makes_the_plan_smaller_before_it_fails(
    plans: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recoup.piloting.pilot.find_room", lambda *_: Squeezed())
    fitted, batches = fitted_copy(plans, "gpt")
    pilot = recoup.autopilot(fitted, patience=100)
    for _ in range(3):
        pilot.step(lambda: fitted.model(batches[0]).backward())
        fitted.model.zero_grad()
    [event] = pilot.events
    assert (event.kind, event.reason, event.step) == ("pressure", "fragmented", 4)
    assert event.after.predicted_bytes < event.before.predicted_bytes
    assert (pilot.plan, event.lost_s) == (event.after, 0)


class Averaging(torch.optim.Optimizer):
    """Wraps another optimizer, which has the state."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, Averaging])
def test_what_is_usable_counts_the_state_of_optimizers(wrap: Callable[[Any], torch.optim.Optimizer]) -> None:
    model, batches = make_subject("gpt")
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    fitted = recoup.fit(model, batches[0], budget="1GiB", optimizer=optimizer, race=False)
    residents = fitted.profile.residents
    assert residents.optimizer_bytes > 2 * residents.parameter_bytes > 0
    tracker = MemoryTracker(limit_bytes=2**30)
    pilot = recoup.autopilot(fitted, optimizer=optimizer, tracker=tracker)

    def step() -> None:
        with tracker:
            model(batches[0]).backward()

    for missing_bytes in (residents.optimizer_bytes, 0):  # its first step makes the state
        assert pilot._usable_bytes() == 2**30 + residents.total_bytes - missing_bytes
        pilot.step(step)
        optimizer.step()
        optimizer.zero_grad()
