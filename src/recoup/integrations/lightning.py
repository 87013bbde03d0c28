"""Lightning: a callback that fits the module when training starts.

NOTE [ What Lightning's step is made of ]
    1. The plan is made in `on_train_start`: precision and strategy are set up, and optimizers exist.
    2. The step is the strategy's `training_step`, which enters the precision's context and goes through the wrapper
       of several ranks, and the module's own `backward`. What it logs while it is measured is dropped.
    3. Lightning clears gradients between forward and backward: those of the last step are there in the forward.
    4. The plan is part of the callback's state, so it is in every checkpoint. A run that is resumed with the same
       budget, batch, options and device applies it without measuring.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from recoup.engines import apply
from recoup.errors import ApplyError, EncodingError, FitError, SampleError
from recoup.fitting import fit
from recoup.integrations.callback import FittingCallback
from recoup.integrations.missing import not_installed
from recoup.integrations.outcome import figures, headline, write_outcome
from recoup.plans import ModelPlan
from recoup.progress import showing
from recoup.tensors import tensors_in

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.utilities import rank_zero_info
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
except ImportError:
    raise not_installed("lightning") from None

__all__ = ["RecoupCallback"]


class RecoupCallback(FittingCallback, Callback):
    """Fits the module into a budget when training starts, in place: ``Trainer(callbacks=[RecoupCallback("8GiB")])``.

    Arguments are those of `FittingCallback`. Where the plan is that of a checkpoint, ``fitted`` stays ``None``.

    Attributes:
        plan: that is applied.
    """

    plan: ModelPlan | None = None
    _made_for: dict[str, str] | None = None
    _resumed: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The plan, and what it was made for, for a checkpoint."""
        return {} if self.plan is None else {"plan": self.plan.to_json(), "made_for": self._made_for}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the plan of a checkpoint."""
        self._resumed = state_dict

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Applies the plan of a checkpoint, or fits the module."""
        model, batch = trainer.strategy.model, self._batch(trainer)
        shapes = [tuple(tensor.shape) for tensor in tensors_in(batch)]
        self._made_for = {
            "budget": str(self.budget),
            "options": repr(sorted(self.options.items())),
            "batch": repr(shapes),
            "device": torch.cuda.get_device_name(pl_module.device)
            if pl_module.device.type == "cuda"
            else "cpu",
        }
        if self._apply_resumed(model):
            return
        if not pl_module.automatic_optimization:
            raise FitError(
                "RecoupCallback runs Lightning's own step, and this module optimizes manually. Call recoup.fit with"
                " step= in its on_train_start instead, and leave the callback out."
            )
        step = _step_of(trainer, pl_module, batch)
        with showing(trainer.progress_bar_callback is not None), _without_logging(pl_module):
            self.fitted = fit(
                model,
                step=step,
                budget=self.budget,
                optimizer=trainer.optimizers,
                accumulates=True,
                **self.options,
            )
        self.plan = self.fitted.plan
        rank_zero_info(f"recoup: {headline(self.fitted)}")
        for logger in trainer.loggers:
            logger.log_metrics(figures(self.fitted), step=trainer.global_step)
        folder = trainer.log_dir if trainer.loggers else None  # all ranks ask: it is exchanged
        if trainer.is_global_zero and folder is not None:
            write_outcome(self.fitted, folder)

    def _apply_resumed(self, model: Any) -> bool:
        """Applies the plan of a checkpoint, if it was made for the same; once, since a later run may be another."""
        resumed, self._resumed = self._resumed, None
        if not resumed or resumed.get("made_for") != self._made_for:
            return False
        try:
            self.plan = ModelPlan.from_json(resumed["plan"])
            apply(model, self.plan)
        except (ApplyError, EncodingError) as error:
            rank_zero_info(f"recoup: the checkpoint's plan cannot be used ({error}); it is made anew.")
            return False
        rank_zero_info("recoup: the plan of the checkpoint is applied.")
        return True

    def _batch(self, trainer: Any) -> Any:
        if self.sample is None and isinstance(trainer.train_dataloader, (dict, list, tuple)):
            raise SampleError(
                "Several loaders are combined: give sample=, a batch as training_step takes it."
            )
        batch = self.batch_to_plan_for(trainer.train_dataloader)
        batch = trainer.precision_plugin.convert_input(batch)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def _step_of(trainer: Any, module: Any, batch: Any) -> Any:
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    given = (batch, 0) if takes_index else (batch,)

    def step() -> None:
        output = trainer.strategy.training_step(*given)
        if output is None:
            raise FitError(
                "training_step returned None, as it does to skip a batch: give sample=, one that it trains on."
            )
        loss: Tensor = output if isinstance(output, Tensor) else output["loss"]
        module.backward(loss / trainer.accumulate_grad_batches)

    return step


@contextmanager
def _without_logging(module: Any) -> Iterator[None]:
    """Lightning takes no values while no loop runs, and a step that is measured would log some."""

    def drop(*args: Any, **kwargs: Any) -> None:
        """Takes what ``self.log`` is given."""

    attributes = module.__dict__
    own = {name: attributes[name] for name in ("log", "log_dict") if name in attributes}
    attributes.update(log=drop, log_dict=drop)
    try:
        yield
    finally:
        del attributes["log"], attributes["log_dict"]
        attributes.update(own)
