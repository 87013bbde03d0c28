"""State in unusual places, and objects that do not like to be looked at: `fit` leaves both as they were."""

from __future__ import annotations

import itertools
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from everyday.subjects import Classifier, assert_same, examples, state_of
from torch import Tensor, nn
from torch.nn import functional as F

import recoup

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
