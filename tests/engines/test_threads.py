"""Several threads that train one fitted model: each has its own place in the plan."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup.engines import is_applied
from recoup.policies import UniformSegments

pytestmark = pytest.mark.filterwarnings("ignore:The model is called while")


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(x).tanh())
        return y


class Recurrent(nn.Module):
    """Calls each of its units several times: which call it is depends on those before."""

    def __init__(self, shared: Cell | None = None) -> None:
        super().__init__()
        self.one, self.other = shared or Cell(), Cell()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = self.other(self.one(x))
        return x


@pytest.fixture(autouse=True)
def _threads_take_turns_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x).mean(), [*model.parameters()]))


def fitted(model: nn.Module, share: float) -> nn.Module:
    x = torch.randn(32, 8)
    profile = recoup.measure(model, x, loss=torch.mean)
    smallest = recoup.minimum_budget(profile)
    budget = int(smallest + share * (profile.plain_bytes - smallest))
    recoup.apply(model, recoup.plan(profile, budget))
    assert is_applied(model)
    return model


def in_threads(models: list[nn.Module]) -> None:
    """Each thread trains one of the models, which may be the same, on data of its own."""
    samples = [torch.randn(32, 8) for _ in models]
    plain = [recoup.remove(copy.deepcopy(model)) for model in models]
    expected = [gradients(model, x) for model, x in zip(plain, samples, strict=True)]
    found: list[list[list[Tensor]]] = [[] for _ in models]
    errors: list[BaseException] = []

    def train(index: int) -> None:
        try:
            for _ in range(10):
                found[index].append(gradients(models[index], samples[index]))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(index,)) for index in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for index, steps in enumerate(found):
        assert len(steps) == 10
        for step in steps:
            assert all(map(torch.equal, step, expected[index])), index


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_one_model_in_several_threads(share: float) -> None:
    in_threads([fitted(Recurrent(), share)] * 4)


def test_a_module_that_several_models_share() -> None:
    shared = Cell()
    in_threads([fitted(Recurrent(shared), 0.3) for _ in range(4)])


def test_copies_and_pickles_have_a_place_of_their_own() -> None:
    model = fitted(Recurrent(), 0.0)
    in_threads([model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model])


@pytest.mark.filterwarnings("ignore:A Cell is called more often")
def test_a_backward_in_another_thread_runs_inner_units_plainly() -> None:
    """As on an accelerator, whose backwards have a thread of their own."""

    class Outer(nn.Module):
        def __init__(self, cell: Cell) -> None:
            super().__init__()
            self.layer, self.cells = nn.Linear(8, 8), (cell,)  # out of sight: no module inside it

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.cells[0](self.layer(x).tanh())
            return y

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = Cell()
            self.outer = nn.ModuleList(Outer(self.cell) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for outer in self.outer:
                x = outer(self.cell(x))
            return x

    model, x = Both(), torch.randn(32, 8)
    expected = gradients(model, x)
    profile = recoup.measure(model, x, loss=torch.mean, units=["cell", "outer.*"])
    recoup.apply(model, recoup.plan(profile, recoup.minimum_budget(profile)))
    assert is_applied(model)
    loss = model(x).mean()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert all(map(torch.equal, [parameter.grad for parameter in model.parameters()], expected))


class Pooled(nn.Module):
    """Runs its blocks on threads of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(4) as pool:
            return sum(pool.map(lambda block: block(x), self.blocks))


def test_threads_of_the_model_join_its_turn() -> None:
    torch.manual_seed(0)
    model, x = Pooled(), torch.randn(32, 8)
    (expected,) = torch.autograd.grad(model(x).square().sum(), model.blocks[0][0].weight)
    recoup.apply(model, UniformSegments(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nobody waits in vain
        (found,) = torch.autograd.grad(model(x).square().sum(), model.blocks[0][0].weight)
    assert torch.equal(found, expected)
