"""`RecoupCallback` in Lightning's Trainer: the same weights as without it, and the plan in every checkpoint."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from everyday.subjects import assert_same, state_of
from lightning_subjects import Classifier
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from recoup.engines import is_applied
from recoup.errors import FitError, SampleError
from recoup.integrations.lightning import RecoupCallback

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own, about workers and loggers

BUDGET = "1.25MiB"


def run(
    *callbacks: lightning.Callback, module: Any = None, path: Any = None, **options: Any
) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = Classifier() if module is None else module
    data = TensorDataset(torch.randn(768, 16), torch.randint(10, (768,)))
    options = {"max_epochs": 1, "enable_checkpointing": False, "logger": False} | options
    trainer = lightning.Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    torch.manual_seed(1)
    trainer.fit(module, DataLoader(data, batch_size=256, shuffle=True), ckpt_path=path, weights_only=False)
    return trainer, module


@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed", "accumulate_grad_batches": 2}])
def test_weights_are_those_without_a_plan(options: dict[str, Any]) -> None:
    callback = RecoupCallback(BUDGET, race=False)
    _, plain = run(**options)
    _, fitted = run(callback, **options)
    assert_same(state_of(plain), state_of(fitted))
    assert plain.num_steps == fitted.num_steps == 3
    assert is_applied(fitted)
    assert callback.fitted is not None
    assert callback.fitted.verification is not None
    assert callback.fitted.verification.peak_bytes <= callback.fitted.plan.budget_bytes
    assert any("recompute" in label for _, label in callback.fitted.plan.describe_units())


def test_gradients_of_the_step_before_are_there_in_the_forward_only() -> None:
    """With accumulation, in the backward as well."""
    usual, accumulating = RecoupCallback("1GiB", race=False), RecoupCallback("1GiB", race=False)
    run(usual)
    run(accumulating, accumulate_grad_batches=2)
    assert usual.fitted is not None
    assert accumulating.fitted is not None
    assert not usual.fitted.profile.accumulates
    assert accumulating.fitted.profile.accumulates
    stale = [v for v in usual.fitted.profile.problem.values if v.name == "gradients of the step before"]
    assert [value.num_bytes for value in stale] == [usual.fitted.profile.residents.gradient_bytes]
    seen, more = usual.fitted.verification, accumulating.fitted.verification
    assert seen is not None
    assert more is not None
    assert usual.fitted.plan.predicted_bytes == seen.peak_bytes
    assert accumulating.fitted.plan.predicted_bytes == more.peak_bytes > seen.peak_bytes
    later = RecoupCallback("1GiB", race=False)
    scheduler = lightning.pytorch.callbacks.GradientAccumulationScheduler({5: 2})
    run(later, scheduler)
    assert later.fitted is not None
    assert later.fitted.profile.accumulates


def test_the_plan_is_saved_with_the_checkpoint_and_reused(tmp_path: Path) -> None:
    first = RecoupCallback(BUDGET, race=False)
    trainer, _ = run(first, enable_checkpointing=True, default_root_dir=tmp_path)
    path = trainer.checkpoint_callback.best_model_path
    resumed = RecoupCallback(BUDGET, race=False)
    _, module = run(resumed, path=path, max_epochs=2)
    assert is_applied(module)
    assert resumed.fitted is None
    assert first.plan is not None
    assert resumed.plan is not None
    assert resumed.plan.to_json() == first.plan.to_json()
    _, plain = run(path=path, max_epochs=2)
    assert_same(state_of(plain), state_of(module))
    others = [("1.5MiB", {}), (BUDGET, {"precision": "bf16-mixed"}), (BUDGET, {"accumulate_grad_batches": 2})]
    for budget, options in others:
        other = RecoupCallback(budget, race=False)
        run(other, path=path, max_epochs=2, **options)
        assert other.fitted is not None, options


def test_figures_go_to_the_loggers(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    run(RecoupCallback(BUDGET, race=False), logger=CSVLogger(tmp_path))
    [folder] = (tmp_path / "lightning_logs").iterdir()
    assert "recoup/peak_gib" in (folder / "metrics.csv").read_text()
    assert (folder / "recoup_plan.json").exists()
    assert (folder / "recoup_report.html").exists()


def test_manual_optimization_is_refused() -> None:
    module = Classifier()
    module.automatic_optimization = False
    with pytest.raises(FitError, match=r"optimizes manually. Call recoup.fit with step="):
        run(RecoupCallback(BUDGET), module=module)


def test_a_module_that_is_compiled_as_a_whole_is_refused() -> None:
    with pytest.raises(FitError, match=r"compiled training_step, .* as in self\.network\.compile\(\)"):
        run(RecoupCallback(BUDGET), module=torch.compile(Classifier()))


def batches_of_two_sizes() -> list[Any]:
    return [(torch.randn(size, 16), torch.randint(10, (size,))) for size in (128, 256)]


def test_sizes_need_a_step_that_calls_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused when it has run once."""
    runs, own = itertools.count(), Classifier.training_step  # a number or a list would be put back

    def counted(self: Any, batch: Any) -> Any:
        next(runs)
        return own(self, batch)

    monkeypatch.setattr(Classifier, "training_step", counted)
    with pytest.raises(
        SampleError,
        match=r"training_step of Classifier never calls it: call self\(batch\) in training_step, whose",
    ):
        run(RecoupCallback("8MiB", sizes=True, sample=batches_of_two_sizes()))
    assert next(runs) == 1


def test_sizes_of_a_module_that_is_called() -> None:
    class Called(Classifier):
        def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.head(self.body(inputs)), targets)

        def training_step(self, batch: Any) -> Tensor:
            return self(*batch)  # type: ignore[no-any-return]

    callback = RecoupCallback("8MiB", sizes=True, sample=batches_of_two_sizes(), race=False)
    _, module = run(callback, module=Called())
    assert callback.fitted is not None
    assert callback.fitted.by_size is not None
    assert not module._forward_pre_hooks


def test_one_size_is_a_warning() -> None:
    with pytest.warns(
        UserWarning, match=r"All batches that were looked at are of one size.* give sample=\[short"
    ):
        run(RecoupCallback("8MiB", sizes=True, race=False))
