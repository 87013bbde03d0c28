"""``RecoupCallback(autopilot=True)``: a step that ran out of memory leaves no trace in losses, weights and metrics."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from everyday.subjects import assert_same, gpt2, state_of
from integrations.test_accelerate import prepared
from integrations.test_lightning import BUDGET, run
from integrations.test_transformers import Losses, Rows, budget_for, padded, trainer_for
from lightning_subjects import Classifier
from slowly import slow_but
from test_autopilot import Counting
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer

import recoup
from recoup.errors import BudgetError
from recoup.integrations.accelerate import fit_prepared
from recoup.integrations.lightning import RecoupCallback as LightningCallback
from recoup.integrations.transformers import RecoupCallback

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own, about workers and loggers

NUM_FAILURES = 3


def failing(counting: Counting, seed: str) -> Counting:
    """Fails now and then, at operations of all kinds."""
    chosen, part = random.Random(seed), counting.num_operations // (NUM_FAILURES + 1)
    return Counting(*(number * part + chosen.randrange(part // 2) for number in range(1, NUM_FAILURES + 1)))


@contextmanager
def lines_of(name: str, level: int = logging.INFO) -> Iterator[list[str]]:
    """What is logged at a level, and above."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


# transformers


class Failing(Trainer):
    """Counts the operations of trained steps, and fails at some of them; keeps metrics of its own."""

    mode: Any = None

    def __init__(self, **given: Any) -> None:
        super().__init__(eval_dataset=Rows(4), **given)

    def compute_loss(self, model: Any, inputs: Any, **given: Any) -> Any:
        self.metrics = vars(self).setdefault("metrics", {"num_tokens": [], "keys": []})
        self.metrics["num_tokens"].append(inputs["input_ids"].numel())
        self.metrics["keys"].append(sorted(inputs))
        labels = inputs.pop("labels")
        return super().compute_loss(model, inputs | {"labels": labels}, **given)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        trains = self.mode is not None and "training_step" in vars(self)
        with self.mode if trains else nullcontext():
            return super().training_step(*args, **kwargs)


def train(
    folder: Path, callback: RecoupCallback | None, mode: Any = None, *, times: int = 1, **options: Any
) -> tuple[Any, Trainer]:
    """All that could differ."""
    noted = Losses()
    callbacks = [noted] if callback is None else [noted, callback]
    trainer: Any = trainer_for(folder, *callbacks, kind=Failing, max_steps=4, **options)
    trainer.mode = mode
    for _ in range(times):
        trainer.train()
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return (noted.losses, evaluated, trainer.metrics, state_of(trainer.model)), trainer


def assert_equal(found: Any, expected: Any) -> None:
    assert found[:-1] == expected[:-1]
    assert_same(found[-1], expected[-1])


SITUATIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bf16, evaluation in between": {"bf16": True, "eval_strategy": "steps", "eval_steps": 2},
    "two runs": {"times": 2, "gradient_accumulation_steps": 2},
}


QUICK = [*((name, False) for name in SITUATIONS), ("accumulation", True)]


@pytest.mark.parametrize("case", slow_but(QUICK, itertools.product(SITUATIONS, [False, True])), ids=str)
def test_losses_weights_and_metrics_of_the_trainer(case: tuple[str, bool], tmp_path: Path) -> None:
    options, sizes = SITUATIONS[case[0]], case[1]
    expected, _ = train(tmp_path / "plain", None, **options)
    counting = Counting()
    settings: Any = {"autopilot": True, "sizes": sizes, "race": False}
    callback = RecoupCallback(budget_for(share=0.85), **settings)
    found, trainer = train(tmp_path / "counting", callback, counting, **options)
    assert_equal(found, expected)
    assert callback.pilot is not None
    num_steps = 4 * options.get("gradient_accumulation_steps", 1)
    assert callback.pilot.summary() == f"{num_steps} steps, none out of memory."
    assert "training_step" not in vars(trainer)
    assert (callback.pilot.by_size is not None) == sizes
    callback = RecoupCallback(budget_for(share=0.85), **settings)
    with lines_of("transformers.recoup") as lines:
        found, trainer = train(tmp_path / "failing", callback, failing(counting, str(options)), **options)
    assert_equal(found, expected)
    events = [line for line in lines if "out of memory (injected at operation" in line]
    assert len(events) == NUM_FAILURES
    assert callback.pilot is not None
    assert lines[-1] == callback.pilot.summary()
    assert lines[-1].startswith(f"{num_steps} steps, ")
    assert sum("Plans by size, input_ids.shape[1] up to" in line for line in lines) == sizes * options.get(
        "times", 1
    )


def test_a_batch_that_fits_no_plan_ends_the_training_and_the_next_run_starts_anew(tmp_path: Path) -> None:
    callback = RecoupCallback(budget_for(), autopilot=True, race=False)
    always = Counting(*range(1, 100_000))
    trainer: Any = trainer_for(tmp_path, callback, kind=Failing, max_steps=1)
    trainer.mode = always
    with pytest.raises(BudgetError) as caught:
        trainer.train()
    # Each attempt fails at its first operation; how many there are depends on the plan, and so on seconds.
    assert callback.pilot is not None
    number = len(callback.pilot.events) + 1
    assert number > 2
    assert f"ran out of memory (injected at operation {number}), and no plan fits" in str(caught.value)
    trainer.mode = None
    trainer.train()
    assert "training_step" not in vars(trainer)


# Lightning


def _counted(module: Any) -> Any:
    loop = module.trainer.fit_loop.epoch_loop.automatic_optimization
    trains = module.mode is not None and "_make_closure" in vars(loop)
    return module.mode if trains else nullcontext()


class FailingModule(Classifier):
    """Counts the operations of trained steps, and fails at some of them."""

    def __init__(self, mode: Any = None) -> None:
        super().__init__()
        self.mode = mode

    def training_step(self, batch: Any) -> Tensor:
        with _counted(self):
            loss = super().training_step([batch.pop(0), batch.pop(0)])
            self.log("mean", loss, on_step=False, on_epoch=True, batch_size=256)
            return loss

    def backward(self, loss: Tensor) -> None:
        with _counted(self):
            super().backward(loss)

    def validation_step(self, batch: Any) -> None:
        self.log("valid", nn.functional.cross_entropy(self.head(self.body(batch[0])), batch[1]))

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(64, 16), torch.ones(64, dtype=torch.long)), batch_size=32)


class Metrics(lightning.Callback):
    """What was logged, epoch by epoch."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        metrics = trainer.callback_metrics
        self.seen.append([float(metrics[name]) for name in ("loss", "mean", "valid")])


def lightning_run(mode: Any, *callbacks: Any, **options: Any) -> tuple[Any, Any]:
    noted = Metrics()
    _, module = run(noted, *callbacks, module=FailingModule(mode), max_epochs=2, **options)
    return noted.seen, module


@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed", "accumulate_grad_batches": 2}])
def test_weights_and_metrics_of_lightning(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    expected, plain = lightning_run(None, **options)
    counting = Counting()
    torch.manual_seed(0)
    callback = LightningCallback(BUDGET, autopilot=True, race=False)
    found, module = lightning_run(counting, callback, **options)
    assert found == expected
    assert_same(state_of(module), state_of(plain))
    assert callback.pilot is not None
    assert callback.pilot.summary() == "6 steps, none out of memory."
    callback = LightningCallback(BUDGET, autopilot=True, race=False)
    with lines_of("lightning.pytorch.recoup") as lines:
        torch.manual_seed(0)
        found, module = lightning_run(failing(counting, "x"), callback, **options)
    assert found == expected
    assert_same(state_of(module), state_of(plain))
    assert module.num_steps == plain.num_steps
    assert ["out of memory (injected at" in line for line in lines] == [True] * NUM_FAILURES + [False]
    assert lines[-1].startswith("6 steps, ")


class Texts(lightning.LightningModule):
    """Batches of several lengths; its step calls the module itself."""

    def __init__(self, mode: Any = None) -> None:
        super().__init__()
        self.net, self.mode = gpt2(), mode

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.net(input_ids=input_ids, labels=labels).loss
        return loss

    def training_step(self, batch: Any) -> Tensor:
        with _counted(self):
            return self(**batch)

    def backward(self, loss: Tensor) -> None:
        with _counted(self):
            super().backward(loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def train_on_texts(mode: Any, *callbacks: Any, path: Any = None, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = Texts(mode)
    defaults = {"max_epochs": 1, "enable_checkpointing": False, "accumulate_grad_batches": 2}
    trainer = lightning.Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **defaults | options,
    )
    loader = DataLoader(Rows(), batch_size=4, collate_fn=padded)
    trainer.fit(module, loader, ckpt_path=path, weights_only=False)
    return state_of(module), trainer


def test_sizes_in_lightning_and_in_its_checkpoints(tmp_path: Path) -> None:
    settings: Any = {"autopilot": True, "sizes": True, "race": False}
    expected, _ = train_on_texts(None)
    counting = Counting()
    with lines_of("lightning.pytorch.utilities.rank_zero") as lines:
        callback = LightningCallback(budget_for(share=0.85), **settings)
        found, trainer = train_on_texts(
            counting, callback, enable_checkpointing=True, default_root_dir=tmp_path
        )
    assert_same(found, expected)
    assert any("Plans by size, input_ids.shape[1] up to" in line for line in lines)
    callback = LightningCallback(budget_for(share=0.85), **settings)
    found, _ = train_on_texts(failing(counting, "texts"), callback)
    assert_same(found, expected)
    assert callback.pilot is not None
    assert {event.batch.partition(" = ")[0] for event in callback.pilot.events} == {"input_ids.shape[1]"}
    resumed = LightningCallback(budget_for(share=0.85), **settings)
    path = trainer.checkpoint_callback.best_model_path
    found, _ = train_on_texts(failing(counting, "resumed"), resumed, path=path, max_epochs=2)
    assert resumed.fitted is None
    assert resumed.pilot is not None
    assert resumed.pilot.by_size is not None
    assert len(resumed.pilot.events) == NUM_FAILURES
    assert_same(found, train_on_texts(None, path=path, max_epochs=2)[0])


# Accelerate


@pytest.mark.parametrize("options", [{}, {"mixed_precision": "bf16", "gradient_accumulation_steps": 2}])
def test_the_recipe_for_accelerate(options: dict[str, Any]) -> None:
    def train(make_mode: Any) -> Any:
        accelerator, model, optimizer, loader = prepared(128, **options)
        loss, batch = nn.CrossEntropyLoss(), next(iter(DataLoader(loader.dataset, batch_size=128)))
        pilot: Any = None
        if make_mode is not None:
            settings: Any = {"loss": loss, "optimizer": optimizer, "race": False}
            fitted = fit_prepared(accelerator, model, batch, budget="1MiB", **settings)
            pilot = recoup.autopilot(fitted, optimizer=optimizer)

        def step(inputs: Tensor, targets: Tensor) -> None:
            with nullcontext() if make_mode is None else make_mode:
                accelerator.backward(loss(model(inputs), targets))

        for inputs, targets in loader:
            with accelerator.accumulate(model):
                run_step = partial(step, inputs, targets)
                run_step() if pilot is None else pilot.step(run_step)
                optimizer.step()
                optimizer.zero_grad()
        return state_of(model), pilot

    counting = Counting()
    expected, _ = train(None)
    assert_same(train(counting)[0], expected)
    found, pilot = train(failing(counting, "accelerate"))
    assert_same(found, expected)
    assert len(pilot.events) == NUM_FAILURES
