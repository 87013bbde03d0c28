"""transformers' `Trainer`: a callback that fits its model when training begins.

NOTE [ When the plan is made ]
    1. In `on_train_begin`: by then the model is on its device, wrapped and cast, and the optimizer is the one that
       steps. The step is the trainer's own `training_step`, with its loss, precision, accumulation and label smoothing.
    2. The batch is the largest of a few, made by the trainer's collator of rows from all over its dataset. Its loader
       is not touched, so training sees the same batches as without a plan.
    3. Every call of ``train()`` plans anew: batch size, precision or data may have changed in between.
"""

from __future__ import annotations

import copy
import sys
import weakref
from contextlib import nullcontext
from typing import Any

from recoup.errors import FitError
from recoup.fitting import fit
from recoup.integrations.attributes import attributes_held
from recoup.integrations.callback import FittingCallback
from recoup.integrations.missing import not_installed
from recoup.integrations.outcome import figures, headline, write_outcome
from recoup.integrations.too_large import as_out_of_memory
from recoup.progress import showing

try:
    from transformers import Trainer, TrainerCallback
    from transformers.utils import logging
except ImportError:
    raise not_installed("transformers") from None

__all__ = ["RecoupCallback", "fit_trainer"]

_logger = logging.get_logger("transformers.recoup")


class RecoupCallback(FittingCallback, TrainerCallback):
    """Fits the trainer's model into a budget when training begins, in place: ``Trainer(callbacks=[RecoupCallback()])``.

    Gradient checkpointing of the trainer's own is replaced by the plan. The plan and its report are written into the
    output folder, and its figures to wherever the trainer logs. Arguments are those of `FittingCallback`.
    """

    _trainer: weakref.ref[Any] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Fits the model; everything that `recoup.fit` raises ends the training before it begins."""
        trainer = (self._trainer and self._trainer()) or _trainer_around()
        checkpoints = getattr(trainer.model, "is_gradient_checkpointing", False)
        if checkpoints:
            trainer.model.gradient_checkpointing_disable()
        try:
            self._fit(trainer, args, given["train_dataloader"])
        except BaseException:
            if checkpoints:
                trainer.model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
            raise
        assert self.fitted is not None
        if checkpoints:
            _logger.warning(
                "gradient_checkpointing=True is replaced by recoup's plan, which decides what to recompute."
            )
        _logger.info(headline(self.fitted))
        trainer.log(figures(self.fitted))
        if state.is_world_process_zero and args.output_dir is not None:
            write_outcome(self.fitted, args.output_dir)

    def _fit(self, trainer: Any, args: Any, loader: Any) -> None:
        # The size is smaller than the arguments' where one is looked for.
        batch = self.batch_to_plan_for(loader, batch_size=trainer.state.train_batch_size)
        model = trainer.model_wrapped
        model.train()
        num_steps = args.gradient_accumulation_steps
        trainer.current_gradient_accumulation_steps = num_steps  # which the loop sets before every step
        [batch], num_items = trainer.get_batch_samples(iter([batch]), 1, args.device)

        def step() -> None:
            trainer.training_step(model, copy.copy(batch), num_items)

        too_large = as_out_of_memory() if args.auto_find_batch_size else nullcontext()
        with (
            showing(not args.disable_tqdm),
            too_large,
            attributes_held(trainer),
            attributes_held(trainer.state),
        ):
            trainer.log = _drop  # what a step logs while it is measured
            self.fitted = fit(
                model,
                step=step,
                budget=self.budget,
                optimizer=trainer.optimizer,
                accumulates=num_steps > 1,
                **self.options,
            )


def _drop(*args: Any, **kwargs: Any) -> None:
    """Takes the place of ``Trainer.log``."""


def fit_trainer(trainer: Any, budget: int | str = "auto", **options: Any) -> RecoupCallback:
    """Lets a trainer fit its model when it begins to train; returns the callback, which has ``fitted`` then.

    Args:
        trainer: a `transformers.Trainer`, or a subclass such as TRL's.
        budget: as for `recoup.fit`.
        options: of `RecoupCallback`.
    """
    callback = RecoupCallback(budget, **options)
    callback._trainer = weakref.ref(trainer)
    trainer.add_callback(callback)
    return callback


def _trainer_around() -> Any:
    """The trainer that calls a callback, which is not among a callback's arguments."""
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    raise FitError(
        "RecoupCallback was called by something else than a transformers.Trainer. Give it the trainer:"
        " fit_trainer(trainer, budget=…)."
    )
