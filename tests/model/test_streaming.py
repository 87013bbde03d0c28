from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup.devices.meter import CpuMeter
from recoup.errors import SampleError
from recoup.measuring import MemoryTracker
from recoup.measuring.stream.timing import time_code, time_inside
from recoup.model.step import TrainingStep
from recoup.model.streaming import UnitCall, stream


class Recorder:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.indices: list[int] = []

    def enter(self, call: UnitCall) -> None:
        self.events.append(f"enter {call.name}")
        self.indices.append(call.index)

    def visit(self, call: UnitCall) -> Any:
        self.events.append(f"visit {call.name}")
        return call.glance()

    def restart(self) -> None:
        raise AssertionError("no other model has a backward")

    def leave(self, call: UnitCall, output: Any, start: Tensor) -> None:
        self.events.append(f"leave {call.name}")

    def end(self, loss: Tensor, output: Any) -> None:
        self.events.append("end")


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.a(x)
        return self.b(self.b(x)).sum()


X = torch.randn(4, 6)


def test_units_one_by_one() -> None:
    model, recorder = Frozen(), Recorder()
    assert stream(TrainingStep(model, X), [model.a, model.b], recorder) == (False, False)
    # A call without gradients is no unit's call.
    first = ["enter b", "visit b", "leave b"]
    assert recorder.events == [*first, "enter b#2", "visit b#2", "leave b#2", "end"]
    assert recorder.indices == [0, 1]
    assert "forward" not in vars(model.b)


def test_units_inside_units_are_passed_by() -> None:
    model, recorder = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.Tanh())), Recorder()
    stream(TrainingStep(model, X, loss=torch.sum), [model[0], model[0][0]], recorder)
    assert recorder.events == ["enter 0", "visit 0", "leave 0", "end"]


def test_no_more_than_one_unit_lives() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(20)))
    x = torch.randn(32, 64)
    with MemoryTracker() as memory:
        stream(TrainingStep(model, x, loss=torch.sum), list(model), Recorder())
    # The unit's argument, what its layer makes, and GELU's result.
    assert memory.peak_bytes == 3 * 32 * 64 * 4


def test_a_second_round_is_not_visited() -> None:
    model, recorder = nn.Sequential(nn.Linear(6, 6)), Recorder()

    def step() -> None:
        for rows in X.split(2):
            model(rows).sum().backward()

    assert stream(TrainingStep(model, step=step), [model[0]], recorder).accumulates
    assert recorder.events == ["enter 0", "visit 0", "leave 0", "end"]


def test_a_second_round_whose_gradients_are_its_own() -> None:
    model = nn.Sequential(nn.Linear(6, 6))

    def step() -> None:
        for rows in X.split(2):
            model(rows).sum().backward()
            model.zero_grad()

    assert not stream(TrainingStep(model, step=step), [model[0]], Recorder()).accumulates


def test_another_call_has_containers_of_its_own() -> None:
    filled: list[Tensor] = []
    layer = nn.Identity()
    call = UnitCall(0, "layer", layer, lambda x, found: found.append(x), (X, filled), {})
    call.again().glance()
    assert filled == []
    call.glance()
    assert len(filled) == 1


class Sleepy(nn.Module):
    """Code between two units."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) + 1).sum()


class Clock(CpuMeter):
    """Ticks once whenever it is asked."""

    now = 0.0

    def stamp(self) -> float:
        self.now += 1.0
        return self.now


def test_seconds_of_code() -> None:
    model = Sleepy()
    seen: list[str] = []
    seconds = time_code(
        TrainingStep(model, X), [model.a, model.b], Clock(), lambda call: seen.append(call.name)
    )
    # Before each unit, and the tail: one tick each. Only the tail's backward is timed.
    assert [(code.forward_s, code.backward_s) for code in seconds] == [(1, 1)] * 3
    assert seen == ["a", "b"]


def test_seconds_inside_a_unit() -> None:
    unit = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    call = UnitCall(0, "unit", unit, unit.forward, (X,), {})
    assert time_inside(call, [unit[0], unit[2]], Clock()) == {"0": 1, "2": 1}
    assert "forward" not in vars(unit[0])


def test_medians() -> None:
    class Clock(CpuMeter):
        """Stamps that are given."""

        stamps = iter(
            [0.0, 90.0, 91.0, 100.0, 101.0, 110.0, 200.0, 205.0, 207.0, 300.0, 303.0, 307.0, 1.0, 2.0, 3.0]
        )

        def stamp(self) -> float:
            return next(self.stamps)

    parts = [lambda: None, lambda: None]
    assert Clock().time(lambda: parts, repeats=3, warm_up=1) == [(3.0, 0.0), (4.0, 0.0)]
    assert Clock().time(lambda: parts) == [(1.0, 0.0), (1.0, 0.0)]


def test_runs_in_turn() -> None:
    """A busy moment in the second round slows both down, and counts for neither."""

    class Clock(CpuMeter):
        now_s = 0.0

        def stamp(self) -> float:
            return self.now_s

    clock, order = Clock(), ""

    def run(name: str, seconds: float) -> list[Callable[[], None]]:
        def part() -> None:
            nonlocal order
            order += name
            clock.now_s += seconds * (10 if len(order) in (3, 4) else 1)

        return [part]

    timed = clock.time_in_turn([partial(run, "a", 1.0), partial(run, "b", 2.0)], repeats=2, warm_up=1)
    assert order == "ababab"
    assert timed == [[(1.0, 0.0)], [(2.0, 0.0)]]


def test_units_that_are_given_nested_tensors_are_refused() -> None:
    class Ragged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.nested.as_nested_tensor([x[:2], x[2:]], layout=torch.jagged)
            for block in self.blocks:
                x = block(x)
            return x.values().square().mean()

    with pytest.raises(
        SampleError, match=r"Unit 'blocks.0' is given or returns a nested tensor.*Pad the sequences"
    ):
        recoup.fit(Ragged(), torch.randn(5, 4), budget="1MiB")
