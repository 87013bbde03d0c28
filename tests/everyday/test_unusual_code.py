"""State in unusual places, and objects that do not like to be looked at: `fit` leaves both as they were."""

from __future__ import annotations

import itertools
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from everyday.subjects import Classifier, assert_same, examples, state_of
from torch import Tensor, nn
from torch.nn import functional as F

import recoup
from recoup.engines import is_applied
from recoup.errors import SampleError, UnitError

LOG: list[int] = []


def fit(model: nn.Module, **options: Any) -> None:
    recoup.fit(model, budget="1GiB", **options)


class Momentum(nn.Module):
    """As in MoCo: the forward moves the weights of the second network."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = Classifier(2), Classifier(2)
        self.key.load_state_dict(self.query.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                key.mul_(0.9).add_(query, alpha=0.2)
            target = self.key(x)
        return F.mse_loss(self.query(x), target)


def test_parameters_that_a_forward_writes_to() -> None:
    model = Momentum()
    before = state_of(model)
    fit(model, sample=examples()[0])
    assert_same(state_of(model), before)


class Counting(nn.Module):
    history: list[int] = []
    num_calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        LOG.append(1)
        self.history.append(1)
        Counting.num_calls += 1
        return self.layer(x).mean()


def test_a_forward_that_counts_in_globals_and_in_its_class() -> None:
    fit(Counting(), sample=examples()[0])
    assert (LOG, Counting.history, Counting.num_calls) == ([], [], 0)


class Trainer:
    losses: list[float] = []

    def __init__(self) -> None:
        self.model, self.data = Classifier(2), examples()
        self.other = nn.Linear(10, 1)
        self.optimizer = torch.optim.SGD(self.other.parameters(), lr=0.1)
        self.unused = {"validation": iter([1, 2])}
        self.fast = torch.compile(self.model, backend="eager")
        self.logger = MagicMock()

    @staticmethod
    def log(loss: float) -> None:
        Trainer.losses.append(loss)

    @property
    def counted(self) -> list[float]:
        Trainer.losses.append(0.0)
        return Trainer.losses

    @torch.no_grad()
    def update(self) -> None:
        for parameter in self.other.parameters():
            parameter.add_(1)
        self.losses.append(1.0)

    def step(self) -> None:
        x, y = self.data
        self.model.zero_grad()
        self.optimizer.zero_grad()
        self.other(self.model(x).detach()).sum().backward()
        self.optimizer.step()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.log(loss.item())
        self.update()
        self.counted.append(2.0)
        self.logger.info("step")


def test_methods_of_every_kind_and_what_no_step_uses() -> None:
    trainer = Trainer()
    before = state_of(trainer.model, trainer.other, trainer.optimizer)
    fit(trainer.model, step=trainer.step)
    assert_same(state_of(trainer.model, trainer.other, trainer.optimizer), before)
    assert Trainer.losses == []
    assert list(trainer.unused["validation"]) == [1, 2]


def test_state_in_a_python_module_of_the_user(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "settings_of_a_run.py").write_text("losses, num_steps = [], 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    import settings_of_a_run as run  # type: ignore[import-not-found]

    run.other = nn.Linear(32, 1)
    run.optimizer = torch.optim.SGD(run.other.parameters(), lr=0.1)
    model, (x, y) = Classifier(2), examples()
    before = state_of(run.other)

    def step() -> None:
        run.other(x).sum().backward()
        run.optimizer.step()
        run.num_steps += 1
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        run.losses.append(loss.item())

    fit(model, step=step)
    assert (run.losses, run.num_steps) == ([], 0)
    assert_same(state_of(run.other), before)
    del sys.modules["settings_of_a_run"]


def test_names_that_the_step_binds_first() -> None:
    script: dict[str, Any] = {"F": F, "model": Classifier(2), "batch": examples()}
    exec(
        "def step():\n    global last\n    model.zero_grad()\n"
        "    last = F.cross_entropy(model(batch[0]), batch[1])\n    last.backward()\n    step.num = 1",
        script,
    )
    fit(script["model"], step=script["step"])
    assert "last" not in script
    assert not vars(script["step"])


class Touchy:
    """A proxy of something that is not there."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"not bound: {name}")


class Refusing(list[int]):
    def clear(self) -> None:
        raise TypeError


def with_objects() -> Callable[[nn.Module, Any], Callable[[], None]]:
    proxy, refusing, ordered = Touchy(), Refusing([1]), OrderedDict(a=1)
    cache: dict[Any, int] = {torch.zeros(2): 1}
    space = types.SimpleNamespace(number=1)

    def make(model: nn.Module, batch: Any) -> Callable[[], None]:
        def step() -> None:
            assert proxy is not None
            refusing.append(2)
            ordered["b"] = 2
            cache.clear()
            cache[torch.ones(2)] = 2
            space.number += 1
            model.zero_grad()
            F.cross_entropy(model(batch[0]), batch[1]).backward()

        return step

    make.seen = lambda: (list(refusing), list(ordered), len(cache), space.number)  # type: ignore[attr-defined]
    return make


def test_objects_that_do_not_like_to_be_looked_at() -> None:
    make = with_objects()
    model = Classifier(2)
    fit(model, step=make(model, examples()))
    assert make.seen() == ([1], ["a"], 1, 1)  # type: ignore[attr-defined]


def test_averages_that_are_made_anew() -> None:
    model, average, (x, y) = Classifier(2), Classifier(2), examples()
    before = state_of(average)

    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
            mine.data = 0.9 * mine.data + 0.1 * theirs.data

    fit(model, step=step)
    assert_same(state_of(average), before)


def test_a_counter_in_a_hook_is_refused_with_advice_that_fits() -> None:
    model, numbers = Classifier(2), itertools.count()
    model.register_forward_hook(lambda *_: next(numbers) and None)
    with pytest.raises(recoup.errors.SampleError, match=r"'numbers', a count.*Take what is needed before"):
        fit(model, sample=examples(), loss=nn.CrossEntropyLoss())
    assert next(numbers) == 0


def test_a_loss_whose_targets_have_a_default() -> None:
    def loss(output: Tensor, targets: Tensor | None = None) -> Tensor:
        assert targets is not None
        return F.cross_entropy(output, targets)

    fit(Classifier(2), sample=examples(), loss=loss)


def test_sparse_gradients_in_a_step() -> None:
    model = nn.Sequential(nn.Embedding(50, 32, sparse=True), Classifier(2))
    sparse = torch.optim.SparseAdam(model[0].parameters())
    dense = torch.optim.Adam(model[1].parameters())
    ids, y = torch.randint(50, (128,)), examples()[1]

    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(ids), y).backward()
        sparse.step()
        dense.step()

    before = state_of(model)
    fit(model, step=step, optimizer=[sparse, dense])
    assert_same(state_of(model), before)


def test_an_optimizer_that_wraps_itself() -> None:
    wrapper = types.SimpleNamespace()
    wrapper.optimizer = wrapper
    with pytest.raises(recoup.errors.SampleError, match="optimizer= takes"):
        fit(Classifier(2), sample=examples(), loss=nn.CrossEntropyLoss(), optimizer=wrapper)


class GraphLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(torch.sparse.mm(graph, x)).tanh())
        return y


class GraphNetwork(nn.Module):
    """Its edges are a sparse buffer, or given with the sample."""

    def __init__(self, graph: Tensor | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GraphLayer() for _ in range(4))
        self.register_buffer("graph", graph)

    def forward(self, x: Tensor, graph: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.graph if graph is None else graph)
        return x.square().mean()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("is_buffer", [True, False])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_graph_networks_with_sparse_tensors(layout: torch.layout, is_buffer: bool) -> None:
    graph = torch.eye(20).roll(3, 1).to_sparse(layout=layout)
    model, x = GraphNetwork(graph if is_buffer else None), torch.randn(20, 8)
    sample = (x,) if is_buffer else (x, graph)
    model(*sample).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    profile = recoup.measure(model, sample)
    # Rows and columns in 64 bits, and the values; torch makes CSR, which has the rows' ends, from the same columns.
    graph_bytes = 2 * 20 * 8 + (21 * 8 if layout is torch.sparse_csr else 0) + 20 * 4
    weight_bytes = 4 * (2 * 8 * 32 + 32 + 8) * 4
    assert profile.residents.parameter_bytes == weight_bytes + is_buffer * graph_bytes
    assert profile.residents.other_bytes == 20 * 8 * 4 + (not is_buffer) * graph_bytes
    recoup.fit(model, sample, budget=(recoup.minimum_budget(profile) + profile.plain_bytes) // 2)
    assert is_applied(model)
    model(*sample).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name


class Yielding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        for _ in range(3):
            x = self.layer(x).tanh()
            yield x


class Adding(nn.Module):
    """Adds up what it is given, which may be a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, items: Iterable[Tensor]) -> Tensor:
        result: Tensor = self.layer(sum(items)).mean()
        return result


class Generating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items, self.sum = Yielding(), Adding()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.sum(self.items(x))
        return result


def test_a_forward_that_is_a_generator() -> None:
    """What it calls is planned; it is no unit itself, nor is one that is given it."""
    model, x = Generating(), torch.randn(16, 8)
    fitted = recoup.fit(model, x, budget="1GiB")
    units = [unit.name for unit in fitted.profile.units if not unit.is_code]
    assert units == ["items.layer", "items.layer#2", "items.layer#3", "sum.layer"]
    assert recoup.audit(model, x).unsafe == {}
    with pytest.raises(
        UnitError, match=r"fits 'items', which the step never calls.* a generator runs elsewhere"
    ):
        recoup.measure(model, x, units="items")
    with pytest.raises(UnitError, match=r"Unit 'sum' cannot be run by itself\. An argument is an iterator"):
        recoup.measure(model, x, units="sum")
    for ask in (recoup.measure, recoup.audit):
        with pytest.raises(SampleError, match=r"The forward of Yielding is a generator.* return a list"):
            ask(Yielding(), x, loss=lambda items: sum(items).mean())


class Stacking(nn.Module):
    """Pushes to a list, or pops from it."""

    def __init__(self, pushes: bool) -> None:
        super().__init__()
        self.layer, self.pushes = nn.Linear(8, 8), pushes

    def forward(self, x: Tensor, stack: list[Tensor]) -> Tensor:
        x = self.layer(x).tanh()
        if not self.pushes:
            return x + stack.pop()
        stack.append(x)
        return x


class Ladder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rungs = nn.ModuleList(Stacking(index < 2) for index in range(4))
        self.stack: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        for rung in self.rungs:
            x = rung(x, self.stack)
        return x.mean()


def test_blocks_that_push_and_pop_one_list() -> None:
    model, x = Ladder(), torch.randn(16, 8)
    fitted = recoup.fit(model, x, budget="1GiB")
    assert fitted.verification is not None
    assert fitted.verification.gradients == "bit-equal"
    units = [unit.name for unit in fitted.profile.units if not unit.is_code]
    assert units == [f"rungs.{index}.layer" for index in range(4)]
    # A replay pushes to a copy of the list, and pops from it. But what goes through the list cannot be measured.
    assert recoup.audit(model, x, units="rungs.*").unsafe == {}
    with pytest.raises(UnitError, match=r"Unit 'rungs.0' gives a tensor to code outside .*: a list"):
        recoup.measure(model, x, units="rungs.*")
    assert model.stack == []
