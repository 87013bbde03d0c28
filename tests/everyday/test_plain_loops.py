"""Loops as torch's tutorials have them: loader, scheduler, scaler, accumulation; the whole loop as a step."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from everyday.subjects import Classifier, assert_same, examples, peak_bytes, state_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

import recoup
from recoup.engines import is_applied

Loop = Callable[[nn.Module, torch.optim.Optimizer, "list[Any]"], "list[Any]"]


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> list[Any]:
    """The first loop of torch's tutorial."""
    criterion, losses = nn.CrossEntropyLoss(), []
    for x, y in batches:
        pred = model(x)
        loss = criterion(pred, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def scheduled(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> list[Any]:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=len(batches))
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses += [loss.item(), optimizer.param_groups[0]["lr"]]
    plateau.step(1.0)
    return losses


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> list[Any]:
    """Mixed precision with a scaler, which on a CPU scales as on a GPU."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    losses = []
    for x, y in batches:
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses += [loss.item(), scaler.get_scale()]
    return losses


def scaled_in_float32(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> list[Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        losses.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def accumulating(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> list[Any]:
    losses = []
    for index, (x, y) in enumerate(batches):
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        if (index + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def averaging(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> list[Any]:
    """Weights averaged in a copy of the fitted model, which has its plan too."""
    averaged = AveragedModel(model)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        averaged.update_parameters(model)
        losses.append(loss.item())
    update_bn([x for x, _ in batches], averaged)
    with torch.no_grad():
        return [*losses, averaged(batches[0][0]).sum().item()]


def evaluating(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> list[Any]:
    """Validation between steps, in eval mode and without gradients."""
    losses = []
    for x, y in batches:
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.inference_mode():
            losses.append(F.cross_entropy(model(x), y).item())
        losses.append(loss.item())
    return losses


def twice(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> list[Any]:
    """Restored from a checkpoint on the way: states go out and in as in the plain run."""
    losses = plain(model, optimizer, batches)
    saved = pickle.loads(pickle.dumps({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
    losses += plain(model, optimizer, batches)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return losses + plain(model, optimizer, batches)


def copied(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> list[Any]:
    """A teacher copied from the fitted student, frozen, in one loss with it."""
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    losses = []
    for x, _ in batches:
        optimizer.zero_grad()
        loss = F.kl_div(model(x).log_softmax(-1), teacher(x).softmax(-1), reduction="batchmean")
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


LOOPS: dict[str, tuple[Loop, dict[str, Any]]] = {
    "plain": (plain, {}),
    "scheduled": (scheduled, {}),
    "scaled in float32": (scaled_in_float32, {}),
    "accumulating": (accumulating, {"accumulates": True}),
    "averaging": (averaging, {}),
    "evaluating": (evaluating, {}),
    "twice": (twice, {}),
    "copied": (copied, {}),
}


def run(loop: Loop, budget: int | None, **options: Any) -> tuple[list[Any], list[Any], int]:
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(*examples(512)), batch_size=128, shuffle=True)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = list(loader)
    if budget is not None:
        recoup.fit(
            model, batches[0], budget=budget, loss=nn.CrossEntropyLoss(), optimizer=optimizer, **options
        )
        assert is_applied(model)
    torch.manual_seed(1)
    losses: list[Any] = []
    peak = peak_bytes(lambda: losses.extend(loop(model, optimizer, batches)), model, batches[0])
    return losses, state_of(model, optimizer), peak


@pytest.mark.filterwarnings("ignore:Seems like .optimizer.step..*has been overridden:UserWarning")
@pytest.mark.parametrize("name", LOOPS)
def test_the_same_losses_and_weights(name: str) -> None:
    loop, options = LOOPS[name]
    losses, state, _ = run(loop, None)
    # Not of the loop itself, which may hold more than a step does: averages, a teacher, saved states.
    _, _, plain_bytes = run(accumulating if options else plain, None)
    budget = int(0.85 * plain_bytes)
    fitted_losses, fitted_state, peak = run(loop, budget, **options)
    assert fitted_losses == losses
    assert_same(fitted_state, state)
    if loop in (plain, scheduled, scaled_in_float32, accumulating, evaluating):
        assert peak <= budget


@pytest.mark.parametrize(
    "when", ["before the forward", "before the backward", "after the step", "kept as zeros"]
)
def test_gradients_are_cleared_at_any_place(when: str) -> None:
    """Last step's gradients live until then: the peak is under the budget wherever, or a warning says why not."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> list[Any]:
        losses = []
        for x, y in batches:
            if when in ("before the forward", "kept as zeros"):
                optimizer.zero_grad(set_to_none=when == "before the forward")
            pred = model(x)
            loss = F.cross_entropy(pred, y)
            if when == "before the backward":
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if when == "after the step":
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    losses, state, _ = run(loop, None)
    _, _, plain_bytes = run(plain, None)
    budget = int(0.75 * plain_bytes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", recoup.errors.RecoupWarning)
        fitted_losses, fitted_state, peak = run(loop, budget)
    assert fitted_losses == losses
    assert_same(fitted_state, state)
    assert peak <= budget or [one.category for one in caught] == [recoup.errors.RecoupWarning]


# Mixed precision


def test_autocast_with_a_scaler_as_a_step() -> None:
    def run(is_fitted: bool) -> list[Any]:
        torch.manual_seed(0)
        model, batches = Classifier(), [examples() for _ in range(3)]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if is_fitted:

            def step() -> None:
                x, y = batches[0]
                with torch.autocast("cpu", torch.bfloat16):
                    loss = F.cross_entropy(model(x), y)
                loss.backward()

            budget = int(0.85 * recoup.measure(model, step=step, optimizer=optimizer).plain_bytes)
            recoup.fit(model, step=step, budget=budget, optimizer=optimizer)
            assert is_applied(model)
        torch.manual_seed(1)
        return [scaled(model, optimizer, batches), *state_of(model, optimizer)]

    assert_same(run(is_fitted=True), run(is_fitted=False))


@pytest.mark.parametrize("when", ["around fit", "inside the model"])
def test_autocast_around_fit(when: str) -> None:
    """`fit` called as the step is: under autocast, or with the model's own."""

    class Mixed(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    def run(is_fitted: bool) -> list[Any]:
        torch.manual_seed(0)
        model = Classifier() if when == "around fit" else Mixed()
        batches = [examples() for _ in range(3)]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        options: dict[str, Any] = {"loss": nn.CrossEntropyLoss(), "optimizer": optimizer}
        if is_fitted:
            with torch.autocast("cpu", torch.bfloat16, enabled=when == "around fit"):
                budget = int(0.85 * recoup.measure(model, batches[0], **options).plain_bytes)
                recoup.fit(model, batches[0], budget=budget, **options)
            assert is_applied(model)
        torch.manual_seed(1)
        loop = scaled if when == "around fit" else plain
        return [loop(model, optimizer, batches), *state_of(model, optimizer)]

    assert_same(run(is_fitted=True), run(is_fitted=False))


def test_a_model_in_bfloat16() -> None:
    def run(is_fitted: bool) -> list[Any]:
        torch.manual_seed(0)
        model = Classifier().to(torch.bfloat16)
        batches = [(x.bfloat16(), y) for x, y in (examples() for _ in range(3))]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if is_fitted:
            options: dict[str, Any] = {"loss": nn.CrossEntropyLoss(), "optimizer": optimizer}
            budget = int(0.85 * recoup.measure(model, batches[0], **options).plain_bytes)
            fitted = recoup.fit(model, batches[0], budget=budget, **options)
            assert fitted.verification.gradients == "bit-equal"
        torch.manual_seed(1)
        return [plain(model, optimizer, batches), *state_of(model, optimizer)]

    assert_same(run(is_fitted=True), run(is_fitted=False))


# The whole loop as step=


def test_a_whole_epoch_with_everything_as_a_step() -> None:
    """Loader, scheduler, scaler, accumulation and clipping in one callable, which is given as it is."""

    class Script:
        def __init__(self) -> None:
            torch.manual_seed(0)
            self.model, self.criterion = Classifier(), nn.CrossEntropyLoss()
            self.loader = DataLoader(TensorDataset(*examples(256)), batch_size=64, shuffle=True)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
            self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)
            self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
            self.losses: list[float] = []

        def epoch(self) -> None:
            for index, (x, y) in enumerate(self.loader):
                output = self.model(x)
                loss = self.criterion(output, y) / 2
                self.scaler.scale(loss).backward()
                if index % 2 == 1:
                    self.scaler.unscale_(self.optimizer)
                    nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.losses.append(loss.item())

        def state(self) -> list[Any]:
            return [
                *state_of(self.model, self.optimizer, self.scheduler, self.scaler),
                list(self.losses),
                torch.get_rng_state(),
            ]

    plain_script = Script()
    peak = peak_bytes(plain_script.epoch, plain_script.model)
    expected_script = Script()
    torch.manual_seed(1)
    expected_script.epoch()

    script = Script()
    before = script.state()
    fitted = recoup.fit(script.model, step=script.epoch, budget=int(0.9 * peak), optimizer=script.optimizer)
    assert is_applied(script.model)
    assert fitted.verification.gradients == "bit-equal"
    assert_same(script.state(), before)
    torch.manual_seed(1)
    assert peak_bytes(script.epoch, script.model) <= 0.9 * peak
    assert_same(script.state(), expected_script.state())


def test_a_list_of_optimizers_over_parts_of_a_model() -> None:
    """As for layer-wise rates, with one optimizer that owns no parameter of the model."""

    def run(is_fitted: bool) -> list[Any]:
        torch.manual_seed(0)
        model, (x, y) = Classifier(), examples()
        temperature = nn.Parameter(torch.ones(()))
        optimizers = [
            torch.optim.AdamW(model.blocks.parameters(), lr=1e-3),
            torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9),
            torch.optim.Adam([temperature]),
        ]

        def loss_of(output: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(output / temperature, targets)

        if is_fitted:
            options: dict[str, Any] = {"loss": loss_of, "optimizer": optimizers}
            budget = int(0.85 * recoup.measure(model, (x, y), **options).plain_bytes)
            recoup.fit(model, (x, y), budget=budget, **options)
            assert is_applied(model)
            assert temperature.grad is None
        losses = []
        torch.manual_seed(1)
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            losses.append(loss.item())
        return [losses, *state_of(model, *optimizers)]

    assert_same(run(is_fitted=True), run(is_fitted=False))


def test_frozen_backbone() -> None:
    def run(is_fitted: bool) -> list[Any]:
        torch.manual_seed(0)
        model, batches = Classifier(num_blocks=6), [examples() for _ in range(3)]
        model.blocks[:3].requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        if is_fitted:
            options: dict[str, Any] = {"loss": nn.CrossEntropyLoss(), "optimizer": optimizer}
            budget = int(0.85 * recoup.measure(model, batches[0], **options).plain_bytes)
            recoup.fit(model, batches[0], budget=budget, **options)
            assert is_applied(model)
            assert [p.requires_grad for p in model.blocks[0].parameters()] == [False] * 6
        torch.manual_seed(1)
        return [plain(model, optimizer, batches), *state_of(model, optimizer)]

    assert_same(run(is_fitted=True), run(is_fitted=False))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p, amsgrad=True, foreach=False),
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.Adafactor(p),
    ],
    ids=["amsgrad", "fused", "Adafactor"],
)
def test_state_of_optimizers_is_counted(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Its state is counted and it is as before: the first step after `fit` is its first."""
    torch.manual_seed(0)
    model, batch = Classifier(num_blocks=2), examples()
    optimizer = make(model.parameters())
    before = state_of(model, optimizer)
    profile = recoup.measure(model, batch, loss=nn.CrossEntropyLoss(), optimizer=optimizer)
    assert_same(state_of(model, optimizer), before)
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    made = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )
    assert profile.residents.optimizer_bytes == made


def test_lbfgs_with_a_sample() -> None:
    """It needs a closure: its state is counted, or it is said that it cannot be; it is as before."""
    model, batch = Classifier(num_blocks=2), examples()
    optimizer = torch.optim.LBFGS(model.parameters())
    before = state_of(model, optimizer)
    with contextlib.suppress(recoup.errors.SampleError):
        recoup.measure(model, batch, loss=nn.CrossEntropyLoss(), optimizer=optimizer)
    assert_same(state_of(model, optimizer), before)
