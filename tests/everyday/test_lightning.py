"""lightning: `fit` before its Trainer runs, in its hooks, and with its optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from everyday.subjects import Classifier, assert_same, examples, state_of
from lightning import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import recoup
from recoup.engines import is_applied

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*num_workers.*"),
    pytest.mark.filterwarnings("ignore:.*litlogger.*"),
    pytest.mark.filterwarnings("ignore:.*tensorboard.*"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
    pytest.mark.filterwarnings("ignore:.*not supported by the model summary.*"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
]


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*examples(512)), batch_size=128)


def budget_of(model: nn.Module, sample: Any, **options: Any) -> int:
    return int(0.8 * recoup.measure(model, sample, **options).plain_bytes)


class Task(LightningModule):
    """The tutorial's module: a network, its loss, its optimizer with a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.criterion = Classifier(), nn.CrossEntropyLoss()
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = self.criterion(self(x), y)
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class AtStart(Task):
    """Fits its network when everything is set up."""

    fits = False

    def on_fit_start(self) -> None:
        batch = next(iter(loader()))
        if self.fits:
            options = {"loss": self.criterion, "optimizer": self.optimizers(), "accumulates": True}
            recoup.fit(self.network, batch, budget=budget_of(self.network, batch, **options), **options)


class FittedAtStart(AtStart):
    fits = True


def run(tmp_path: Path, make: type[Task] = Task, fit_when: str | None = None, **options: Any) -> list[Any]:
    seed_everything(0, verbose=False)
    data = loader()
    task = make()
    if fit_when == "network":
        batch = next(iter(data))
        optimizer = torch.optim.AdamW(task.parameters())
        chosen = {"loss": task.criterion, "optimizer": optimizer, "accumulates": True}
        recoup.fit(task.network, batch, budget=budget_of(task.network, batch, **chosen), **chosen)
    elif fit_when == "task":
        batch = next(iter(data))
        chosen = {"loss": task.criterion, "accumulates": True}
        recoup.fit(task, batch, budget=budget_of(task, batch, **chosen), **chosen)
    seed_everything(1, verbose=False)
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        default_root_dir=tmp_path / f"{make.__name__} {fit_when}",
        enable_progress_bar=False,
        logger=False,
        **options,
    )
    trainer.fit(task, data)
    if fit_when is not None or make is FittedAtStart:
        assert is_applied(task)
    return [task.losses, state_of(task, trainer.optimizers[0])]


@pytest.mark.parametrize("when", ["network", "task"])
def test_fitted_before_the_trainer_runs(tmp_path: Path, when: str) -> None:
    assert_same(run(tmp_path, Task, when), run(tmp_path))


def test_fitted_in_a_hook(tmp_path: Path) -> None:
    assert_same(run(tmp_path, FittedAtStart), run(tmp_path, AtStart))


@pytest.mark.parametrize(
    "options", [{"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}, {"num_sanity_val_steps": 1}]
)
def test_the_trainer_s_options(tmp_path: Path, options: dict[str, Any]) -> None:
    assert_same(run(tmp_path, Task, "network", **options), run(tmp_path, **options))


def test_bf16_mixed_is_another_precision_than_measured(tmp_path: Path) -> None:
    """A plan for float32 runs under bf16-mixed with the same numbers, and one warning says what to do."""
    expected = run(tmp_path, precision="bf16-mixed")
    with pytest.warns(recoup.errors.RecoupWarning, match="autocast|bfloat16") as caught:
        found = run(tmp_path, Task, "network", precision="bf16-mixed")
    assert len([one for one in caught if issubclass(one.category, recoup.errors.RecoupWarning)]) == 1
    assert_same(found, expected)


class Manual(Task):
    """Manual optimization: the optimizers are LightningOptimizers."""

    fits = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def on_train_start(self) -> None:
        batch = next(iter(self.trainer.train_dataloader))
        if self.fits:
            options = {"loss": self.criterion, "optimizer": self.optimizers(), "accumulates": True}
            recoup.fit(self.network, batch, budget=budget_of(self.network, batch, **options), **options)
            assert is_applied(self.network)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.criterion(self(x), y)
        self.manual_backward(loss)
        optimizer.step()
        self.losses.append(loss.item())


class FittedManual(Manual):
    fits = True


def test_manual_optimization(tmp_path: Path) -> None:
    found, expected = run(tmp_path, FittedManual), run(tmp_path, Manual)
    assert_same(found, expected)
    # Two epochs of four batches: nothing was stepped by `fit`.
    assert found[1][1]["state"][0]["step"] == 8


class Adversarial(LightningModule):
    """Two optimizers, as lightning's GAN example has them; the generator is fitted by a whole step."""

    fits = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = Classifier()
        self.discriminator = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
        self.losses: list[float] = []

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=1e-3),
            torch.optim.Adam(self.discriminator.parameters(), lr=1e-3),
        ]

    def on_train_start(self) -> None:
        x, _ = next(iter(self.trainer.train_dataloader))
        if self.fits:
            options = {"loss": lambda output: F.softplus(-self.discriminator(output)).mean()}
            options |= {"optimizer": self.optimizers(), "accumulates": True}
            recoup.fit(self.generator, x, budget=budget_of(self.generator, x, **options), **options)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = F.softplus(-self.discriminator(self.generator(x))).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        real = torch.ones(len(x), 10)
        other = F.softplus(-self.discriminator(real)).mean()
        other = other + F.softplus(self.discriminator(self.generator(x).detach())).mean()
        second.zero_grad()
        self.manual_backward(other)
        second.step()
        self.untoggle_optimizer(second)
        self.losses += [loss.item(), other.item()]


class FittedAdversarial(Adversarial):
    fits = True


def test_two_lightning_optimizers_in_a_list(tmp_path: Path) -> None:
    def run(make: type[Adversarial]) -> list[Any]:
        seed_everything(0, verbose=False)
        task, data = make(), loader()
        trainer = Trainer(
            max_epochs=1,
            accelerator="cpu",
            default_root_dir=tmp_path / make.__name__,
            enable_progress_bar=False,
            logger=False,
        )
        seed_everything(1, verbose=False)
        trainer.fit(task, data)
        return [task.losses, state_of(task, *trainer.optimizers)]

    assert_same(run(FittedAdversarial), run(Adversarial))


def test_checkpoints_of_a_fitted_task(tmp_path: Path) -> None:
    """lightning saves and resumes it; the plan is no part of the file."""
    seed_everything(0, verbose=False)
    task, data = Task(), loader()
    recoup.fit(task, next(iter(data)), budget="1GiB", loss=task.criterion)
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, enable_progress_bar=False, logger=False
    )
    trainer.fit(task, data)
    trainer.save_checkpoint(tmp_path / "task.ckpt")
    loaded = Task.load_from_checkpoint(tmp_path / "task.ckpt")
    assert_same(dict(loaded.state_dict()), dict(task.state_dict()))
