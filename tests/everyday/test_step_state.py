"""Whatever a ``step=`` callable touches is as before when `fit` returns, and trains on as if it had never run."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import io
import itertools
import random
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from everyday.subjects import Classifier, assert_same, examples, peak_bytes, state_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from tqdm import tqdm

import recoup
from recoup.engines import is_applied
from recoup.errors import SampleError


@dataclass
class Script:
    """A user's script: a model, one step of its loop, and everything that the step changes."""

    model: nn.Module
    step: Callable[[], Any]
    touched: list[Any] = field(default_factory=list)
    optimizer: Any = None


def with_scheduler(make: Callable[[Any], Any]) -> Script:
    model, (x, y) = Classifier(), examples()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = make(optimizer)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()

    return Script(model, step, [optimizer, scheduler], optimizer)


def with_plateau() -> Script:
    model, (x, y) = Classifier(), examples()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    history: list[float] = []

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        history.append(loss.item())
        scheduler.step(1.0)

    return Script(model, step, [optimizer, scheduler, history], optimizer)


def with_scaler() -> Script:
    model, (x, y) = Classifier(), examples()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return Script(model, step, [optimizer, scaler], optimizer)


def with_accumulation() -> Script:
    """Steps its optimizer at every third call; where it stands is a closed-over number."""
    model, (x, y) = Classifier(), examples()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    num_calls, phases = 0, collections.Counter[int]()

    def step() -> None:
        nonlocal num_calls
        (F.cross_entropy(model(x), y) / 3).backward()
        num_calls += 1
        phases[num_calls % 3] += 1
        if num_calls % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()

    return Script(model, step, [optimizer, phases], optimizer)


def with_second_model() -> Script:
    """A discriminator with batch norm, stepped inside by its own optimizer."""
    model = Classifier()
    other = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters())
    other_optimizer = torch.optim.Adam(other.parameters())
    x, _ = examples()
    real = torch.randn(len(x), 10)

    def step() -> None:
        fake = model(x)
        other_optimizer.zero_grad()
        (F.softplus(-other(real)).mean() + F.softplus(other(fake.detach())).mean()).backward()
        other_optimizer.step()
        optimizer.zero_grad()
        F.softplus(-other(fake)).mean().backward()
        optimizer.step()

    return Script(model, step, [other, optimizer, other_optimizer], optimizer)


def with_averages() -> Script:
    """torch's own averaged model, and one by hand."""
    model, (x, y) = Classifier(), examples()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    copied = copy.deepcopy(model).requires_grad_(False)
    by_name = {name: value.detach().clone() for name, value in model.named_parameters()}

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        averaged.update_parameters(model)
        with torch.no_grad():
            for mine, theirs in zip(copied.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
            for name, value in model.named_parameters():
                by_name[name] = by_name[name] * 0.9 + value * 0.1

    return Script(model, step, [optimizer, averaged, copied, by_name], optimizer)


def with_hooks() -> Script:
    """Hooks that fill a list and a dict, which the step never names."""
    model, (x, y) = Classifier(), examples()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms: list[float] = []
    features: dict[str, list[Tensor]] = {"last": []}
    model.blocks[1].register_forward_hook(lambda module, args, output: norms.append(output.norm().item()))
    model.blocks[2].register_full_backward_hook(
        lambda module, given, taken: norms.append(taken[0].norm().item())
    )
    model.blocks[-1].register_forward_hook(
        lambda module, args, output: features["last"].append(output.detach())
    )

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        features["last"][:] = features["last"][-1:]

    return Script(model, step, [optimizer, norms, features], optimizer)


def with_optimizers_in_the_backward() -> Script:
    """torch's tutorial: each parameter's optimizer steps as soon as its gradient is there."""
    model, (x, y) = Classifier(), examples()
    optimizers = {parameter: torch.optim.AdamW([parameter], lr=1e-2) for parameter in model.parameters()}

    def at_gradient(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(at_gradient)

    def step() -> None:
        F.cross_entropy(model(x), y).backward()

    return Script(model, step, list(optimizers.values()))


def with_metrics() -> Script:
    """A metric, a progress bar, a running mean, a window of losses and a counter on an object of the user's."""
    model, (x, y) = Classifier(), examples()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=10)
    window: collections.deque[float] = collections.deque(maxlen=2)
    window.extend([5.0, 6.0])
    log = types.SimpleNamespace(num_steps=3, best=9.0, history={"loss": [9.0]})
    bar = tqdm(total=100, file=io.StringIO())

    def step() -> None:
        optimizer.zero_grad()
        output = model(x)
        loss = F.cross_entropy(output, y)
        loss.backward()
        optimizer.step()
        accuracy.update(output.detach(), y)
        window.append(loss.item())
        log.num_steps += 1
        log.best = min(log.best, loss.item())
        log.history["loss"].append(loss.item())
        bar.update(1)

    def seen() -> list[Any]:
        return [accuracy.metric_state, accuracy._update_count, list(window), vars(log), bar.n]

    return Script(model, step, [optimizer, seen], optimizer)


def with_generators() -> Script:
    """Random numbers from generators of the user's own."""
    model, (x, y) = Classifier(), examples()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ours, host, plain = torch.Generator().manual_seed(3), np.random.default_rng(4), random.Random(5)

    def step() -> None:
        optimizer.zero_grad()
        noise = torch.randn(x.shape, generator=ours) * host.normal() * plain.random()
        F.cross_entropy(model(x + noise), y).backward()
        optimizer.step()

    def seen() -> list[Any]:
        return [ours.get_state(), str(host.bit_generator.state), plain.getstate()]

    return Script(model, step, [optimizer, seen], optimizer)


class Counting(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.data, self.num_reads = examples(), 0

    def __len__(self) -> int:
        return len(self.data[0])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.num_reads += 1
        return self.data[0][index], self.data[1][index]


def with_a_loader() -> Script:
    """A whole epoch as the step: the loader is started anew each time, shuffled by a generator."""
    model, dataset = Classifier(), Counting()
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(dataset, batch_size=64, shuffle=True, generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def epoch() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return Script(model, epoch, [optimizer, lambda: [dataset.num_reads, generator.get_state()]], optimizer)


class Trainer:
    """A class that holds everything, as trainers written by hand do."""

    def __init__(self) -> None:
        self.model, self.data = Classifier(), examples()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=40)
        self.iteration, self.losses = 0, [0.0]

    def training_step(self, scale: float = 1.0) -> None:
        x, y = self.data
        self.optimizer.zero_grad()
        loss = scale * F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.iteration += 1
        self.losses.append(loss.item())


def as_method() -> Script:
    trainer = Trainer()
    return Script(
        trainer.model,
        functools.partial(trainer.training_step, scale=0.5),
        [trainer.optimizer, trainer.scheduler, lambda: [trainer.iteration, trainer.losses]],
        trainer.optimizer,
    )


SCRIPT = """
model, (x, y) = Classifier(), examples()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
num_steps, losses = 0, []

def log(loss):
    global num_steps
    num_steps += 1
    losses.append(loss.item())

def train_step():
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    scheduler.step()
    log(loss)
"""


def as_globals() -> Script:
    """A script whose step reads globals, some of them in a function that it calls."""
    names: dict[str, Any] = {"torch": torch, "nn": nn, "Classifier": Classifier, "examples": examples}
    exec(SCRIPT, names)
    return Script(
        names["model"],
        names["train_step"],
        [names["optimizer"], names["scheduler"], lambda: [names["num_steps"], names["losses"]]],
        names["optimizer"],
    )


def with_lbfgs() -> Script:
    """The optimizer calls the model, several times a step."""
    model, (x, y) = Classifier(), examples()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, history_size=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return Script(model, lambda: optimizer.step(closure), [optimizer])


def with_sam() -> Script:
    """Two forwards and backwards a step, the second at shifted weights, which are moved back by hand."""
    model, (x, y) = Classifier(), examples()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        F.cross_entropy(model(x), y).backward()
        shifts = [0.01 * parameter.grad / parameter.grad.norm() for parameter in model.parameters()]
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), shifts)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), shifts)
        optimizer.step()
        optimizer.zero_grad()

    return Script(model, step, [optimizer], optimizer)


class Lookahead:
    """An optimizer around another, with weights of its own: not a `torch.optim.Optimizer`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.num_steps = optimizer, 0
        self.slow = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        self.num_steps += 1
        if self.num_steps % 2 == 0:
            fast = [p for group in self.optimizer.param_groups for p in group["params"]]
            for slow, value in zip(self.slow, fast, strict=True):
                slow.lerp_(value, 0.5)
                value.copy_(slow)


def with_lookahead() -> Script:
    model, (x, y) = Classifier(), examples()
    optimizer = Lookahead(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return Script(model, step, [optimizer.optimizer, lambda: [optimizer.num_steps, optimizer.slow]])


def with_frozen_backbone() -> Script:
    """Thaws a block at its second step."""
    model, (x, y) = Classifier(), examples()
    model.blocks[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    log = {"step": 0}

    def step() -> None:
        log["step"] += 1
        model.blocks[0].requires_grad_(log["step"] > 4)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return Script(
        model, step, [optimizer, log, lambda: [p.requires_grad for p in model.parameters()]], optimizer
    )


def with_fresh_lists() -> Script:
    """A step that puts new objects in the place of old ones."""
    model, (x, y) = Classifier(), examples()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    log = types.SimpleNamespace(losses=[1.0], last=None)
    nested = {"epochs": [{"losses": [2.0]}]}

    def step() -> None:
        optimizer.zero_grad()
        log.last = loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        log.losses = [*log.losses, loss.item()]
        nested["epochs"][-1]["losses"].append(loss.item())
        nested["epochs"].append({"losses": []})

    return Script(
        model,
        step,
        [optimizer, nested, lambda: [log.losses, None if log.last is None else log.last.detach()]],
        optimizer,
    )


SCRIPTS: dict[str, Callable[[], Script]] = {
    "warm-up and cosine": lambda: with_scheduler(
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o, total_iters=2),
                torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
            ],
            [2],
        )
    ),
    "ReduceLROnPlateau": with_plateau,
    "GradScaler": with_scaler,
    "accumulation": with_accumulation,
    "second model": with_second_model,
    "averages of weights": with_averages,
    "hooks": with_hooks,
    "optimizers in the backward": with_optimizers_in_the_backward,
    "metrics": with_metrics,
    "generators of random numbers": with_generators,
    "loader": with_a_loader,
    "method": as_method,
    "globals": as_globals,
    "LBFGS": with_lbfgs,
    "two passes": with_sam,
    "wrapped optimizer": with_lookahead,
    "frozen part": with_frozen_backbone,
    "fresh lists": with_fresh_lists,
}


def seen_of(script: Script) -> list[Any]:
    touched = [thing() if isinstance(thing, types.FunctionType) else thing for thing in script.touched]
    return [*state_of(script.model, *touched), torch.get_rng_state()]


def trained(script: Script, num_steps: int = 3) -> list[Any]:
    torch.manual_seed(1)
    for _ in range(num_steps):
        script.step()
    return seen_of(script)


def made(name: str) -> Script:
    torch.manual_seed(0)
    return SCRIPTS[name]()


@pytest.mark.parametrize("name", SCRIPTS)
def test_everything_is_as_before(name: str) -> None:
    plain = made(name)
    peak = peak_bytes(lambda: [plain.step() for _ in range(3)], plain.model)
    expected = trained(made(name))
    script = made(name)
    before = seen_of(script)
    fitted = recoup.fit(script.model, step=script.step, budget=int(0.9 * peak), optimizer=script.optimizer)
    assert fitted.verification.gradients == "bit-equal"
    if script.optimizer is not None:
        assert is_applied(script.model)
    assert_same(seen_of(script), before, name)
    assert_same(trained(script), expected, name)


@pytest.mark.parametrize("name", ["globals", "second model"])
def test_all_that_the_step_makes_counts(name: str) -> None:
    """State of optimizers that the step reaches, too, whether or not they are given."""
    script = made(name)
    peak = peak_bytes(lambda: [script.step() for _ in range(3)], script.model)
    fresh = made(name)
    assert recoup.measure(fresh.model, step=fresh.step).plain_bytes >= 0.98 * peak


@pytest.mark.parametrize("entry", ["measure", "audit", "verify"])
def test_the_pieces_leave_everything_as_before_too(entry: str) -> None:
    script = made("method")
    plan = recoup.plan(recoup.measure(script.model, step=script.step, optimizer=script.optimizer), "1GiB")
    before = seen_of(script)
    if entry == "measure":
        recoup.measure(script.model, step=script.step, optimizer=script.optimizer)
    elif entry == "audit":
        recoup.audit(script.model, step=script.step)
    else:
        recoup.verify(script.model, plan, step=script.step, optimizer=script.optimizer)
    assert_same(seen_of(script), before)


def test_as_before_after_a_budget_that_is_refused() -> None:
    script = made("second model")
    before = seen_of(script)
    with pytest.raises(recoup.errors.BudgetError, match="smallest"):
        recoup.fit(script.model, step=script.step, budget="10KiB", optimizer=script.optimizer)
    assert not is_applied(script.model)
    assert_same(seen_of(script), before)


# Failing steps


def test_the_first_error_of_a_failing_step_is_shown() -> None:
    """A retry would fail otherwise: the file is gone then, the list is longer, the phase is another."""
    model, (x, y) = Classifier(), examples()
    calls: list[int] = []

    def step() -> None:
        calls.append(len(calls))
        F.cross_entropy(model(x), y).backward()
        raise ValueError(f"failure {calls[-1]} of the user's own")

    with pytest.raises(SampleError, match="ValueError: failure 0 of the user's own"):
        recoup.fit(model, step=step, budget="1GiB")
    assert calls == []


def test_the_first_error_where_the_step_consumes_something() -> None:
    model, (_x, y) = Classifier(), examples()
    opened = []

    class Stream:
        def read(self) -> Tensor:
            if opened:
                raise OSError("already open")
            opened.append(self)
            raise KeyError("no column 'text'")

    stream = Stream()

    def step() -> None:
        F.cross_entropy(model(stream.read()), y).backward()

    with pytest.raises(SampleError, match="no column 'text'"):
        recoup.fit(model, step=step, budget="1GiB")


def test_everything_is_as_before_after_a_step_that_fails() -> None:
    script = made("method")
    before = seen_of(script)
    own = script.step

    def step() -> None:
        own()
        raise RuntimeError("after the step")

    with pytest.raises(SampleError, match="RuntimeError: after the step"):
        recoup.fit(script.model, step=step, budget="1GiB", optimizer=script.optimizer)
    assert_same(seen_of(script), before)


def test_a_step_without_a_backward() -> None:
    model, (x, y) = Classifier(), examples()
    with pytest.raises(recoup.errors.FitError, match="backward"):
        recoup.fit(model, step=lambda: F.cross_entropy(model(x), y), budget="1GiB")


def test_autograd_grad_inside_a_step_is_named() -> None:
    """A gradient penalty by `torch.autograd.grad` works, or the message says what to use."""
    model, (x, y) = Classifier(), examples()

    def step() -> None:
        loss = F.cross_entropy(model(x), y)
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            parameter.grad = gradient

    with pytest.raises(recoup.errors.FitError, match=r"autograd\.grad"):
        recoup.fit(model, step=step, budget="1GiB")


# Iterators


def batches() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*examples(512)), batch_size=128)


def produced(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


ITERATORS: dict[str, Callable[[], Iterator[Any]]] = {
    "loader": lambda: iter(batches()),
    "cycle": lambda: itertools.cycle(batches()),
    "generator": lambda: produced(batches()),
    "generator expression": lambda: (batch for batch in batches()),
    "map": lambda: map(tuple, batches()),
    "chain": lambda: itertools.chain.from_iterable([batches(), batches()]),
}


@pytest.mark.parametrize("name", ITERATORS)
def test_an_iterator_is_refused_before_it_is_advanced(name: str) -> None:
    model = Classifier()
    torch.manual_seed(0)
    iterator = ITERATORS[name]()
    ran = []

    def step() -> None:
        ran.append(1)
        x, y = next(iterator)
        F.cross_entropy(model(x), y).backward()

    with pytest.raises(SampleError, match=r"next\("):
        recoup.fit(model, step=step, budget="1GiB")
    assert ran == []
    first, _ = next(iterator)
    torch.manual_seed(0)
    assert torch.equal(first, next(ITERATORS[name]())[0])
    assert not is_applied(model)


def test_an_iterator_on_an_object_is_refused() -> None:
    """As trainers hold it."""

    class Loop:
        def __init__(self) -> None:
            self.model, self.batches = Classifier(), iter(batches())

        def step(self) -> None:
            x, y = next(self.batches)
            F.cross_entropy(self.model(x), y).backward()

    loop = Loop()
    with pytest.raises(SampleError, match=r"next\("):
        recoup.fit(loop.model, step=loop.step, budget="1GiB")
    assert len(list(loop.batches)) == 4


def test_an_iterator_beside_the_batch_on_an_object_is_no_obstacle() -> None:
    """The advice of the message, followed in a trainer's class: the step uses the batch, not the iterator."""

    class Loop:
        def __init__(self) -> None:
            self.model, self.batches = Classifier(), iter(batches())
            self.batch = next(self.batches)

        def step(self) -> None:
            x, y = self.batch
            F.cross_entropy(self.model(x), y).backward()

    loop = Loop()
    recoup.fit(loop.model, step=loop.step, budget="1GiB")
    assert len(list(loop.batches)) == 3


def test_an_enumerated_loader_is_refused() -> None:
    model, numbered = Classifier(), enumerate(batches())

    def step() -> None:
        _, (x, y) = next(numbered)
        F.cross_entropy(model(x), y).backward()

    with pytest.raises(SampleError, match=r"next\("):
        recoup.fit(model, step=step, budget="1GiB")
    assert next(numbered)[0] == 0


def test_a_bar_around_a_loader_is_no_iterator() -> None:
    """``tqdm(loader)`` starts anew each time, as the loader does."""
    model, data = Classifier(), tqdm(batches(), disable=True)

    def step() -> None:
        for x, y in data:
            F.cross_entropy(model(x), y).backward()

    recoup.fit(model, step=step, budget="1GiB")


def test_an_iterator_that_the_step_does_not_advance_is_no_obstacle() -> None:
    """The advice of the message, followed: the batch is taken outside, and the iterator is where it was."""
    model, iterator = Classifier(), iter(batches())
    batch = next(iterator)

    def step() -> None:
        x, y = batch
        F.cross_entropy(model(x), y).backward()

    recoup.fit(model, step=step, budget="1GiB")
    assert len(list(iterator)) == 3


def test_counts_of_itertools_are_put_back() -> None:
    """An iterator that can be copied may be put back; refusing it would be right as well, advancing it never."""
    model, (x, y) = Classifier(), examples()
    numbers = iter([1.0, 2.0, 3.0])

    def step() -> None:
        (next(numbers, 4.0) * F.cross_entropy(model(x), y)).backward()

    with contextlib.suppress(SampleError):
        recoup.fit(model, step=step, budget="1GiB")
    assert list(numbers) == [1.0, 2.0, 3.0]
