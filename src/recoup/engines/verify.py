"""``verify``: a real step under the plan, compared with the budget and with the plain step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from recoup.checkpointing.fingerprints import Fingerprint, differing, fingerprint, on_host
from recoup.checkpointing.sampling import sampling
from recoup.devices.meter import Meter, device_of, make_meter
from recoup.engines.compare_by_unit import Compared, compare_units
from recoup.engines.drift import Drift, deterministically, drift_between, list_drifts, too_far
from recoup.engines.recording import Points, Recording, record
from recoup.errors import OverBudgetError, ReplayMismatchError, VerificationError
from recoup.model.caches import CachelessForward, without_caches
from recoup.model.replace_forward import installed, suspended
from recoup.model.step import TrainingStep
from recoup.plans.model_plan import ModelPlan
from recoup.progress import note
from recoup.sizes import format_bytes
from recoup.torch_private import ConvNd

__all__ = ["Verification", "verify_step"]

T = TypeVar("T")
_MOST_REPEATS = 5
_ENOUGH_S = {"cpu": 1.0, "cuda": 0.15}
"""Steps are timed until they add up to this: longer steps hardly vary, least of all on a GPU."""
_BUSY_SHARE = 0.8
"""A host that is busy for more of a step than this may set its pace."""
_BUSY_S = 0.3
"""Where it may, steps are timed until they add up to this, since hosts vary."""
_MOST_PLAIN_STEPS = 3


@dataclass(frozen=True, slots=True)
class Verification:
    """What a real step under the plan took.

    Attributes:
        peak_bytes: measured peak of the whole step, the optimizer's step included.
        seconds: measured, forward and backward.
        plain_peak_bytes: of the plain step; ``None`` where that did not fit.
        plain_seconds: of the plain step; ``None`` where that did not fit.
        gradients: how the gradients compare, in words: ``"bit-equal"``, or ``"bit-equal, unit by unit"`` where the
            plain step did not fit; what was not compared, how far those that drift are apart, and that they are
            compared with a step whose key-value cache is off, where the plan switches it off.
        drifting: gradients that are not bit-equal, in a model whose plain steps are not either, and how far they are
            apart.
        notes: limits of these figures, in sentences.
        timeline: seconds, and the bytes of the whole step from then on. Recording slows a step down: the times are
            those of the recorded step, scaled to ``seconds``.
    """

    peak_bytes: int
    seconds: float
    plain_peak_bytes: int | None
    plain_seconds: float | None
    gradients: str
    drifting: tuple[Drift, ...] = ()
    notes: tuple[str, ...] = ()
    timeline: Points = field(default=(), repr=False)


@dataclass(frozen=True)
class _Run:
    """One way of running the step, measured."""

    peak_bytes: int
    seconds: float
    prints: dict[str, Fingerprint]
    timeline: Points


def verify_step(step: TrainingStep, plan: ModelPlan) -> Verification:
    """Runs the step as the model stands, with its plan applied; and plainly, where that fits.

    Raises:
        OverBudgetError: its peak passes the plan's budget. Nothing else is looked at then.
        VerificationError: a gradient differs from the plain step's, though plain steps agree with each other.
    """
    verifier = _Verifier(step, plan)
    note("verifying", 0, 2)
    fitted = verifier.run(most_bytes=plan.budget_bytes)
    note("verifying", 1, 2)
    plain: _Run | None = None
    if verifier.plain_fits():
        try:
            with verifier.plainly():
                plain = verifier.run()
        except torch.OutOfMemoryError:
            plain = None
    if plain is None:
        compared = compare_units(step, plan)
        gradients, drifting = _unit_by_unit(compared), tuple(compared.drifting)
    else:
        drifting = verifier.compare(fitted, plain)
        gradients = _in_words(drifting)
    if verifier.is_cacheless():
        gradients += " to a step with use_cache off"
    return Verification(
        fitted.peak_bytes,
        fitted.seconds,
        plain.peak_bytes if plain else None,
        plain.seconds if plain else None,
        gradients,
        drifting,
        verifier.notes(),
        timeline=fitted.timeline,
    )


def _in_words(drifting: tuple[Drift, ...]) -> str:
    if not drifting:
        return "bit-equal"
    error, cosine = max(d.relative_error for d in drifting), min(d.cosine for d in drifting)
    return (
        f"not bit-equal, as in plain steps: {len(drifting)} with a relative error up to {error:.2g},"
        f" cosine from {cosine:.4f}"
    )


def _unit_by_unit(compared: Compared) -> str:
    if len(compared.skipped) == compared.num_units:
        return "not compared, for lack of memory"
    skipped = f"; not compared for lack of memory: {', '.join(compared.skipped)}" if compared.skipped else ""
    return f"{_in_words(tuple(compared.drifting))}, unit by unit{skipped}"


class _Verifier:
    def __init__(self, step: TrainingStep, plan: ModelPlan) -> None:
        self.step, self.plan = step, plan
        self.device = device_of(step.model, step.given)
        self.meter: Meter = make_meter(self.device)
        self.residents = plan.profile.residents
        self.accumulates = plan.profile.accumulates

    def plain_fits(self) -> bool:
        """Whether the device has room for the plain step beside what lives already."""
        return self.plan.profile.plain_bytes - self.residents.total_bytes < self.meter.free_bytes()

    def is_cacheless(self) -> bool:
        """Whether the plan has switched a cache off."""
        return any(one.has_switched for one in _caches_off(self.step.model))

    def notes(self) -> tuple[str, ...]:
        """What was switched off for the comparison, and what is not in the count."""
        found = []
        if self.is_cacheless():
            found.append(
                "The plain step ran with the key-value cache (use_cache) off, as it is under the plan: a training step"
                " with the cache on takes more memory, and may round differently."
            )
        if self.device.type == "cpu" and any(isinstance(m, ConvNd) for m in self.step.model.modules()):
            found.append(
                "On a CPU the bytes are those of tensors: workspace that convolutions allocate inside their kernels is"
                " not in the count, so leave a margin for it in the budget."
            )
        return tuple(found)

    def run(self, most_bytes: int | None = None) -> _Run:
        """Peak, seconds and gradients of the step as the model stands.

        Raises:
            OverBudgetError: the peak is above ``most_bytes``.
        """
        recorded, lived_bytes = self._record()
        peak_bytes = max(recorded.peak_bytes + lived_bytes, self.residents.optimizer_peak_bytes)
        if most_bytes is not None and peak_bytes > most_bytes:
            raise _over_budget(peak_bytes, self.plan)
        # Timed apart: the recorded step is the first under its plan, when the allocator's cache is cold.
        seconds = self._seconds()
        scale = seconds / (recorded.points[-1][0] or 1.0)
        timeline = tuple((time_s * scale, num_bytes + lived_bytes) for time_s, num_bytes in recorded.points)
        return _Run(peak_bytes, seconds, self.results(fingerprint), timeline)

    def _seconds(self) -> float:
        """The least that one of several steps takes."""
        # A step of the user's may do something else each time: all begin from the same state.
        differ = self.step.changes_parameters
        times: list[float] = []
        enough_s = _ENOUGH_S[self.device.type]
        with nullcontext() if differ else self.step.preserved():
            while len(times) < _MOST_REPEATS and sum(times) < enough_s:
                with self.step.preserved() if differ else nullcontext():
                    self._prepare()
                    timing = self.meter.time_step(self._step)
                times.append(timing.device_s)
                if timing.host_s > _BUSY_SHARE * timing.device_s:
                    enough_s = max(enough_s, _BUSY_S)
        return min(times)

    def _record(self) -> tuple[Recording, int]:
        """A step, and the bytes that lived before it."""
        with self.step.preserved(), self.step.finding_writes():
            self._settle()
            torch.clear_autocast_cache()
            with self.meter.watching():
                live_bytes = self.meter.begin()
                # Tracked, since a step of the user's may free these gradients and make others.
                self._prepare()
                lived_bytes = self.residents.total_bytes + self.meter.live_bytes() - live_bytes
                # Comparing takes memory too, on some devices: this is the most that a step may need.
                with sampling("always"):
                    try:
                        return record(self.meter, self._step), lived_bytes
                    except ReplayMismatchError as error:
                        raise VerificationError(f"{error}\nRun recoup.audit on the model.") from None

    def results(self, see: Callable[[Tensor], T], names: Sequence[str] | None = None) -> dict[str, T]:
        """What ``see`` makes of the gradients after a step, and of the parameters where a step may change them."""
        return deterministically(lambda: self._after_step(see, names))

    def _after_step(self, see: Callable[[Tensor], T], names: Sequence[str] | None) -> dict[str, T]:
        found: dict[str, Tensor] = {}
        with self.step.preserved():
            self._prepare()
            self._step()
            for name, parameter in self.step.model.named_parameters():
                if parameter.grad is not None:
                    found[name] = parameter.grad
                if self.step.changes_parameters:
                    found[f"{name} (after the step)"] = parameter
            return {name: see(tensor) for name, tensor in found.items() if names is None or name in names}

    def _settle(self) -> None:
        """Lets an optimizer inside the step allocate its state, which counts as resident."""
        if self.step.changes_parameters:
            self._step()
            for parameter in self.step.model.parameters():
                parameter.grad = None

    def _prepare(self) -> None:
        has_gradients = self.accumulates or self.step.leaves_gradients
        for parameter in self.step.model.parameters():
            parameter.grad = None
            if has_gradients and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    def _step(self) -> None:
        if self.step.step is not None:
            self.step.step()
            return
        output, loss = self.step.forward()
        if not self.plan.profile.holds_output:
            output = None
        loss.backward()
        del output

    def compare(self, fitted: _Run, plain: _Run) -> tuple[Drift, ...]:
        """Compares gradients bit by bit; returns those that differ as plain steps differ among themselves."""
        names = differing(fitted.prints, plain.prints)
        if not names:
            return ()
        with self.plainly():
            again = (self.results(fingerprint) for _ in range(_MOST_PLAIN_STEPS))
            drifts = any(differing(plain.prints, prints) for prints in again)
            results = self.results(on_host, names)
            own = drift_between(results, self.results(on_host, names)) if drifts else []
        found = drift_between(results, self.results(on_host, names))
        if not drifts and not found:
            found = [Drift(name, math.nan, math.nan) for name in names]  # they differ in some runs only
        if wrong := too_far(found, own) if drifts else found:
            raise VerificationError(
                f"Under the plan the gradient of {list_drifts(wrong)} differs from the plain step's, and plain"
                " steps do not differ so among themselves. Run recoup.audit on the model: a unit does not repeat"
                " itself in its replay."
            )
        # Equal in these runs, but not in the first ones.
        return tuple(found) or tuple(Drift(name, 0.0, 1.0) for name in names)

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """Steps without the plan, with the caches off that it switches off."""
        model = self.step.model
        cacheless = without_caches(model) if _caches_off(model) else nullcontext()
        with suspended(model), cacheless:
            yield


def _caches_off(model: nn.Module) -> list[CachelessForward]:
    return [one for one in installed(model) if isinstance(one, CachelessForward)]


def _over_budget(peak_bytes: int, plan: ModelPlan) -> OverBudgetError:
    return OverBudgetError(
        f"A real step peaks at {format_bytes(peak_bytes)} ({peak_bytes} bytes), above the budget of"
        f" {format_bytes(plan.budget_bytes)} ({plan.budget_bytes} bytes; predicted:"
        f" {format_bytes(plan.predicted_bytes)}). Plan for less than the budget; if the step's memory varies with the"
        " data, leave a margin.",
        peak_bytes=peak_bytes,
    )
