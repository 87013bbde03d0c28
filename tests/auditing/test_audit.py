"""Each kind of finding on a small model of its own, models without any, and what an audit leaves behind."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import models
import numpy as np
import pytest
import torch
from tally import Tally
from torch import Tensor, nn

import recoup
from recoup.auditing import Audit, Finding, Kind, audit, audit_step
from recoup.measuring.measure import measure
from recoup.model.recipe import KEEP
from recoup.model.step import TrainingStep

COUNTER = itertools.count(1)


class Model(nn.Module):
    """A layer, the unit under test, a layer."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.unit = unit
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.unit(self.first(x))).square().mean()


class Unit(nn.Module):
    """A unit with one weight that runs a function."""

    def __init__(self, fn: Callable[[Unit, Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.fn = fn

    def forward(self, x: Tensor) -> Any:
        return self.fn(self, x)


def audit_unit(unit: nn.Module, **kwargs: Any) -> tuple[Finding, ...]:
    return audit(Model(unit), torch.randn(5, 4), units=["unit", "last"], **kwargs).findings


def the_finding(fn: Callable[[Unit, Tensor], Any]) -> Finding:
    (finding,) = audit_unit(Unit(fn))
    assert finding.unit == "unit"
    return finding


# What is unsafe


def test_values_that_drift() -> None:
    finding = the_finding(lambda unit, x: torch.sin(x * unit.weight * next(COUNTER)))
    assert (finding.what, finding.is_unsafe) == (Kind.DRIFT, True)
    assert finding.detail.startswith("Saved tensor 3 of")
    assert "has other values than in the forward (at test_audit.py:" in finding.detail
    assert "wrong gradients" in finding.action


def test_an_output_that_drifts_though_nothing_saved_does() -> None:
    finding = the_finding(lambda unit, x: x + unit.weight + next(COUNTER))
    assert finding.what is Kind.DRIFT
    assert finding.detail == "its output has other values than in the forward"


def test_a_drifting_unit_without_gradients_would_mislead_a_segment() -> None:
    class Positions(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.full_like(x, next(COUNTER)).detach()

    (finding,) = audit_unit(Positions())
    assert finding.what is Kind.DRIFT


@pytest.mark.parametrize(
    ("draw", "name"), [(random.random, "Python's random"), (np.random.rand, "numpy.random")]
)
def test_random_numbers_that_torch_does_not_draw(draw: Callable[[], float], name: str) -> None:
    finding = the_finding(lambda unit, x: torch.sin(x * unit.weight * draw()))
    assert (finding.what, finding.is_unsafe) == (Kind.RANDOMNESS, True)
    assert finding.detail == f"draws from {name}"


def test_random_numbers_are_found_even_where_two_runs_happen_to_agree() -> None:
    finding = the_finding(lambda unit, x: torch.sin(x * unit.weight) if random.random() < 2 else x)
    assert finding.what is Kind.RANDOMNESS


def test_a_generator_out_of_reach() -> None:
    generators = {"mine": [torch.Generator()] * 2000}  # more than what a checkpoint looks into

    def fn(unit: Unit, x: Tensor) -> Tensor:
        return torch.sin(x * unit.weight * torch.rand((), generator=generators["mine"][0]))

    assert the_finding(fn).what is Kind.DRIFT


class Cache:
    def __init__(self) -> None:
        self.entries: list[Tensor] = []


class Caching(nn.Module):
    """Attends to all that earlier calls left in a cache."""

    def __init__(self, attend: bool) -> None:
        super().__init__()
        self.block = nn.Linear(4, 4)
        self.attend = attend

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.entries.append(x)
        seen = torch.stack(cache.entries).sum(0) if self.attend else x
        return self.block(seen).tanh()


class CachingModel(nn.Module):
    def __init__(self, attend: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Caching(attend) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        for block in self.blocks:
            x = block(x, cache=cache)
        assert len(cache.entries) == 2, "the experiments left something in the cache"
        return x.sum()


@pytest.mark.parametrize("attend", [True, False])
def test_an_object_that_is_changed(attend: bool) -> None:
    found = audit(CachingModel(attend), torch.randn(3, 4), units="blocks.*")
    assert [(finding.unit, finding.what, finding.is_unsafe) for finding in found.findings] == [
        ("blocks.0", Kind.OBJECT, True),
        ("blocks.1", Kind.OBJECT, True),
    ]
    assert found.findings[0].detail == "argument 'cache' (Cache).entries"


def test_what_an_object_makes_once_and_keeps_is_no_finding() -> None:
    class Lazy(nn.Module):
        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            cache.entries = cache.entries or [torch.ones(4)]
            return x * cache.entries[0]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lazy, self.linear = Lazy(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.lazy(self.linear(x), Cache()).sum()

    assert audit(Outer(), torch.randn(3, 4), units="lazy").findings == ()


def test_an_input_changed_in_place() -> None:
    finding = the_finding(lambda unit, x: torch.relu_(x) * unit.weight)
    assert (finding.what, finding.is_unsafe) == (Kind.INPUT, True)
    assert finding.detail == "argument 'x'"


def test_the_step_goes_on_with_an_input_that_was_changed_once() -> None:
    class AddOne(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(1)

    seen = Tally()

    class Last(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.add(x.detach().clone())
            return x

    model = nn.Sequential(nn.Linear(4, 4), AddOne(), Last())
    sample = torch.randn(2, 4)
    audit(model, sample, loss=torch.sum, units="1")
    assert torch.equal(seen.take()[-1], model[0](sample).detach() + 1)


def test_a_backward_inside_the_forward() -> None:
    def fn(unit: Unit, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad((inner * unit.weight).sin().sum(), inner)
        return x * unit.weight + slope

    finding = the_finding(fn)
    assert (finding.what, finding.is_unsafe) == (Kind.BACKWARD, True)


def test_an_argument_that_a_replay_would_find_used_up() -> None:
    class Summing(nn.Module):
        def forward(self, parts: Iterator[Tensor]) -> Tensor:
            return torch.stack(list(parts)).sum(0)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.summing = nn.Linear(4, 4), Summing()

        def forward(self, x: Tensor) -> Tensor:
            return self.summing(part for part in (x, self.linear(x))).sum()

    (finding,) = audit(Outer(), torch.randn(3, 4), units="summing").findings
    assert (finding.what, finding.is_unsafe) == (Kind.REPLAY, True)
    assert "iterator (generator)" in finding.detail


def test_a_replay_that_raises() -> None:
    state = {"num_calls": 0}

    def fn(unit: Unit, x: Tensor) -> Tensor:
        from recoup import is_replaying

        state["num_calls"] += 1
        if is_replaying():
            raise KeyError("only once")
        return torch.sin(x * unit.weight)

    finding = the_finding(fn)
    assert (finding.what, finding.is_unsafe) == (Kind.REPLAY, True)
    assert "only once" in finding.detail


# What is handled


def test_buffers_are_named() -> None:
    (finding,) = audit_unit(nn.BatchNorm1d(4))
    assert (finding.what, finding.is_unsafe) == (Kind.BUFFERS, False)
    assert finding.detail == "running_mean, running_var, num_batches_tracked"


def test_decisions_are_named() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            weights, chosen = self.linear(x).topk(2)
            return weights * (weights > 0), chosen

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = Router()

        def forward(self, x: Tensor) -> Tensor:
            weights, chosen = self.router(x)
            scale = recoup.keep(x.abs().mean())
            large = (x.repeat(1 << 14, 1) > 0).sum()  # computed anew
            return x + (weights * (chosen == 1)).sum(-1, keepdim=True) * scale * large * x.sum().item()

    (finding,) = audit_unit(Routed())
    assert (finding.what, finding.is_unsafe) == (Kind.DECISIONS, False)
    assert finding.detail == "80 B of topk in router, 10 B of gt in router, 4 B of keep, 0 B of item"
    assert finding.action.startswith("May be replayed: they are kept from the forward")


def test_memory_that_depends_on_the_data() -> None:
    decisions, finding = audit_unit(models.Experts(4))
    assert decisions.what is Kind.DECISIONS
    assert (finding.what, finding.is_unsafe) == (Kind.SHAPES, False)
    assert finding.detail.startswith("other values save other shapes, first in ")


def test_a_unit_that_raises_on_other_values_is_no_finding() -> None:
    def fn(unit: Unit, x: Tensor) -> Tensor:
        if seen and x.tolist() != seen[0]:
            raise ValueError
        seen.append(x.tolist())
        return torch.sin(x * unit.weight)

    seen: list[list[float]] = []
    assert audit_unit(Unit(fn)) == ()


def test_an_output_that_is_an_input() -> None:
    (finding,) = audit_unit(nn.Identity())
    assert (finding.what, finding.is_unsafe) == (Kind.ALIAS, False)
    assert finding.detail == "argument 'input'"


class ReadTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (ctx.saved_tensors[0] + ctx.saved_tensors[0]) / 2


def test_saved_tensors_that_are_read_twice() -> None:
    finding = the_finding(lambda unit, x: ReadTwice.apply(x * unit.weight))
    assert (finding.what, finding.is_unsafe) == (Kind.READS, False)
    assert finding.detail == "ReadTwiceBackward"


def test_a_difference_in_the_last_bits() -> None:
    finding = the_finding(lambda unit, x: torch.sin(x * unit.weight * (1 + 1e-7 * (next(COUNTER) % 8))))
    assert (finding.what, finding.is_unsafe) == (Kind.ROUNDING, False)


def test_a_unit_whose_replay_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(call: Any) -> None:
        raise torch.OutOfMemoryError("too large")

    # By name: the import mode of the tests knows no packages.
    monkeypatch.setattr(sys.modules["recoup.auditing.examine"], "try_replay", too_large)
    found = audit_unit(nn.Tanh())
    assert [finding.what for finding in found] == [Kind.NOT_EXAMINED] * 2
    assert not any(finding.is_unsafe for finding in found)


def test_torch_randomness_and_attributes_of_modules_are_no_finding() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator()
            self.num_calls, self.seen = 0, []

        def forward(self, x: Tensor) -> Tensor:
            self.num_calls += 1
            self.seen.append(self.num_calls)
            noise = torch.rand((), generator=self.generator)
            return torch.sin(x * self.num_calls * torch.rand_like(x) * noise)

    unit = Counting()
    before = unit.generator.get_state()
    assert audit_unit(unit) == ()
    assert (unit.num_calls, unit.seen) == (0, [])
    assert torch.equal(unit.generator.get_state(), before)


def test_outputs_without_tensors() -> None:
    class Length(nn.Module):
        def forward(self, x: Tensor) -> int:
            return x.shape[0]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.length, self.linear = Length(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).sum() / self.length(x)

    assert audit(Outer(), torch.randn(3, 4), units=["length", "linear"]).findings == ()


# Whole models


@pytest.mark.parametrize("kind", models.ALL)
def test_ordinary_models_are_safe(kind: Any) -> None:
    torch.manual_seed(3)
    found = audit(kind(models.plainly), kind.sample())
    assert found.unsafe == {}
    expected = {models.ResNet: {Kind.BUFFERS}, models.MoE: {Kind.DECISIONS, Kind.SHAPES}}.get(kind, set())
    assert {finding.what for finding in found.findings} == expected


def test_only_some_calls_are_examined() -> None:
    model = models.ResNet(models.plainly)
    step = TrainingStep(model, models.ResNet.sample())
    found = audit_step(step, list(model.blocks), only={1})
    assert [finding.unit for finding in found.findings] == ["blocks.1"]


def test_a_step_of_the_users() -> None:
    model = Model(Unit(lambda unit, x: torch.relu_(x) * unit.weight))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def step() -> None:
        model(torch.ones(2, 4)).backward()
        optimizer.step()

    assert list(audit(model, step=step, units="unit").unsafe) == ["unit"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_examination_costs_four_forwards_and_one_backward() -> None:
    """And a forward, in which calls are watched."""
    forwards, backwards = Tally(), Tally()

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            backwards.add()
            return gradient * 2

    def fn(unit: Unit, x: Tensor) -> Tensor:
        forwards.add(torch.is_grad_enabled())
        return Counted.apply(torch.sin(x * unit.weight))

    audit_unit(Unit(fn))
    assert (sum(forwards.take()), len(backwards.take())) == (1 + 4, 1)


# What is left behind


def everything(model: nn.Module) -> dict[str, Any]:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "state": {name: value.tolist() for name, value in model.state_dict().items()},
        "objects": [id(value) for value in (*model.parameters(), *model.buffers())],
        "gradients": [(id(p.grad), None if p.grad is None else p.grad.tolist()) for p in model.parameters()],
        "needs": [(p.requires_grad, p.is_leaf) for p in model.parameters()],
        "hooks": [len(getattr(module, name)) for module in model.modules() for name in hooks],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "global hooks": len(torch.nn.modules.module._global_forward_hooks),
        "saved-tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(False),
        "torch": torch.get_rng_state().tolist(),
        "Python": random.getstate(),
        "NumPy": np.random.get_state()[1].tolist(),
        "NumPy's position": np.random.get_state()[2],
    }


class Failing(nn.Module):
    """Draws numbers, counts, and fails in one of its runs with a graph."""

    def __init__(self, at: int, draw: Callable[[], float]) -> None:
        super().__init__()
        self.norm, self.at, self.draw, self.num_calls = nn.BatchNorm1d(4), at, draw, 0
        self.runs = iter(range(1, 100))  # no attribute that anyone puts back

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if torch.is_grad_enabled() and next(self.runs) == self.at:
            raise ArithmeticError("fails")
        return self.norm(x) * torch.rand(()) * self.draw()


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        (0, [Kind.BUFFERS]),
        (1, [Kind.BUFFERS]),  # the run in which calls are watched, which is repeated
        (2, [Kind.REPLAY]),  # the checkpointed forward
        (3, [Kind.REPLAY, Kind.BUFFERS]),  # its replay
        (4, [Kind.BUFFERS]),  # the run on other values
        (5, None),  # the run that the step goes on with
    ],
)
def test_nothing_is_left_behind(at: int, expected: list[Kind] | None) -> None:
    model = Model(Failing(at, lambda: 1.0))
    model.unit.norm.register_forward_hook(lambda module, args, output: None)
    model.first.weight.grad = torch.ones(4, 4)
    sample = torch.randn(5, 4)
    before = everything(model)
    if expected is None:
        with pytest.raises(ArithmeticError, match="fails"):
            audit(model, sample, units="unit")
    else:
        assert [finding.what for finding in audit(model, sample, units="unit").findings] == expected
    assert everything(model) == before
    assert model.unit.num_calls == 0


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_random_numbers_of_others_are_put_back(draw: Callable[[], float]) -> None:
    model = Model(Failing(0, draw))
    sample = torch.randn(5, 4)
    before = everything(model)
    assert list(audit(model, sample, units="unit").unsafe) == ["unit"]
    assert everything(model) == before


# What it is for


def drifting() -> Model:
    return Model(Unit(lambda unit, x: torch.sin(x * unit.weight) * random.random()))


def test_measure_keeps_what_is_unsafe() -> None:
    model, sample = drifting(), torch.randn(5, 4)
    found = audit(model, sample, units=["first", "unit", "last"])
    profile = measure(model, sample, units=["first", "unit", "last"], unsafe=found.unsafe)
    recipes = {unit.name: unit.recipes for unit in profile.units}
    assert recipes["unit"] == (KEEP,)
    trusting = measure(model, sample, units=["first", "unit", "last"])
    assert len({unit.name: unit.recipes for unit in trusting.units}["unit"]) > 1


@pytest.mark.parametrize("way", ["attribute", "argument"])
def test_blocks_that_are_switched_to_do_something_else_are_examined_too(way: str) -> None:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * random.random()

    class Block(nn.Module):
        def __init__(self, is_noisy: bool) -> None:
            super().__init__()
            self.layer, self.noise, self.is_noisy = nn.Linear(8, 8), Noise(), is_noisy

        def forward(self, x: Tensor, is_noisy: bool = False) -> Tensor:
            x = self.layer(x).tanh()
            return self.noise(x) if self.is_noisy or is_noisy else x

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(way == "attribute" and index > 1) for index in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for index, block in enumerate(self.blocks):
                x = block(x, True) if way == "argument" and index > 1 else block(x)
            return x.mean()

    model, sample = Blocks(), torch.randn(16, 8)
    fitted = recoup.fit(model, sample, budget="1GiB", units="blocks.*")
    assert list(fitted.audit.unsafe) == ["blocks.2"]  # which stands for all that do the same
    assert [bool(unit.unsafe) for unit in fitted.profile.units[:4]] == [False, False, True, True]


def test_how_it_reads() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.BatchNorm1d(4), nn.Linear(4, 1)
    )
    found = audit(model, torch.randn(5, 4), loss=torch.sum, units="*")
    assert str(found) == (
        "3 findings, 1 unit kept:\n"
        "  2: changes its input in place (argument 'input')\n"
        "    Kept whatever the budget: a replay could not start from the same input. Work on a copy, or use the"
        " operation that is not in place.\n"
        "  1, 3: updates buffers (running_mean, running_var, num_batches_tracked)\n"
        "    May be replayed: they are updated once, and the replay sees the values that the forward saw."
    )
    assert found.unsafe == {"2": "changes its input in place: argument 'input'"}
    assert str(Audit(())) == "Nothing found: every unit can be replayed."


def test_workspaces_are_not_compared() -> None:
    """A recurrent layer saves raw bytes, parts of which nobody ever wrote."""
    model = nn.LSTM(8, 8, 2, batch_first=True)
    found = audit(model, torch.randn(3, 5, 8), loss=lambda output: output[0].sum())
    assert found.unsafe == {}
