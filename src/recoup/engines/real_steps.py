"""Real steps of a model, as it stands or plainly: their memory, their seconds, their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from recoup.checkpointing.fingerprints import Fingerprint, fingerprint
from recoup.checkpointing.sampling import sampling
from recoup.devices.meter import Meter, Timing, device_of, make_meter
from recoup.engines.drift import deterministically
from recoup.engines.eager import kept
from recoup.engines.recording import Points, Recording, record
from recoup.errors import ReplayMismatchError, VerificationError
from recoup.model.caches import CachelessForward, without_caches
from recoup.model.replace_forward import installed, suspended
from recoup.model.step import TrainingStep
from recoup.plans.profile import Profile
from recoup.tensors import local_part

__all__ = ["RealSteps", "Recorded"]

T = TypeVar("T")
_AFTER = " (after the step)"


@dataclass(frozen=True, slots=True)
class Recorded:
    """The memory of one step, and what it computed.

    Attributes:
        peak_bytes: of the whole step, the optimizer's step included.
        points: bytes of the whole step over the recorded step's own seconds.
        prints: fingerprints of its gradients, and of the parameters where a step may change them.
        is_cacheless: whether the plan switched a key-value cache off.
    """

    peak_bytes: int
    points: Points
    prints: dict[str, Fingerprint] = field(default_factory=dict, repr=False)
    is_cacheless: bool = False


class RealSteps:
    """Steps of a model, run without a trace.

    Args:
        step: to run.
        profile: of that step: what lives beside it, and what its caller holds.
    """

    def __init__(self, step: TrainingStep, profile: Profile) -> None:
        self.step, self.profile = step, profile
        self.device = device_of(step.model, step.given)
        self.meter: Meter = make_meter(self.device)
        self.meter.waits = step.communicates
        self._knows_writes = False

    def plain_fits(self) -> bool:
        """Whether the device has room for the plain step beside what lives already."""
        needed_bytes = self.profile.plain_bytes - self.profile.residents.total_bytes
        return self.step.ranks.smallest(needed_bytes < self.meter.free_bytes())

    @property
    def is_generated(self) -> bool:
        """Whether units run generated code, which rounds otherwise than eager code."""
        recipes = [unit.recipes[0] for unit in self.profile.units]
        return any(recipe.kept.cut is not None for recipe in recipes)

    @property
    def draws(self) -> bool:
        """Whether captured units draw random numbers."""
        recipes = [recipe for unit in self.profile.units for recipe in unit.recipes]
        return any(recipe.cut is not None and recipe.cut.draws for recipe in recipes)

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """Steps without the plan, with the caches off that it switches off; generated code stays generated."""
        model = self.step.model
        cacheless = self._cacheless()
        with kept(model, self.profile) if self.is_generated else suspended(model), cacheless:
            yield

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """The same without generated code."""
        cacheless = self._cacheless()
        with suspended(self.step.model), cacheless:
            yield

    def _cacheless(self) -> AbstractContextManager[None]:
        """To be made while the plan is on the model, and entered when it is not."""
        model = self.step.model
        return without_caches(model) if _caches_off(model) else nullcontext()

    def record(self) -> Recorded:
        """A step's memory and results; replays are compared with their forwards. Of several ranks, the largest peak.

        Raises:
            VerificationError: a replay differs from its forward.
        """
        with self.step.together():
            recorded = self._record()
        return replace(recorded, peak_bytes=self.step.ranks.largest(recorded.peak_bytes))

    def _record(self) -> Recorded:
        residents = self.profile.residents
        # Once is enough, whatever the plan: it does not change what a step writes to.
        finding = nullcontext() if self._knows_writes else self.step.finding_writes()
        with self.step.preserved(), finding:
            self._settle()
            torch.clear_autocast_cache()
            with self.meter.watching():
                self.meter.follow(self.step.shards.storages())
                live_bytes = self.meter.begin()
                # Tracked, since a step of the user's may free these gradients and make others.
                self._prepare()
                lived_bytes = residents.total_bytes + self.meter.live_bytes() - live_bytes
                recorded = self._run_recorded()
            # Before what was written to is put back, gradients among it.
            prints = self._see(fingerprint)
        self._knows_writes = True
        peak_bytes = max(recorded.peak_bytes + lived_bytes, residents.optimizer_peak_bytes)
        points = tuple((time_s, num_bytes + lived_bytes) for time_s, num_bytes in recorded.points)
        is_cacheless = any(one.has_switched for one in _caches_off(self.step.model))
        return Recorded(peak_bytes, points, prints, is_cacheless)

    def _run_recorded(self) -> Recording:
        # Comparing takes memory too, on some devices: this is the most that a step may need.
        with sampling("always"):
            try:
                return record(self.meter, self._run_in_flight)
            except ReplayMismatchError as error:
                raise VerificationError(f"{error}\nRun recoup.audit on the model.") from None

    @contextmanager
    def timing(self) -> Iterator[Callable[[], Timing]]:
        """A block in which steps can be timed, by the function that it gives."""

        def time_step() -> Timing:
            # A step of the user's may do something else each time: all begin with the same counters.
            # Comparisons of replays are rare in a long training: they would count too much in a few steps.
            repeated = self.step.repeated() if self.step.changes_parameters else nullcontext()
            with self.step.together(), repeated, sampling("never"):
                self._prepare()
                timing = self.meter.time_step(self._run)
            # Of several ranks, the slowest.
            return Timing(*map(max, zip(*self.step.ranks.gathered(timing), strict=True)))

        with self.step.preserved():
            yield time_step

    def results(self, see: Callable[[Tensor], T], names: Sequence[str] | None = None) -> dict[str, T]:
        """What ``see`` makes of the gradients after a step, and of the parameters where a step may change them."""
        run = partial(self._after_step, see, names)
        # Generated code would be compiled once more under other settings.
        with self.step.together():
            return run() if self.is_generated else deterministically(run)

    def _after_step(self, see: Callable[[Tensor], T], names: Sequence[str] | None) -> dict[str, T]:
        with self.step.preserved():
            self._prepare()
            self._run()
            return self._see(see, names)

    def _see(self, see: Callable[[Tensor], T], names: Sequence[str] | None = None) -> dict[str, T]:
        found: dict[str, Tensor] = {}
        for name, parameter in self.step.model.named_parameters():
            if parameter.grad is not None:
                found[name] = local_part(parameter.grad)
            if self.step.changes_parameters:
                found[f"{name}{_AFTER}"] = local_part(parameter)
        return {name: see(tensor) for name, tensor in found.items() if names is None or name in names}

    def leaves_traces(self, names: Iterable[str]) -> bool:
        """Whether results of a step, by name, tell its gradients: these, or parameters that an optimizer stepped."""
        found = bool(self.step.optimizers) or any(not name.endswith(_AFTER) for name in names)
        return self.step.ranks.largest(found)

    def _settle(self) -> None:
        """Lets an optimizer inside the step allocate its state, which counts as resident, and the compiler compile."""
        if self.step.changes_parameters or self.profile.is_captured:
            self._run()
            for parameter in self.step.model.parameters():
                parameter.grad = None

    def _prepare(self) -> None:
        has_gradients = self.profile.accumulates or self.step.leaves_gradients
        for parameter in self.step.model.parameters():
            parameter.grad = None
            if has_gradients and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    def _run_in_flight(self) -> None:
        """A step while other forwards wait for their backwards."""
        waiting = [self._forward() for _ in range(self.profile.in_flight - 1)]
        self._run()
        del waiting

    def _forward(self) -> tuple[Any, Tensor]:
        output, loss = self.step.forward()
        return output if self.profile.holds_output else None, loss

    def _run(self) -> None:
        if self.step.step is not None:
            self.step.step()
            return
        output, loss = self._forward()
        loss.backward()
        del output


def _caches_off(model: nn.Module) -> list[CachelessForward]:
    return [one for one in installed(model) if isinstance(one, CachelessForward)]
