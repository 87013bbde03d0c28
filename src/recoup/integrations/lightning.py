"""Lightning: a callback that fits the module when training starts.

NOTE [ What Lightning's step is made of ]
    1. The plan is made in `on_train_start`: precision and strategy are set up, and optimizers exist.
    2. The step is the strategy's `training_step`, which enters the precision's context and goes through the wrapper
       of several ranks, and the module's own `backward`. What it logs while it is measured is dropped.
    3. Lightning clears gradients between forward and backward: those of the last step are there in the forward. The
       step does so by the module's own hook, unless gradients accumulate, now or in a later epoch.
    4. The plan is part of the callback's state, so it is in every checkpoint. A run that is resumed with the same
       budget, batch, options, precision, strategy, accumulation, number of ranks and device applies it without
       measuring.
    5. Plans by size are chosen where the module itself is called. Whether training_step does so, `self(batch)`, is
       seen when it runs first, before anything is measured.

NOTE [ Lightning's closure under the autopilot ]
    1. Lightning runs forward and backward of each micro-batch in a closure, which the optimizer's step calls, or
       Lightning itself while it accumulates. The loop that makes closures gets them wrapped: each is a step of the
       autopilot.
    2. Gradients of the last step are cleared before the closure instead of in its middle: else all of them would be
       copied to the host, to be put back and cleared.
    3. What the step has logged is put back with the rest, and so are containers of the batch.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from recoup.engines import apply
from recoup.errors import ApplyError, EncodingError, FitError, SampleError
from recoup.fitting.fitted import Fitted, planned_earlier
from recoup.integrations.attributes import hold_containers
from recoup.integrations.callback import FittingCallback
from recoup.integrations.missing import not_installed
from recoup.integrations.outcome import ONE_SIZE, figures, headlines, write_outcome
from recoup.integrations.piloted import run_piloted
from recoup.piloting import Autopilot
from recoup.plans import ModelPlan
from recoup.plans.by_size.plans import PlansBySize
from recoup.progress import showing
from recoup.snapshot.places import Snapshot
from recoup.tensors import tensors_in

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.callbacks import GradientAccumulationScheduler
    from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
except ImportError:
    raise not_installed("lightning") from None

__all__ = ["RecoupCallback"]

_logger = logging.getLogger("lightning.pytorch.recoup")


class RecoupCallback(FittingCallback, Callback):
    """Fits the module into a budget when training starts, in place: ``Trainer(callbacks=[RecoupCallback("8GiB")])``.

    Arguments are those of `FittingCallback`. Where the plan is that of a checkpoint, ``fitted`` stays ``None``.

    Attributes:
        plan: that is applied; with several sizes, that of the largest batch.
    """

    plan: ModelPlan | None = None
    _applied: ModelPlan | PlansBySize | None = None
    _remove_pilot: Callable[[], None] | None = None
    _made_for: dict[str, str] | None = None
    _resumed: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The plan, and what it was made for, for a checkpoint."""
        return {} if self._applied is None else {"plan": self._applied.to_json(), "made_for": self._made_for}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the plan of a checkpoint."""
        self._resumed = state_dict

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Applies the plan of a checkpoint, or fits the module."""
        model, batches = trainer.strategy.model, self._batches(trainer)
        shapes = [tuple(tensor.shape) for tensor in tensors_in(batches)]
        self._made_for = {
            "budget": str(self.budget),
            "options": repr(sorted(self.options.items())),
            "batch": repr(shapes),
            "precision": str(trainer.precision),
            "strategy": type(trainer.strategy).__name__,
            "accumulates": str(_accumulates(trainer)),
            "world_size": str(trainer.world_size),
            "device": torch.cuda.get_device_name(pl_module.device)
            if pl_module.device.type == "cuda"
            else "cpu",
        }
        fitted = self._apply_resumed(model, is_sized=len(batches) > 1)
        if fitted is None:
            fitted = self._fit(trainer, pl_module, batches)
        self.plan, self._applied = fitted.plan, fitted.applied
        if not trainer.is_global_zero:
            _logger.setLevel(logging.WARNING)
        pilot = self.make_pilot(fitted, trainer.optimizers, _logger)
        if pilot is not None:
            self._remove_pilot = _install_pilot(trainer, pilot)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Ends the autopilot, whose summary is logged."""
        if self.pilot is not None and self._remove_pilot is not None:
            self._remove_pilot()
            self._remove_pilot = None
            self.pilot.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Ends the autopilot."""
        self.on_train_end(trainer, pl_module)

    def _fit(self, trainer: Any, pl_module: Any, batches: list[Any]) -> Fitted:
        if not pl_module.automatic_optimization:
            raise FitError(
                "RecoupCallback runs Lightning's own step, and this module optimizes manually. Call recoup.fit with"
                " step= in its on_train_start instead, and leave the callback out."
            )
        if getattr(pl_module, "_compiler_ctx", None) is not None:
            raise FitError(
                "torch.compile was called with the whole module: Lightning runs a compiled training_step, inside of"
                " which nothing can be planned. Compile the networks in the module instead, as in"
                " self.network.compile(), and give the trainer the module itself."
            )
        step = _step_of(trainer, pl_module, must_call_itself=len(batches) > 1)
        with showing(trainer.progress_bar_callback is not None), _without_logging(pl_module):
            fitted = self.fit_batches(
                trainer.strategy.model,
                step,
                batches,
                optimizer=trainer.optimizers,
                accumulates=_accumulates(trainer),
            )
        for line in headlines(fitted):
            rank_zero_info(f"recoup: {line}")
        if self.sizes and fitted.by_size is None:
            rank_zero_warn(f"recoup: {ONE_SIZE}")
        for logger in trainer.loggers:
            logger.log_metrics(figures(fitted), step=trainer.global_step)
        folder = trainer.log_dir if trainer.loggers else None  # all ranks ask: it is exchanged
        if trainer.is_global_zero and folder is not None:
            write_outcome(fitted, folder)
        return fitted

    def _apply_resumed(self, model: Any, *, is_sized: bool) -> Fitted | None:
        """Applies the plan of a checkpoint, if it was made for the same; once, since a later run may be another."""
        resumed, self._resumed = self._resumed, None
        if not resumed or resumed.get("made_for") != self._made_for:
            return None
        try:
            kind: Any = PlansBySize if is_sized else ModelPlan
            applied = kind.from_json(resumed["plan"])
            apply(model, applied)
        except (ApplyError, EncodingError) as error:
            rank_zero_info(f"recoup: the checkpoint's plan cannot be used ({error}); it is made anew.")
            return None
        rank_zero_info("recoup: the plan of the checkpoint is applied.")
        return planned_earlier(model, applied)

    def _batches(self, trainer: Any) -> list[Any]:
        if self.sample is None and isinstance(trainer.train_dataloader, (dict, list, tuple)):
            raise SampleError(
                "Several loaders are combined: give sample=, a batch as training_step takes it."
            )
        batches = map(
            trainer.precision_plugin.convert_input, self.batches_to_plan_for(trainer.train_dataloader)
        )
        return [trainer.strategy.batch_to_device(batch, dataloader_idx=0) for batch in batches]


def _install_pilot(trainer: Any, pilot: Autopilot) -> Callable[[], None]:
    """Wraps closures by NOTE [ Lightning's closure under the autopilot ]; returns what ends that."""
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    make = loop._make_closure

    def make_piloted(kwargs: Any, *more: Any) -> Any:
        closure = make(kwargs, *more)
        run, clear = closure.closure, closure._zero_grad_fn
        closure._zero_grad_fn = None

        def piloted(*args: Any) -> Any:
            if clear is not None:
                clear()
            return run_piloted(pilot, lambda: run(*args), _hold(trainer, kwargs))

        closure.closure = piloted
        return closure

    def remove() -> None:
        del loop._make_closure

    loop._make_closure = make_piloted
    return remove


def _hold(trainer: Any, kwargs: Any) -> Snapshot:
    held, results = hold_containers([kwargs]), trainer._results
    if results is not None:
        for place in (results, vars(results), *map(vars, results.values())):
            held.add(place)
    return held


def _accumulates(trainer: Any) -> bool:
    schedulers = [one for one in trainer.callbacks if isinstance(one, GradientAccumulationScheduler)]
    return trainer.accumulate_grad_batches > 1 or any(
        one.going_to_accumulate_grad_batches() for one in schedulers
    )


def _step_of(trainer: Any, module: Any, *, must_call_itself: bool) -> Callable[[Any], None]:
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

    def step(batch: Any) -> None:
        if isinstance(batch, (dict, list)):
            batch = copy.copy(batch)  # of which a training_step may take parts away
        with _calling_itself(module) if must_call_itself else nullcontext():
            output = trainer.strategy.training_step(*((batch, 0) if takes_index else (batch,)))
        if output is None:
            raise FitError(
                "training_step returned None, as it does to skip a batch: give sample=, one that it trains on."
            )
        loss: Tensor = output if isinstance(output, Tensor) else output["loss"]
        for optimizer in [] if _accumulates(trainer) else trainer.optimizers:
            module.optimizer_zero_grad(trainer.current_epoch, 0, optimizer)
        module.backward(loss / trainer.accumulate_grad_batches)

    return step


@contextmanager
def _calling_itself(module: Any) -> Iterator[None]:
    """A block in which a module must be called, by NOTE [ What Lightning's step is made of ], 5.

    Raises:
        SampleError: it was not.
    """
    calls: list[None] = []
    hook = module.register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        yield
    finally:
        hook.remove()
    if not calls:
        raise SampleError(
            f"With sizes=True the size of a batch is read where the module is called, and training_step of"
            f" {type(module).__name__} never calls it: call self(batch) in training_step, whose forward calls the"
            " model, or leave out sizes=True."
        )


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
