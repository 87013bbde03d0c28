"""accelerate: its optimizers, `prepare` before and after `fit`, accumulation and mixed precision."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState, PartialState
from everyday.subjects import Classifier, assert_same, examples, peak_bytes, state_of
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import recoup
from recoup.engines import is_applied

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Any:
    yield
    forget()


def forget() -> None:
    """accelerate's state is the process's: the next Accelerator starts afresh."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def attributes_of(*classes: type) -> list[dict[str, Any]]:
    return [dict(vars(cls)) for cls in classes]


CLASSES = (
    AcceleratedOptimizer,
    AcceleratedScheduler,
    torch.optim.Optimizer,
    torch.optim.AdamW,
    torch.optim.lr_scheduler.LRScheduler,
    Accelerator,
    nn.Module,
)


def script(
    fit_when: str | None, *, precision: str = "no", accumulates: int = 1
) -> tuple[list[float], list[Any], int]:
    """accelerate's tutorial, with `fit` before or after `prepare`: losses, final state, and the peak of it all."""
    forget()
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(*examples(512)), batch_size=128)
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=accumulates)
    model, criterion = Classifier(), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    batch = next(iter(loader))
    options = {"loss": criterion, "accumulates": accumulates > 1}
    if fit_when == "before":
        fit_to(model, batch, optimizer=optimizer, **options)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if fit_when == "after":
        fit_to(model, batch, optimizer=optimizer, **options)
    elif fit_when == "unwrapped":
        fit_to(accelerator.unwrap_model(model), batch, optimizer=optimizer, **options)
    elif fit_when == "step":

        def step() -> None:
            x, y = batch
            with accelerator.accumulate(model):
                loss = criterion(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        fit_to(model, step=step, optimizer=optimizer)
    losses = []

    def loop() -> None:
        for x, y in loader:
            with accelerator.accumulate(model):
                output = model(x)
                loss = criterion(output, y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())

    torch.manual_seed(1)
    peak = peak_bytes(loop, model)
    return losses, state_of(accelerator.unwrap_model(model), optimizer, scheduler), peak


@functools.cache
def plain_script(**options: Any) -> tuple[list[float], list[Any], int]:
    return script(None, **options)


def fit_to(model: nn.Module, *sample: Any, **options: Any) -> None:
    budget = int(0.8 * recoup.measure(model, *sample, **options).plain_bytes)
    fitted = recoup.fit(model, *sample, budget=budget, **options)
    assert fitted.verification.gradients == "bit-equal"
    assert is_applied(model)


@pytest.mark.parametrize("when", ["before", "after", "unwrapped", "step"])
def test_fit_around_prepare(when: str) -> None:
    losses, state, plain_bytes = plain_script()
    fitted_losses, fitted_state, peak = script(when)
    assert fitted_losses == losses
    assert_same(fitted_state, state)
    assert peak < 0.9 * plain_bytes


@pytest.mark.parametrize("when", ["before", "after"])
def test_accumulation(when: str) -> None:
    losses, state, _ = plain_script(accumulates=2)
    fitted_losses, fitted_state, _ = script(when, accumulates=2)
    assert fitted_losses == losses
    assert_same(fitted_state, state)


def test_bf16_prepared_first() -> None:
    """`prepare` wraps the forward in autocast: fitted afterwards, the plan is made for it, and no warning comes."""
    losses, state, _ = plain_script(precision="bf16")
    fitted_losses, fitted_state, _ = script("after", precision="bf16")
    assert fitted_losses == losses
    assert_same(fitted_state, state)


def test_bf16_prepared_afterwards_is_said() -> None:
    """The plan was made for float32: the numbers stay, and one warning says what to do."""
    losses, state, _ = plain_script(precision="bf16")
    with pytest.warns(recoup.errors.RecoupWarning, match="autocast|bfloat16") as caught:
        fitted_losses, fitted_state, _ = script("before", precision="bf16")
    assert len(caught) == 1
    assert fitted_losses == losses
    assert_same(fitted_state, state)


def test_no_class_is_changed() -> None:
    before = attributes_of(*CLASSES)
    script("after")
    assert attributes_of(*CLASSES) == before


def test_accelerate_works_on_for_the_whole_process() -> None:
    """Another model, made and trained after the fit: steps count, schedulers advance."""
    script("after")
    losses, state, _ = plain_script()
    again, state_again, _ = script(None)
    assert again == losses
    assert_same(state_again, state)
    assert state[1]["state"][0]["step"] == 4


def test_an_accelerated_optimizer_is_as_before_and_can_be_copied_and_saved() -> None:
    accelerator = Accelerator()
    model = Classifier()
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    methods = dict(vars(optimizer))
    inner = dict(vars(optimizer.optimizer))
    fit_to(model, examples(), loss=nn.CrossEntropyLoss(), optimizer=optimizer)
    assert dict(vars(optimizer)) == methods
    assert dict(vars(optimizer.optimizer)) == inner
    assert not optimizer.state
    copied = copy.deepcopy(optimizer.optimizer)
    assert_same(copied.state_dict(), optimizer.state_dict())


def test_state_counts_as_the_wrapped_optimizer_s() -> None:
    model, batch = Classifier(), examples()
    own = torch.optim.AdamW(model.parameters())
    expected = recoup.measure(model, batch, loss=nn.CrossEntropyLoss(), optimizer=own).residents
    wrapped = Accelerator().prepare(own)
    assert recoup.measure(model, batch, loss=nn.CrossEntropyLoss(), optimizer=wrapped).residents == expected
    assert expected.optimizer_bytes > 0


def test_two_accelerated_optimizers_in_a_list() -> None:
    accelerator, model = Accelerator(), Classifier()
    first, second = accelerator.prepare(
        torch.optim.AdamW(model.blocks.parameters()),
        torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9),
    )
    fit_to(model, examples(), loss=nn.CrossEntropyLoss(), optimizer=[first, second])
    assert not first.state
    assert not second.state
    F.cross_entropy(model(examples()[0]), examples()[1]).backward()
    first.step()
    second.step()
    assert len(first.state) == len(list(model.blocks.parameters()))
    assert len(second.state) == 2


def test_a_prepared_loader_s_batch_and_state_saved_after_fit(tmp_path: Any) -> None:
    accelerator, model = Accelerator(), Classifier()
    loader = DataLoader(TensorDataset(*examples()), batch_size=64)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    fit_to(model, next(iter(loader)), loss=nn.CrossEntropyLoss(), optimizer=optimizer)
    for x, y in loader:
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    expected = state_of(model, optimizer)
    accelerator.save_state(tmp_path / "state")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(tmp_path / "state")
    assert_same(state_of(model, optimizer), expected)
