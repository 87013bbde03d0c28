"""``largest_batch``: the batch size and the plan that train the most samples per second under a budget.

NOTE [ Searching batch sizes ]
    1. Throughput rises with the batch until the device is busy, then falls where more must be recomputed. It falls
       in steps, unit by unit, and may rise between them: no search that only compares neighbours finds the best.
    2. Batch sizes double until one does not fit. Between the last two, bisection finds the largest that fits.
    3. Bytes and seconds of a unit's option are nearly linear in the batch size. So every batch size between two that
       were tried is planned for by interpolation, without a measurement. The most promising one is tried, until none
       promises more. Below a batch that needs no recomputation, throughput only rises: nothing is interpolated there.
    4. Seconds are convex (small operations cost their launch, large ones their bytes), so interpolation promises too
       little: most halfway between the ends, and the more, the further apart they are. That much is added.
    5. Where the device is busy, throughput hardly rises any more, but memory still does. Of all batch sizes that were
       tried, the smallest is taken whose throughput is within 1 % of the best.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recoup.budgets import read_budget
from recoup.devices.meter import device_of, make_meter
from recoup.errors import BudgetError, SampleError
from recoup.fitting import plan_to_fit
from recoup.measuring import Cluster, Hardware, Profile, find_hardware, measure
from recoup.model.factory_result import Made, read_made
from recoup.model.step import TrainingStep
from recoup.model.units import Units
from recoup.planning import Option, Unit
from recoup.planning.problem import Scratch, with_options
from recoup.plans import ModelPlan, plan
from recoup.sizes import format_bytes
from recoup.tensors import map_tensors, tensors_in

__all__ = ["BatchChoice", "TriedBatch", "largest_batch"]

# A gain in throughput that is worth a larger batch. Where doubling gains less twice in a row, the device is busy.
_LEAST_GAIN = 0.01
_MOST_TRIALS = 8
# A gain that is worth one more trial; and by how much interpolation may be too low, halfway between ends far apart.
_WORTH, _DOUBT = 1e-3, 0.1
# Planning takes milliseconds for each unit and batch size.
_MOST_SIZES, _LEAST_SIZES, _MOST_UNITS_PLANNED = 64, 8, 1600


@dataclass(frozen=True, slots=True)
class TriedBatch:
    """A batch size that was planned for, as measured or estimated.

    Attributes:
        batch_size: in samples.
        predicted_bytes: the step's peak under its plan; the smallest that was possible, if it did not fit.
        seconds: of forward and backward; ``None`` if it did not fit.
    """

    batch_size: int
    predicted_bytes: int
    seconds: float | None

    @property
    def samples_per_second(self) -> float:
        """0 if it did not fit."""
        return self.batch_size / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class BatchChoice:
    """The smallest batch size with the best throughput, or within 1 % of it.

    Attributes:
        batch_size: in samples.
        plan: for a step with that batch; `apply` takes it.
        samples_per_second: that it trains, of one rank.
        tried: all batch sizes that were tried, in order of size.
    """

    batch_size: int
    plan: ModelPlan
    samples_per_second: float
    tried: tuple[TriedBatch, ...] = field(repr=False)

    def __str__(self) -> str:
        note = ", estimated" if self.plan.profile.seconds_are_estimates else ""
        if any(batch.seconds and batch.batch_size > self.batch_size for batch in self.tried):
            note += f"; larger batches gain less than {_LEAST_GAIN:.0%}".replace("%", " %")
        rows = [
            f"Batch size {self.batch_size} within {format_bytes(self.plan.budget_bytes)}:"
            f" {_speed(self.samples_per_second)} samples per second{note}"
        ]
        for batch in self.tried:
            peak = format_bytes(batch.predicted_bytes)
            speed = f"{_speed(batch.samples_per_second)}/s" if batch.seconds else "does not fit"
            mark = " <" if batch.batch_size == self.batch_size else ""
            rows.append(f"  {batch.batch_size:>6}{peak:>12}{speed:>16}{mark}")
        return "\n".join(rows)


def _speed(samples_per_second: float) -> str:
    """Four digits, and never an exponent.

    >>> _speed(3_199_821.0), _speed(12.3456)
    ('3,199,821', '12.35')
    """
    return f"{samples_per_second:,.0f}" if samples_per_second >= 1000 else f"{samples_per_second:.4g}"


def largest_batch(
    make: Callable[[int], Any],
    *,
    budget: int | str,
    hardware: Hardware | str | Path | None = None,
    ranks: int | Cluster = 1,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    units: Units | Iterable[Units] | None = None,
    accumulates: bool = False,
    most: int | None = None,
) -> BatchChoice:
    """Finds the batch size with the best throughput under a budget, over batch size and plan together.

    A larger batch takes more memory also where it hardly trains faster: of the batch sizes that were tried, the
    smallest is taken that trains within 1 % of the most samples per second. Without ``hardware`` every batch size
    that is tried is measured on the model's device; with it, none is run.

    Args:
        make: from a batch size to ``(model, sample)``, ``(model, sample, loss)``, ``(model, sample, loss, optimizer)``
            or a dict with these names. The model may be the same each time.
        budget: bytes that the whole step may peak at: ``"8GiB"``, ``"80%"`` of the device, or ``"auto"``.
        hardware: to estimate for, as `measure` takes it.
        ranks: with ``hardware``, over how many of them the model is divided, as `measure` takes it; the batch is one
            rank's.
        optimizer: from a model to its optimizer, such as ``lambda model: AdamW(model.parameters())``; unless given,
            the one that ``make`` returns.
        units: the modules to decide about, as `measure` takes them; by name, class or predicate.
        accumulates: gradients are there when a step begins.
        most: no batch is larger. Unless given, the search also ends where larger batches gain nothing more.

    Raises:
        BudgetError: not even one sample fits.
        SampleError: ``make`` returns something else, or the same sample for two batch sizes; or its model does not
            take its sample.
        HardwareError: there is no such hardware.

    >>> from torch import nn
    >>> def make(batch_size):
    ...     with torch.device("meta"):
    ...         layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)]
    ...         return nn.Sequential(*layers), torch.empty(batch_size, 1024, 256), torch.sum
    >>> largest_batch(make, budget="72MiB", hardware="A100").batch_size
    6
    """
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise SampleError(f"most must be a whole number of at least 1; got {most!r}.")
    known = None if hardware is None else find_hardware(hardware)
    build = _Builder(make)

    def plan_for(batch_size: int) -> ModelPlan:
        made = build(batch_size)
        model, sample = made.model, made.sample
        stepped = made.optimizer if optimizer is None else optimizer(model)
        budget_bytes = read_budget(budget, model, sample, memory_bytes=known.memory_bytes if known else None)
        if known is None:
            make_meter(device_of(model, sample)).make_room()  # of what earlier batch sizes left behind
            step = TrainingStep(model, sample, loss=made.loss, optimizer=stepped)
            return plan_to_fit(step, budget_bytes, units=units, accumulates=accumulates)
        profile = measure(
            model,
            sample,
            loss=made.loss,
            optimizer=stepped,
            units=units,
            accumulates=accumulates,
            hardware=known,
            ranks=ranks,
        )
        return plan(profile, budget_bytes)

    if known is None and ranks != 1:
        raise SampleError(
            f"ranks={ranks} goes with hardware=: a measured model is divided already, or not at all."
        )
    try:
        return _Search(plan_for, most).run()
    except BudgetError:
        if most != 1:
            build(2)  # which raises if make ignores its argument, and one sample is a whole batch
        raise


class _Builder:
    """Calls ``make``, and refuses one that ignores the batch size."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make
        self._sizes: dict[str, int] = {}

    def __call__(self, batch_size: int) -> Made:
        """What it makes.

        Raises:
            SampleError: that is no model and sample, or a sample as large as that of another batch size.
        """
        made = read_made(self._make(batch_size), f"make({batch_size})")
        if made.step is not None:
            raise SampleError("largest_batch needs a sample and perhaps a loss; make returned step= instead.")
        other = self._sizes.setdefault(_form_of(made.sample), batch_size)
        if other != batch_size:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors_in(made.sample))
            least = min(other, batch_size)
            limit = f", or, if there are no larger batches, give most={least}" if least > 1 else ""
            raise SampleError(
                f"make({other}) and make({batch_size}) return samples of the same size ({shapes or 'no tensors'}): let"
                f" make use its argument, which is the batch size{limit}."
            )
        return made


def _form_of(sample: Any) -> str:
    """A sample without the values of its tensors: their shapes, and all that is no tensor."""

    def bare(tensor: Tensor) -> Tensor:
        shape = (tensor.numel(),) if tensor.is_nested else tensor.shape
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    return repr(map_tensors(bare, sample))


class _Search:
    """NOTE [ Searching batch sizes ]."""

    def __init__(self, plan_for: Callable[[int], ModelPlan], most: int | None) -> None:
        self._plan_for, self._most = plan_for, most
        self.plans: dict[int, ModelPlan] = {}
        self.tried: dict[int, TriedBatch] = {}
        self._refusal: BudgetError | None = None
        self._promises: dict[tuple[int, int, int], float] = {}

    def run(self) -> BatchChoice:
        self._double()
        if not self.plans:
            assert self._refusal is not None, "the first batch either fits or is refused"
            raise self._refusal
        self._find_largest()
        self._find_fastest()
        best = self._smallest_of_the_best()
        tried = tuple(self.tried[size] for size in sorted(self.tried))
        return BatchChoice(best, self.plans[best], self.tried[best].samples_per_second, tried)

    def fits(self, batch_size: int) -> bool:
        """Whether a batch size fits; it is measured, or estimated, once."""
        if batch_size not in self.tried:
            try:
                found = self._plan_for(batch_size)
            except BudgetError as error:
                self._refusal = self._refusal or error
                self.tried[batch_size] = TriedBatch(batch_size, error.smallest_bytes, None)
            except torch.OutOfMemoryError:
                self.tried[batch_size] = TriedBatch(batch_size, 0, None)
                if batch_size == 1:
                    raise
            else:
                self.plans[batch_size] = found
                self.tried[batch_size] = TriedBatch(batch_size, found.predicted_bytes, found.predicted_s)
        return batch_size in self.plans

    def _best(self) -> int:
        return max(self.plans, key=lambda size: (self.tried[size].samples_per_second, -size))

    def _smallest_of_the_best(self) -> int:
        """NOTE [ Searching batch sizes ], 5."""
        enough = self.tried[self._best()].samples_per_second / (1 + _LEAST_GAIN)
        return min(size for size in self.plans if self.tried[size].samples_per_second >= enough)

    def _double(self) -> None:
        size, num_vain, fastest = 1, 0, 0.0
        while self.fits(size) and size != self._most:
            speed = self.tried[size].samples_per_second
            num_vain = num_vain + 1 if speed < fastest * (1 + _LEAST_GAIN) else 0
            fastest = max(fastest, speed)
            if num_vain == 2 and self._most is None:
                break
            size = 2 * size if self._most is None else min(2 * size, self._most)

    def _find_largest(self) -> None:
        fitting = max(self.plans)
        refused = min((size for size in self.tried if size > fitting), default=fitting + 1)
        while refused - fitting > 1:
            middle = (fitting + refused) // 2
            if self.fits(middle):
                fitting = middle
            else:
                refused = middle

    def _find_fastest(self) -> None:
        """NOTE [ Searching batch sizes ], 3."""
        for _ in range(_MOST_TRIALS):
            promising = self._promising()
            if promising is None:
                return
            self.fits(promising)

    def _promising(self) -> int | None:
        """The batch size that promises the most, by interpolation; ``None`` if none promises more than is known."""
        known = sorted(self.plans)
        best = self._best()
        speed = self.tried[best].samples_per_second * (1 + _WORTH)
        found = None
        num_units = len(self.plans[best].profile.units)
        num_sizes = max(_LEAST_SIZES, min(_MOST_SIZES, _MOST_UNITS_PLANNED // num_units))
        for size in _spread(known, best, num_sizes):
            place = bisect_left(known, size)
            if self.plans[known[place]].keeps_everything:
                continue
            line = known[place - 1], size, known[place]
            if line not in self._promises:
                low, _, high = line
                # A parabola that is 0 at both ends, for what convexity adds between them.
                bend = 4 * (size - low) * (high - size) / (high * (high - low))
                self._promises[line] = self._expected(*line) * (1 + _DOUBT * bend)
            if self._promises[line] > speed:
                found, speed = size, self._promises[line]
        return found

    def _expected(self, low: int, size: int, high: int) -> float:
        profile = _between(self.plans[low].profile, self.plans[high].profile, (size - low) / (high - low))
        if profile is None:
            return 0.0
        try:
            return size / plan(profile, self.plans[low].budget_bytes).predicted_s
        except BudgetError:
            return 0.0


def _spread(known: list[int], best: int, most: int) -> list[int]:
    """Batch sizes between the smallest and the largest known one: all, or half of them near the best."""
    there = set(known)
    sizes = [size for size in range(known[0], known[-1] + 1) if size not in there]
    if len(sizes) <= most:
        return sizes
    near = sorted(sizes, key=lambda size: abs(size - best))[: most // 2]
    step = len(sizes) / (most - len(near))
    return sorted({*near, *(sizes[int(index * step)] for index in range(most - len(near)))})


def _between(low: Profile, high: Profile, share: float) -> Profile | None:
    """A profile on the line between two; ``None`` if they are not alike."""
    if [unit.name for unit in low.problem.units] != [unit.name for unit in high.problem.units]:
        return None

    def line(first: float, second: float) -> float:
        return first + (second - first) * share

    def whole(first: int, second: int) -> int:
        return round(line(first, second))

    names = [
        {option.name for option in first.options} & {option.name for option in second.options}
        for first, second in zip(low.problem.units, high.problem.units, strict=True)
    ]
    if not all(names):
        return None
    first, second = with_options(low.problem, names), with_options(high.problem, names)
    sizes, others = ({replace(v, num_bytes=0): v.num_bytes for v in one.values} for one in (first, second))
    if sizes.keys() != others.keys():
        return None
    values = tuple(replace(value, num_bytes=whole(size, others[value])) for value, size in sizes.items())
    units = [_unit_between(*pair, line) for pair in zip(first.units, second.units, strict=True)]
    profiled = [
        replace(unit, recipes=tuple(recipe for recipe in unit.recipes if recipe.name in kept))
        for unit, kept in zip(low.units, names, strict=True)
    ]
    problem = replace(first, units=tuple(units), values=values)
    return replace(low, units=tuple(profiled), problem=problem)


def _unit_between(first: Unit, second: Unit, line: Callable[[float, float], float]) -> Unit:
    return replace(
        first,
        options=tuple(
            _option_between(*pair, line) for pair in zip(first.options, second.options, strict=True)
        ),
        parameter_gradient_bytes=round(line(first.parameter_gradient_bytes, second.parameter_gradient_bytes)),
        runs_once=first.runs_once or second.runs_once,
    )


def _option_between(first: Option, second: Option, line: Callable[[float, float], float]) -> Option:
    return replace(
        first,
        forward_s=line(first.forward_s, second.forward_s),
        backward_s=line(first.backward_s, second.backward_s),
        again_s=line(first.again_s, second.again_s),
        held_bytes=round(line(first.held_bytes, second.held_bytes)),
        scratch=Scratch(*(round(line(*pair)) for pair in zip(first.scratch, second.scratch, strict=True))),
    )
