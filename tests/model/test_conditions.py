from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recoup.errors import EncodingError, SampleError
from recoup.measuring import Profile, measure
from recoup.model.checks import check_model
from recoup.model.conditions import Conditions, autocast_of, input_shapes, recording
from recoup.model.step import TrainingStep
from recoup.model.tracing import is_traced


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))

    def forward(self, x: Tensor, *rest: Any, mask: Tensor | None = None, **more: Any) -> Tensor:
        return self.layers(x)


X = torch.randn(5, 4)
TRAINED_BYTES = 4 * (4 * 6 + 6 + 6 * 2 + 2)


def conditions_of(*args: Any, **kwargs: Any) -> Conditions:
    found = measure(*args, **kwargs).conditions
    assert found is not None
    return found


# What is recorded


def test_a_sample() -> None:
    found = conditions_of(Model(), (X, torch.zeros(3)), loss=torch.sum)
    assert found == Conditions((("x", (5, 4)), ("argument 1", (3,))), trained_bytes=TRAINED_BYTES)
    assert found.largest == {"x": 20, "argument 1": 3}


def test_keywords() -> None:
    found = conditions_of(Model(), {"x": X, "mask": X[:1], "extra": [X[0]]}, loss=torch.sum)
    assert found.shapes == (("x", (5, 4)), ("mask", (1, 4)), ("extra[0]", (4,)))


def test_the_mode_and_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found = conditions_of(Model().eval(), X, loss=lambda output: output.float().sum())
    assert found == Conditions((("x", (5, 4)),), "bfloat16", training=False, trained_bytes=TRAINED_BYTES)


def test_a_step_with_its_own_autocast() -> None:
    model = Model()

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(X)
        output.float().sum().backward()

    assert conditions_of(model, step=step).autocast == "bfloat16"


def test_the_largest_of_several_forwards() -> None:
    model = Model()

    def step() -> None:
        with torch.no_grad():
            model(torch.zeros(50, 4))
        (model(X[:2]).sum() + model(X).sum()).backward()

    assert conditions_of(model, step=step) == Conditions(
        (("x", (5, 4)),), forwards=2, trained_bytes=TRAINED_BYTES
    )


def test_estimates_record_it_too() -> None:
    with torch.device("meta"):
        model = Model()
    assert conditions_of(model, torch.empty(5, 4), loss=torch.sum, hardware="H200").shapes == (("x", (5, 4)),)


def test_recording_leaves_no_hook() -> None:
    model = Model()
    with recording(model) as recorder:
        pass
    assert not model._forward_pre_hooks
    assert recorder.conditions is None


def test_containers() -> None:
    @dataclass
    class Batch:
        x: Tensor

    given = {"a": (X, [X[0]]), "b": Batch(X), "c": "text", "d": {"e": {"f": X[:2]}}}
    assert dict(input_shapes([], [], given)) == {
        "a[0]": (5, 4),
        "a[1][0]": (4,),
        "b['x']": (5, 4),
        "d['e']['f']": (2, 4),
    }


def test_a_device_without_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_of(torch.empty(2, device="meta")) == ""


# Files


def test_round_trip() -> None:
    profile = measure(Model(), X, loss=torch.sum)
    assert profile.conditions is not None
    for changes in ({}, {"autocast": "bfloat16", "forwards": 3, "training": False}):
        changed = replace(profile, conditions=replace(profile.conditions, **changes))
        assert Profile.from_json(changed.to_json()) == changed


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('[["x", [5, 4]]]', '[["x", [5, -4]]]', r"name and a list of sizes; got \['x', \[5, -4\]\]"),
        ('[["x", [5, 4]]]', '[["x"]]', "name and a list of sizes"),
        ('[["x", [5, 4]]]', '"x"', "shapes should be a list"),
        ('"conditions": {', '"conditions": {"other": 1, ', "unknown other"),
        ('"conditions": {', '"conditions": {"forwards": "2", ', "'forwards' should be a int; got '2'"),
        ('"conditions": {', '"conditions": {"training": 1, ', "'training' should be a bool; got 1"),
    ],
)
def test_damaged_conditions(old: str, new: str, message: str) -> None:
    text = measure(Model(), X, loss=torch.sum).to_json()
    assert old in text
    with pytest.raises(EncodingError, match=message):
        Profile.from_json(text.replace(old, new))


# Lazy modules


@pytest.mark.parametrize(
    ("model", "where"),
    [
        (nn.LazyLinear(2), "LazyLinear has not run yet"),
        (nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d()), "LazyBatchNorm1d '1' has not run yet"),
        (nn.Sequential(nn.LazyConv2d(2, 1), nn.Linear(2, 2)), "LazyConv2d '0' has not run yet"),
    ],
)
def test_lazy_modules(model: nn.Module, where: str) -> None:
    with pytest.raises(
        SampleError, match=rf"{where}: its parameters have no shapes\. Run the model once on a batch"
    ):
        TrainingStep(model, X)


def test_lazy_modules_that_have_run() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    model(X)
    check_model(model)


# Tracing


def test_where_a_plan_has_nothing_to_say() -> None:
    seen = []

    def note(x: Tensor) -> Tensor:
        seen.append(is_traced())
        return x * 2

    note(X)
    torch.func.grad(lambda x: note(x).sum())(X)
    torch.func.jvp(note, (X,), (X,))
    torch.fx.symbolic_trace(note)
    torch.export.export(_Calling(note), (X,))
    note(X)
    assert seen[0] is False
    assert seen[-1] is False
    assert len(seen) >= 6
    assert all(seen[1:-1])


class _Calling(nn.Module):
    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x)  # type: ignore[no-any-return]
