"""What callbacks of trainers have in common: what they are given, the batches to plan for, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from logging import Logger
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from recoup.errors import SampleError
from recoup.fitting import Fitted, fit
from recoup.integrations.batches import batches_of
from recoup.piloting import Autopilot, autopilot
from recoup.tensors import tensors_in
from recoup.torch_private import awaits_static_graph

__all__ = ["FittingCallback"]


class FittingCallback:
    """Fits a trainer's model into a budget when training begins.

    Args:
        budget: as for `recoup.fit`: ``"8GiB"``, ``"80%"``, or ``"auto"``, what is free less a margin.
        sample: a batch as the loader yields it, to plan for; unless given, the largest of a few. With ``sizes``, a list
            of some.
        num_batches: how many batches are looked at.
        autopilot: run every micro-batch's forward and backward under `recoup.autopilot`: one that runs out of memory
            is repeated under a smaller plan, with the same losses and weights.
        sizes: plan for every size of the batch: the shortest, the middle and the longest of the batches that are
            looked at are measured, as by ``samples=`` of `recoup.fit`.
        options: further arguments of `recoup.fit`, such as ``engine=`` and ``units=``.

    Raises:
        SampleError: ``sizes`` is no bool, or ``samples`` are given, as for `recoup.fit`.

    Attributes:
        fitted: what `recoup.fit` returned; ``None`` before training.
        pilot: the autopilot, with its events; ``None`` before training, and without one.
    """

    def __init__(
        self,
        budget: int | str = "auto",
        *,
        sample: Any = None,
        num_batches: int = 4,
        autopilot: bool = False,
        sizes: bool = False,
        **options: Any,
    ) -> None:
        if not isinstance(sizes, bool):
            raise SampleError(
                f"sizes= of a trainer's callback is True or False; got {sizes!r}. With sizes=True, batches of several"
                " sizes are found in the training data, or given as sample=[short, medium, long]."
            )
        if "samples" in options:
            raise SampleError(
                "A trainer's callback takes no samples=: give sample=[short, medium, long] with sizes=True."
            )
        self.budget, self.sample, self.num_batches, self.options = budget, sample, num_batches, options
        self.autopilot, self.sizes = autopilot, sizes
        self.fitted: Fitted | None = None
        self.pilot: Autopilot | None = None

    def batches_to_plan_for(self, loader: Any, *, batch_size: int | None = None) -> list[Any]:
        """The user's sample, or the largest of a few batches of a loader that is not touched; with ``sizes``, several.

        Of batches that are all of one size there is one, also with ``sizes``.

        Raises:
            SampleError: the user's sample is not what ``sizes`` needs; or a loader cannot be read.
        """
        if self.sample is not None:
            return self._samples() if self.sizes else [self.sample]
        found = batches_of(loader, num_batches=self.num_batches, batch_size=batch_size)
        if not self.sizes:
            return found[-1:]
        different = list({_shapes(batch): batch for batch in found}.values())
        return (
            [different[0], different[len(different) // 2], different[-1]] if len(different) > 2 else different
        )

    def _samples(self) -> list[Any]:
        if not isinstance(self.sample, (list, tuple)) or len(self.sample) < 2:
            raise SampleError(
                "With sizes=True, sample= takes a list of batches, such as [short, medium, long]; got a"
                f" {type(self.sample).__name__}."
            )
        return list(self.sample)

    def fit_batches(
        self, model: Any, step: Callable[[Any], Any], batches: Sequence[Any], **more: Any
    ) -> Fitted:
        """Fits a model to some batches, of which ``step`` runs one; ``more`` are further arguments of `recoup.fit`.

        Raises:
            SampleError: `DistributedDataParallel` would learn its static graph from a step of the fit.
        """
        if isinstance(model, DistributedDataParallel) and awaits_static_graph(model):
            raise SampleError(
                "RecoupCallback fits before the first training step, from which DistributedDataParallel learns the"
                " graph with static_graph=True: leave static_graph=True out."
            )
        one = {"step": partial(step, batches[-1])}
        several = {"step": step, "samples": batches}
        given: dict[str, Any] = several if len(batches) > 1 else one
        self.fitted = fit(model, budget=self.budget, **given, **more, **self.options)
        return self.fitted

    def make_pilot(self, fitted: Fitted, optimizer: Any, logger: Logger) -> Autopilot | None:
        """The autopilot for a run, if one is wanted."""
        self.pilot = autopilot(fitted, optimizer=optimizer, logger=logger) if self.autopilot else None
        return self.pilot


def _shapes(batch: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors_in(batch))
