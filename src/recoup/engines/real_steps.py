"""Real steps of a model, as it stands or plainly: their memory, their seconds, their gradients.

NOTE [ Left over ]
    The allocator of a GPU gives tensors of more than 1 MiB a freed block that is up to 1 MiB larger, and counts all of
    it. Blocks of odd sizes that measuring has left behind may so make a step pass its budget: two steps are recorded
    without them, and caches are emptied when a fit has found its plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from recoup.checkpointing.fingerprints import Fingerprint, fingerprint
from recoup.checkpointing.sampling import sampling
from recoup.devices.meter import Meter, Timing, device_of, make_meter
from recoup.engines.compared_replays import replays_left_out
from recoup.engines.drift import AFTER, Results, deterministically
from recoup.engines.eager import kept
from recoup.engines.recording import Points, record
from recoup.errors import ReplayMismatchError, VerificationError
from recoup.model.accumulation import UNREDUCED
from recoup.model.caches import CachelessForward, without_caches
from recoup.model.optimizer_state import all_state_storages, state_bytes_of
from recoup.model.replace_forward import StandIn, installed, suspended
from recoup.model.step import TrainingStep
from recoup.model.tracing import compiled_functions_off
from recoup.plans.model_plan import ModelPlan
from recoup.plans.profile import Profile
from recoup.tensors import local_part, span_of
from recoup.torch_private import is_traceable_wrapper_subclass

__all__ = ["RealSteps", "Recorded"]

T = TypeVar("T")
_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
_MOST_LEFT_OVER = 1.1
"""A step that passes its budget by a larger share does not do so by what is left over of freed blocks."""
_MOST_SETTLING = 6
"""Steps in which an optimizer's state may grow before one is recorded."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The memory of one step, and what it computed.

    Attributes:
        peak_bytes: of the whole step, the optimizer's step included.
        points: bytes of the whole step over the recorded step's own seconds.
        prints: fingerprints of its gradients, and of the parameters where a step may change them.
        is_cacheless: whether the plan switched a key-value cache off.
        compares_all: whether all replays were compared with their forwards.
    """

    peak_bytes: int
    points: Points
    prints: dict[str, Fingerprint] = field(default_factory=dict, repr=False)
    is_cacheless: bool = False
    compares_all: bool = True


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
        self._kept: list[StandIn] = []

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
    def keeping(self) -> Iterator[None]:
        """Steps without the plan, as the profile has the plain step: captured units run as graphs.

        The caches are off that the plan switches off.
        """
        model = self.step.model
        cacheless = self._cacheless()
        stand_ins = kept(model, self.profile, self._kept) if self.profile.is_captured else suspended(model)
        with stand_ins, cacheless():
            yield

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """The same without graphs."""
        cacheless = self._cacheless()
        # The user's compiled functions draw other numbers than graphs do into which they were taken.
        draws = self.draws and bool(self.step.compiled)
        with suspended(self.step.model), cacheless(), compiled_functions_off() if draws else nullcontext():
            yield

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """Steps whose gradients those under the plan have to equal: eager ones, but generated code stays generated."""
        with self.keeping() if self.is_generated else self.eagerly():
            yield

    @contextmanager
    def shaken(self) -> Iterator[None]:
        """Steps with other last bits in what is trained: so far rounding may move gradients, too.

        Parameters whose elements share memory, such as expanded ones, keep theirs. Under autocast, those of parameters
        in 32 bits are the last ones of its dtype.
        """
        flipped: dict[int, list[tuple[Tensor, int]]] = {}
        conditions = self.profile.conditions
        autocast: torch.dtype | None = (
            getattr(torch, conditions.autocast) if conditions and conditions.autocast else None
        )
        try:
            for parameter in self.step.model.parameters():
                # Without the counter of versions: graphs of the user's hold these parameters.
                local: Any = local_part(parameter).data
                if not parameter.requires_grad or local.dtype not in _BITS:
                    continue
                if is_traceable_wrapper_subclass(local) or span_of(local) < local.numel():
                    continue
                bits, mask = local.view(_BITS[local.dtype]), _last_bit(local.dtype, autocast)
                beside = flipped.setdefault(bits.untyped_storage()._cdata, [])
                # Once, where parameters share memory.
                if not any(_overlap(bits, other) for other, _ in beside):
                    bits.bitwise_xor_(mask)
                    beside.append((bits, mask))
            torch.clear_autocast_cache()  # of parameters as they were
            yield
        finally:
            for bits, mask in chain.from_iterable(flipped.values()):
                bits.bitwise_xor_(mask)
            torch.clear_autocast_cache()

    def _cacheless(self) -> Callable[[], AbstractContextManager[None]]:
        """Makes the context that switches caches off: ask while the plan is on the model, call when it is not."""
        model = self.step.model
        return partial(without_caches, model) if _caches_off(model) else nullcontext

    def record(self, budget_bytes: int | None = None, plan: ModelPlan | None = None) -> Recorded:
        """A step's memory and results; replays are compared with their forwards. Of several ranks, the largest peak.

        Args:
            budget_bytes: that it should hold: if it nearly does, caches are emptied, and it is recorded again, twice.
            plan: that it runs under, where its gradients will be compared with the plain step's: then some replays
                are enough, see NOTE [ Compared replays ].

        Raises:
            VerificationError: a replay differs from its forward.
        """
        left_out: set[nn.Module] = set()
        if plan is not None and not self.is_generated:
            left_out = replays_left_out(self.step.model, plan, self.device)
        recorded = self._record_on_all(left_out)
        share = recorded.peak_bytes / budget_bytes if budget_bytes else 0.0
        if self.meter.keeps_blocks and 1 < share < _MOST_LEFT_OVER:
            self.meter.make_room()
            # Only from the second step on, blocks are those that such steps leave.
            twice = [self._record_on_all(left_out) for _ in range(2)]
            recorded = max(twice, key=lambda one: one.peak_bytes)
        return replace(recorded, compares_all=not left_out)

    def _record_on_all(self, left_out: Collection[nn.Module]) -> Recorded:
        with self.step.together():
            recorded = self._record(left_out)
        return replace(recorded, peak_bytes=self.step.ranks.largest(recorded.peak_bytes))

    def compare_replays(self) -> None:
        """Runs a step in which all replays are compared with their forwards.

        Raises:
            VerificationError: one differs.
        """
        with self.step.together(), self.step.preserved():
            self._prepare()
            with _comparing():
                self._run_in_flight()

    def _record(self, left_out: Collection[nn.Module]) -> Recorded:
        residents = self.profile.residents
        # Once is enough, whatever the plan: it does not change what a step writes to.
        is_known = self._knows_writes or self.step.knows_writes
        finding = nullcontext() if is_known else self.step.finding_writes()
        with self.step.preserved(), finding:
            self._settle()
            torch.clear_autocast_cache()
            with self.meter.watching():
                self.meter.follow(self.step.shards.storages())
                # A step of the user's may replace some of them.
                self.meter.count(all_state_storages(self.step.optimizers))
                live_bytes = self.meter.begin()
                # Comparing takes memory too, on some devices: near the peak it has to be there.
                with _comparing(left_out):
                    before_bytes = self._peak_before_last(live_bytes)
                    # Tracked, since a step of the user's may free these gradients and make others.
                    self._prepare()
                    lived_bytes = residents.total_bytes + self.meter.live_bytes() - live_bytes
                    recorded = record(self.meter, self._run_in_flight)
            # Before what was written to is put back, gradients among it.
            prints = {name: fingerprint(tensor) for name, tensor in self._results().items()}
        self._knows_writes = True
        # What generated code writes is not seen: other engines look again.
        self.step.knows_writes = self.step.knows_writes or not self.is_generated
        peak_bytes = max(
            recorded.peak_bytes + lived_bytes,
            before_bytes + residents.total_bytes,
            residents.optimizer_peak_bytes,
        )
        points = tuple((time_s, num_bytes + lived_bytes) for time_s, num_bytes in recorded.points)
        is_cacheless = any(one.has_switched for one in _caches_off(self.step.model))
        return Recorded(peak_bytes, points, prints, is_cacheless)

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
        """What ``see`` makes of each of the gradients after a step, and of parameters where a step may change them."""
        return self.inspect(lambda found: {name: see(tensor) for name, tensor in found.items()}, names)

    def inspect(self, see: Callable[[Results], T], names: Sequence[str] | None = None) -> T:
        """What ``see`` makes of all of them."""
        run = partial(self._after_step, see, names)
        # Generated code would be compiled once more under other settings.
        with self.step.together():
            return run() if self.is_generated else deterministically(run)

    def _after_step(self, see: Callable[[Results], T], names: Sequence[str] | None) -> T:
        with self.step.preserved():
            self._prepare()
            self._run()
            found = self._results()
            return see({name: tensor for name, tensor in found.items() if names is None or name in names})

    def _results(self) -> Results:
        found: Results = {}
        if self._lasts:
            self.step.shards.put_back()  # else the model has the gathered parameters, without the gradients
        for name, parameter in self.step.model.named_parameters():
            if parameter.grad is not None:
                found[name] = local_part(parameter.grad)
            if self.step.changes_parameters:
                found[f"{name}{AFTER}"] = local_part(parameter)
        return found

    def leaves_traces(self, names: Iterable[str]) -> bool:
        """Whether results of a step, by name, tell its gradients: these, or parameters that an optimizer stepped."""
        found = bool(self.step.optimizers) or any(not name.endswith(AFTER) for name in names)
        return self.step.ranks.largest(found)

    def _settle(self) -> None:
        """Lets an optimizer inside the step allocate its state, which counts as resident, and the compiler compile.

        A state that grows from step to step, such as a history, is let grow for a few of them.
        """
        if self.step.changes_parameters or self.profile.is_captured:
            # With a sample, the step that follows draws the random numbers of the measured one.
            repeated = nullcontext() if self.step.changes_parameters else self.step.repeated()
            with repeated:
                num_bytes = self._state_bytes()
                for _ in range(_MOST_SETTLING):
                    self._run()
                    before_bytes, num_bytes = num_bytes, self._state_bytes()
                    if num_bytes == before_bytes or num_bytes >= self.profile.residents.optimizer_bytes:
                        break
            for parameter in self.step.model.parameters():
                parameter.grad = None

    def _state_bytes(self) -> int:
        """Of the optimizers that a step may call; of several ranks, the largest."""
        called = self.step.optimizers if self.step.changes_parameters else ()
        return self.step.ranks.largest(state_bytes_of(*called))

    @property
    def _lasts(self) -> bool:
        """Whether a micro-batch begins with parameters that the one before has left gathered."""
        return self.step.step is None and self.step.shards.lasts

    def _prepare(self, *, is_first: bool = False) -> None:
        has_gradients = self.profile.accumulates or self.step.leaves_gradients
        shards = self.step.shards
        if self._lasts:
            shards.put_back()
        unreduced = shards.make_unreduced_gradients() if self.profile.accumulates == UNREDUCED else set()
        for parameter in self.step.model.parameters():
            parameter.grad = None
            if has_gradients and parameter.requires_grad and parameter not in unreduced:
                parameter.grad = torch.zeros_like(parameter)
        if self._lasts and not is_first:
            shards.gather_lasting()

    def _peak_before_last(self, live_bytes: int) -> int:
        """Of the first micro-batch, beyond what lived before it, where it is another one than the last; else 0.

        It does not reduce its gradients, where the last one alone does, and gathers parameters that last.
        """
        is_unreduced = self.profile.accumulates == UNREDUCED
        if not is_unreduced and not self._lasts:
            return 0
        self._prepare(is_first=True)
        lived_bytes = self.meter.live_bytes() - live_bytes
        with self.step.shards.not_reducing() if is_unreduced else nullcontext():
            recorded = record(self.meter, self._run_in_flight)
        return lived_bytes + recorded.peak_bytes

    def _run_in_flight(self) -> None:
        """A step while other forwards wait for their backwards."""
        waiting = [self._forward() for _ in range(self.profile.in_flight - 1)]
        self._run()
        del waiting

    def _forward(self) -> tuple[Any, Tensor]:
        self._begin()
        output, loss = self.step.forward()
        return output if self.profile.holds_output else None, loss

    def _run(self) -> None:
        if self.step.step is not None:
            self._begin()
            self.step.step()
            return
        output, loss = self._forward()
        loss.backward()
        del output

    def _begin(self) -> None:
        """Models that skip layers at random skip the same ones in every step that is run here."""
        if self.step.begin is not None:
            self.step.begin()


@contextmanager
def _comparing(left_out: Iterable[nn.Module] = ()) -> Iterator[None]:
    """A step whose replays are compared with their forwards.

    Raises:
        VerificationError: one differs.
    """
    with sampling("always", left_out=left_out):
        try:
            yield
        except ReplayMismatchError as error:
            raise VerificationError(f"{error}\nRun recoup.audit on the model.") from None


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one storage may share memory: their ranges of it do."""
    (begin, end), (other_begin, other_end) = map(_range_of, (one, other))
    return begin < other_end and other_begin < end


def _range_of(tensor: Tensor) -> tuple[int, int]:
    begin, size = int(tensor.storage_offset()), tensor.element_size()
    return begin * size, (begin + span_of(tensor)) * size


def _last_bit(dtype: torch.dtype, autocast: torch.dtype | None) -> int:
    """The last bit of a number that counts in a step: where autocast casts it, those behind it are cut off."""
    if autocast is None or dtype is not torch.float32:
        return 1
    return round(torch.finfo(autocast).eps / torch.finfo(dtype).eps)


def _caches_off(model: nn.Module) -> list[CachelessForward]:
    return [one for one in installed(model) if isinstance(one, CachelessForward)]
