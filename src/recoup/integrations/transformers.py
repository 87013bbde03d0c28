"""transformers' `Trainer`: a callback that fits its model when training begins.

NOTE [ When the plan is made ]
    1. In `on_train_begin`: by then the model is on its device, wrapped and cast, and the optimizer is the one that
       steps. The step is the trainer's own `training_step`, with its loss, precision, accumulation and label smoothing.
    2. The batch is the largest of a few of its sampler's, made by the trainer's collator. Its loader is not touched,
       so training sees the same batches as without a plan.
    3. Every call of ``train()`` plans anew: batch size, precision or data may have changed in between.

NOTE [ The trainer's step under the autopilot ]
    1. While it trains, `training_step` of the trainer is an attribute that runs the trainer's own inside the autopilot.
       The trainer calls it once for each micro-batch, in whose forward and backward it computes the loss, enters
       autocast, scales and accumulates; the optimizer steps outside.
    2. Metrics that a step adds to are put back with the rest: attributes of the trainer and containers among them,
       apart from its data, and its log.
    3. A run that raised leaves the attribute where it is, and the next call of ``train()`` removes it.
"""

from __future__ import annotations

import copy
import sys
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from recoup.errors import FitError
from recoup.integrations.accumulation import accumulation_of
from recoup.integrations.attributes import attributes_held, hold_containers
from recoup.integrations.callback import FittingCallback
from recoup.integrations.missing import not_installed
from recoup.integrations.outcome import ONE_SIZE, figures, headlines, write_outcome
from recoup.integrations.piloted import run_piloted
from recoup.integrations.too_large import as_out_of_memory
from recoup.piloting import Autopilot
from recoup.progress import showing
from recoup.snapshot.places import Snapshot

try:
    from transformers import Trainer, TrainerCallback
    from transformers.utils import logging
except ImportError:
    raise not_installed("transformers") from None

__all__ = ["RecoupCallback", "fit_trainer"]

_logger: Any = logging.get_logger("transformers.recoup")
_DATA = ("train_dataset", "eval_dataset")


class RecoupCallback(FittingCallback, TrainerCallback):
    """Fits the trainer's model into a budget when training begins, in place: ``Trainer(callbacks=[RecoupCallback()])``.

    Activation checkpointing of the trainer's own is replaced by the plan. The plan and its report are written into the
    output folder, and its figures to wherever the trainer logs. Arguments are those of `FittingCallback`.
    """

    _trainer: weakref.ref[Any] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Fits the model; everything that `recoup.fit` raises ends the training before it begins."""
        trainer = (self._trainer and self._trainer()) or _trainer_around()
        _remove_pilot(trainer)
        # The layers' own flags: methods and arguments that set them have other names in other releases.
        checkpointed = [
            one for one in trainer.model.modules() if getattr(one, "gradient_checkpointing", False)
        ]
        _switch_checkpointing(trainer.model, checkpointed, False)
        try:
            self._fit(trainer, args, given["train_dataloader"])
        except BaseException:
            _switch_checkpointing(trainer.model, checkpointed, True)
            raise
        assert self.fitted is not None
        if checkpointed:
            _logger.warning(
                "The trainer's activation checkpointing (gradient checkpointing) is replaced by recoup's plan, which"
                " decides what to recompute."
            )
        for line in headlines(self.fitted):
            _logger.info(line)
        if self.sizes and self.fitted.by_size is None:
            _logger.warning(ONE_SIZE)
        trainer.log(figures(self.fitted))
        if state.is_world_process_zero and args.output_dir is not None:
            write_outcome(self.fitted, args.output_dir)
        pilot = self.make_pilot(self.fitted, trainer.optimizer, _logger)
        if pilot is not None:
            trainer.training_step = _PilotedStep(trainer, pilot, args)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Ends the autopilot, whose summary is logged."""
        if self.pilot is not None:
            _remove_pilot((self._trainer and self._trainer()) or _trainer_around())
            self.pilot.close()

    def _fit(self, trainer: Any, args: Any, loader: Any) -> None:
        # The size is smaller than the arguments' where one is looked for.
        batches = self.batches_to_plan_for(loader, batch_size=trainer.state.train_batch_size)
        model = trainer.model_wrapped
        model.train()
        num_steps = args.gradient_accumulation_steps
        trainer.current_gradient_accumulation_steps = num_steps  # which the loop sets before every step
        # Each with the number of its labels.
        samples = [trainer.get_batch_samples(iter([batch]), 1, args.device) for batch in batches]

        def step(sample: tuple[list[Any], Any]) -> None:
            [batch], num_items = sample
            if num_steps == 1:
                model.zero_grad()  # as the loop does after every step of the optimizer
            trainer.training_step(model, copy.copy(batch), num_items)

        with (
            showing(not args.disable_tqdm),
            _too_large(args),
            attributes_held(trainer),
            attributes_held(trainer.state),
        ):
            trainer.log = _drop  # what a step logs while it is measured
            accumulates = accumulation_of(trainer.accelerator, num_steps)
            self.fit_batches(model, step, samples, optimizer=trainer.optimizer, accumulates=accumulates)


def _switch_checkpointing(model: Any, layers: list[Any], is_on: bool) -> None:
    for layer in layers:
        layer.gradient_checkpointing = is_on
    if layers and getattr(model, "_hf_peft_config_loaded", False):
        # Checkpoints of torch's own need inputs with gradients, which would then flow through all frozen layers.
        (model.enable_input_require_grads if is_on else model.disable_input_require_grads)()


def _too_large(args: Any) -> AbstractContextManager[None]:
    return as_out_of_memory() if args.auto_find_batch_size else nullcontext()


class _PilotedStep:
    """Takes the place of a trainer's step by NOTE [ The trainer's step under the autopilot ]."""

    def __init__(self, trainer: Any, pilot: Autopilot, args: Any) -> None:
        self.own_step = trainer.training_step
        self._trainer, self._pilot, self._args = trainer, pilot, args

    def __call__(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        def step() -> Any:
            return self.own_step(model, copy.copy(inputs), *args, **kwargs)

        with _too_large(self._args):
            return run_piloted(self._pilot, step, _hold(self._trainer))


def _remove_pilot(trainer: Any) -> None:
    installed = vars(trainer).get("training_step")
    if isinstance(installed, _PilotedStep):
        del trainer.training_step
        if trainer.training_step != installed.own_step:  # which somebody else has put there
            trainer.training_step = installed.own_step


def _hold(trainer: Any) -> Snapshot:
    attributes = vars(trainer)
    held = hold_containers(value for name, value in attributes.items() if name not in _DATA)
    held.add(attributes)
    held.add(trainer.state.log_history)
    return held


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
