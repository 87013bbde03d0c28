"""``fit``: measure, plan, apply and verify in one call."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn

from recoup.auditing import Audit, audit_step
from recoup.budgets import read_budget
from recoup.devices.meter import device_of, make_meter
from recoup.devices.processes import num_processes
from recoup.engines import ModelPlan, apply, plan
from recoup.engines.eager import Earlier, planned_model
from recoup.engines.racing import Candidate, Race, race
from recoup.engines.real_steps import RealSteps
from recoup.engines.tried import TriedEngine, most_gain_in_words, tried_in_words
from recoup.engines.verify import Verification, verify_step
from recoup.errors import (
    BudgetError,
    OverBudgetError,
    RecoupWarning,
    SampleError,
    UnitError,
    VerificationError,
)
from recoup.fitting_sizes import VerifiedSize, check_sizes, fit_sizes, measure_like
from recoup.measuring.measure import Measured, begin_measurement, measure_step
from recoup.model.calls import watch_calls
from recoup.model.checks import check_model
from recoup.model.compile_settings import settings_to_take_over
from recoup.model.optimizers import Optimizers
from recoup.model.replace_forward import uninstall_plan
from recoup.model.several_samples import read_samples
from recoup.model.slices import find_module
from recoup.model.step import TrainingStep
from recoup.model.uncompile import compiled_code, inner_model, is_compiled, uncompile
from recoup.model.units import Units, parts_of, split_units
from recoup.model.wrappers import buckets_of, unsynchronized, unwrapped_model
from recoup.plans.by_size.plans import PlansBySize
from recoup.plans.largest import largest_profile
from recoup.plans.learning import Pricing, learn, learned_plan, priced
from recoup.plans.model_plan import tightest
from recoup.plans.profile import Profile
from recoup.plans.refusal import refusal
from recoup.plans.rivals import plan_with_rivals
from recoup.plans.usable_bytes import smallest_budget
from recoup.progress import note
from recoup.ranks import find_ranks
from recoup.report.table import to_text

__all__ = ["Fitted", "engines_for", "fit", "plan_to_fit", "verify"]

_MOST_ROUNDS = 3
_MOST_SPLITS = 4
_MOST_TRIAL_S = 30.0
"""A refusal is not verified on a longer step: under the smallest budgets, replays of deep models nest deeply."""


@dataclass(frozen=True)
class Fitted:
    """A fitted model: what was measured, planned, found unsafe, and verified.

    Attributes:
        model: the model, with its plan applied.
        plan: what happens to which unit, and what that was predicted to cost.
        audit: what could make a replay unsafe.
        verification: a real step under the plan; ``None`` if that was not asked for.
        engines: those that ``engine="best"`` tried, with their seconds, or why they have no plan; else empty.
        by_size: the plans for batches of other sizes, where several were given; ``plan`` is that of the largest.
        sizes: real steps of these other sizes.
    """

    model: nn.Module = field(repr=False)
    plan: ModelPlan
    audit: Audit
    verification: Verification | None
    engines: tuple[TriedEngine, ...] = ()
    by_size: PlansBySize | None = None
    sizes: tuple[VerifiedSize, ...] = ()

    @property
    def profile(self) -> Profile:
        """The measured step."""
        return self.plan.profile

    @property
    def notes(self) -> tuple[str, ...]:
        """What the report says beside the plan's and the verification's own notes, in sentences."""
        if self.engines:
            return tried_in_words(self.engines)
        return most_gain_in_words(self.plan, self.verification)

    def to_html(self, path: str | Path) -> Path:
        """Writes a report into one HTML file that needs nothing else; returns its path."""
        from recoup.report.page import write_html

        return write_html(self, path)

    def _repr_html_(self) -> str:
        from recoup.report.page import to_notebook

        return to_notebook(self)

    def __str__(self) -> str:
        return to_text(self)


def fit(
    model: nn.Module,
    sample: Any = None,
    *,
    budget: int | str,
    loss: Callable[..., Tensor] | None = None,
    optimizer: Optimizers | None = None,
    step: Callable[..., Any] | None = None,
    units: Units | Iterable[Units] | None = None,
    accumulates: bool = False,
    holds_output: bool | None = None,
    samples: Iterable[Any] | None = None,
    sizes: Iterable[int] | None = None,
    verify: bool = True,
    race: bool = True,
    insist: bool = False,
    engine: str = "auto",
    together: Any = True,
    in_flight: int = 1,
) -> Fitted:
    """Makes a model's training step fit a budget, in place, at the least cost in time.

    Args:
        model: what is trained, in the mode (train or eval) in which it will be.
        sample: as large as in training: a tensor for ``model(x)``, a tuple for ``model(*sample)``, a mapping for
            ``model(**sample)``, or ``(inputs, targets)`` as a loader yields them, with a loss of two arguments.
        budget: bytes that the whole step may peak at: ``"8GiB"``, ``"80%"`` of the device, or ``"auto"``, what is free
            less a margin. It covers parameters, gradients, optimizer state, activations and transients.
        loss: from the model's output, and the targets if it takes two arguments, to a scalar; unless given, the
            output's ``loss``, or the output itself.
        optimizer: whose state counts, also before its first step; a trainer's wrapper of one, or several in a list.
        step: a callable that runs a whole training step, for loops that are not ``loss(model(*sample))``. Whatever it
            changes is put back.
        units: the modules to decide about: name patterns (``"blocks.*"``), modules, or a predicate of name and module.
        accumulates: gradients are there when a step begins, because several backwards add up in them.
        holds_output: whether the training loop still has the model's output when the backward runs, as with
            ``output = model(x); loss_of(output).backward()``, or not, as with ``model(**batch).loss.backward()``.
            Unless given, plans are made for a loop that has it and, only where that does not fit, for one that has not.
        samples: instead of one, batches of several sizes, such as ``[short, medium, long]``: each is measured, and
            every range of sizes gets a plan of its own, under the same budget. Each call of the model runs under the
            plan for its batch. With ``step``, that is called with one of them.
        sizes: with one sample, the longest: lengths that it is cut to, such as ``[128, 512, 2048]``, instead of
            ``samples``.
        verify: run a real step under the plan and compare it with the prediction, the budget and the plain step.
        race: time the plan against others that fit, such as recomputing every unit, in turn on real steps; keep the
            fastest, and correct the profile's seconds by what was measured. It goes with ``verify``, and is left out
            where several processes train together, since all of them have to run the same plan.
        insist: let units be replayed that the audit finds unsafe.
        engine: ``"eager"``; ``"captured"``, where large units run as graphs of the same operations, so that the plan
            decides about each of them; ``"compiled"``, where torch's compiler generates code for these graphs;
            ``"best"``, the fastest of the three on real steps; or ``"auto"``, compiled where the model or modules in it
            were compiled, and else eager. Inside captured units, code no longer runs line by line: prints,
            breakpoints and hooks that are added later have no effect there. What cannot be captured runs eagerly.
        together: where `torch.distributed` is initialized, all of its ranks call this function, and get one plan: for
            the largest bytes and the slowest seconds that any of them measured. An error on one rank is raised on all.
            A process group instead of ``True`` does so for its ranks; ``False`` fits on this rank alone.
        in_flight: how many micro-batches wait for their backward at once, as in a stage of a pipeline: what all of
            them hold is part of the peak.

    Raises:
        BudgetError: nothing fits; it names the smallest feasible budget, which a real step showed to hold where one
            can be run, and says so.
        SampleError: the model does not take the sample, or has nothing to train.
        LossError: the loss is no scalar.
        UnitError: there are no such units.
        VerificationError: a gradient differs from the plain step's; for generated code, from those of the same code
            with everything kept.

    The model is as before if an exception leaves this function.

    >>> import torch
    >>> layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)]
    >>> model = torch.nn.Sequential(*layers)
    >>> fitted = fit(model, torch.zeros(512, 64), budget="1.4MB", loss=lambda output: output.mean())
    >>> fitted.verification.peak_bytes <= 1_400_000, fitted.verification.gradients
    (True, 'bit-equal')
    """
    ranks = find_ranks(together)
    with ranks.together():
        engines = engines_for(engine, model)
        earlier, inner = Earlier(model), unwrapped_model(model)
        buckets = buckets_of(model, expected=ranks.size > 1)
        settings = settings_to_take_over(model) if "compiled" in engines else ""
        try:
            if engines != ("eager",):
                uninstall_plan(model)
                uncompile(model)
                inner = inner_model(inner)
            training, *others = [
                TrainingStep(
                    inner, one, loss=loss, step=run, optimizer=optimizer, ranks=ranks, buckets=buckets
                )
                for one, run in _steps(step, sample, samples, sizes)
            ]
            if others:
                check_sizes(training)
            budget_bytes = ranks.smallest(read_budget(budget, inner, training.given))
            if training.shards and engines != ("eager",):
                raise SampleError(
                    f"engine={engine!r} captures units with their parameters, which fully_shard divides: fit with"
                    " engine='eager'."
                )
            if not inner.training:
                warn(_EVAL_MODE, RecoupWarning, stacklevel=2)
            fitting = _Fitting(
                training,
                accumulates=accumulates,
                holds_output=holds_output,
                insist=insist,
                races=race and verify,
                settings=settings,
                in_flight=in_flight,
            )
            with unsynchronized([model, *training.reached.modules]):
                found = fitting.run_engines(engines, units, budget_bytes, verifies=verify)
                by_size, seen = fitting.run_sizes(found[0], others, verifies=verify) if others else (None, ())
            apply(model, found[0] if by_size is None else by_size)
            ranks.check_same(found[0].to_json(), "The plan")
        except BaseException:
            earlier.put_back()
            raise
    return Fitted(model, *found, by_size, seen)


def _steps(
    step: Callable[..., Any] | None, sample: Any, samples: Iterable[Any] | None, sizes: Iterable[int] | None
) -> list[tuple[Any, Callable[[], Any] | None]]:
    """The sample, or the callable that runs the whole step, of each size; the largest first."""
    found = read_samples(sample, samples, sizes)
    if step is None or len(found) == 1:
        return [(sample, step)] if len(found) == 1 else [(one, None) for one in found]
    return [(None, partial(step, one)) for one in found]


def verify(
    model: nn.Module,
    plan: ModelPlan,
    sample: Any = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    optimizer: Optimizers | None = None,
    step: Callable[[], Any] | None = None,
    together: Any = True,
) -> Verification:
    """Runs a real step of a model whose plan is applied: peak against budget, gradients against the plain step.

    Of several ranks, which all call this function, it is the largest peak; ``together`` is as for `fit`.

    Raises:
        OverBudgetError: the peak passes the plan's budget.
        VerificationError: a gradient differs from the plain step's.
    """
    ranks = find_ranks(together)
    with ranks.together():
        inner = planned_model(model, plan.profile)
        training = TrainingStep(inner, sample, loss=loss, step=step, optimizer=optimizer, ranks=ranks)
        with unsynchronized([model, *training.reached.modules]):
            return verify_step(training, plan)


def plan_to_fit(
    step: TrainingStep, budget_bytes: int, *, units: Units | Iterable[Units] | None, accumulates: bool
) -> ModelPlan:
    """The plan that `fit` would apply, with what its audit finds unsafe kept.

    Raises:
        BudgetError: nothing fits.
    """
    fitting = _Fitting(step, accumulates=accumulates, holds_output=None, insist=False, races=False)
    return fitting.run(units, budget_bytes, verifies=False)[0]


def engines_for(engine: str, model: nn.Module) -> tuple[str, ...]:
    """The engines to try for what a user asked for.

    Raises:
        SampleError: there is no such engine.

    >>> engines_for("best", nn.Linear(2, 2))
    ('eager', 'captured', 'compiled')
    """
    check_model(model)
    if engine in ("eager", "captured", "compiled"):
        return (engine,)
    if engine == "auto":
        return ("compiled",) if is_compiled(model) else ("eager",)
    if engine == "best":
        # A plan for eager code is not in force where the model is compiled.
        return ("captured", "compiled") if compiled_code(model) else ("eager", "captured", "compiled")
    raise SampleError(
        f"engine={engine!r} is not known; it is 'auto', 'eager', 'captured', 'compiled' or 'best'."
    )


_EVAL_MODE = (
    "The model is in eval mode, as from_pretrained() leaves it, and the plan will hold in eval mode only: call"
    " model.train() before fit() if it is trained in train mode."
)


class _Fitting:
    """One fit."""

    def __init__(
        self,
        step: TrainingStep,
        *,
        accumulates: bool,
        holds_output: bool | None,
        insist: bool,
        races: bool,
        settings: str = "",
        in_flight: int = 1,
    ) -> None:
        if isinstance(in_flight, bool) or not isinstance(in_flight, int) or in_flight < 1:
            raise SampleError(f"in_flight must be a whole number of at least 1; got {in_flight!r}.")
        if in_flight > 1 and step.step is not None:
            raise SampleError(
                "in_flight= goes with a sample: a step= callable makes all its forwards by itself."
            )
        if holds_output is not None and step.step is not None:
            raise SampleError(
                "holds_output= goes with a sample: a step= callable shows by itself what it holds."
            )
        self.step, self.ranks = step, step.ranks
        # Gradients that are views of buckets are there when a step begins.
        self.accumulates = accumulates or step.buckets.are_gradients
        self.holds_output, self.insist = holds_output, insist
        # Processes that train together have to run the same plan, in the same number of steps.
        self.races = races and num_processes() == 1 and in_flight == 1
        self.in_flight = in_flight
        self.engine, self.settings = "eager", settings
        self._pricing: dict[str, Pricing] = {}

    def run_engines(
        self,
        engines: Sequence[str],
        units: Units | Iterable[Units] | None,
        budget_bytes: int,
        *,
        verifies: bool,
    ) -> tuple[ModelPlan, Audit, Verification | None, tuple[TriedEngine, ...]]:
        """Fits with each engine; the fastest plan, by real steps where these are run, and what became of the others.

        Raises:
            BudgetError: nothing fits, with any engine; it names the smallest budget of all.
        """
        fitted: dict[str, tuple[ModelPlan, Audit, Verification | None]] = {}
        failed: dict[str, Exception] = {}
        for self.engine in engines:
            try:
                fitted[self.engine] = self.run(units, budget_bytes, verifies=verifies)
            except (BudgetError, VerificationError, torch.OutOfMemoryError) as error:
                failed[self.engine] = error
        failures = {engine: str(error) for engine, error in failed.items()}
        try:
            if not fitted:
                raise min(failed.values(), key=lambda error: getattr(error, "smallest_bytes", sys.maxsize))
        finally:
            failed.clear()  # else this frame and an error would hold each other
        if len(fitted) == 1 or not verifies:
            chosen, audit, seen = min(fitted.values(), key=lambda one: one[0].predicted_s)
            took_s = {chosen.profile.engine: seen.seconds} if seen else {}
        else:
            candidates = [Candidate(f"engine={name!r}", found[0]) for name, found in fitted.items()]
            ran = race(RealSteps(self.step, candidates[0].plan.profile), candidates)
            chosen, audit, seen = next(found for found in fitted.values() if found[0] is ran.winner)
            assert seen is not None, "plans that race are verified"
            seen = replace(seen, race=(*ran.finishers, *seen.race))
            took_s = {candidate.plan.profile.engine: lap.seconds for candidate, lap in ran.laps}
        tried = [
            TriedEngine(
                engine,
                engine == chosen.profile.engine,
                fitted[engine][0].predicted_s if engine in fitted else None,
                took_s.get(engine),
                failures.get(engine, ""),
            )
            for engine in engines
        ]
        return chosen, audit, seen, tuple(tried) if len(tried) > 1 else ()

    def run(
        self, units: Units | Iterable[Units] | None, budget_bytes: int, *, verifies: bool
    ) -> tuple[ModelPlan, Audit, Verification | None]:
        """Measures, plans and verifies, in every way of measuring the step until one fits.

        Where none does, the plans that need the least memory are tried, whatever they are predicted to need.

        Raises:
            BudgetError: nothing fits; the budget that it names was verified where a step could be run.
        """
        tried: list[tuple[Profile, Audit]] = []
        for profile, audit in self._profiles(units):
            tried.append((profile, audit))
            note("planning", 0, 1)
            try:
                chosen, rivals = self._plan(profile, budget_bytes)
            except BudgetError:
                continue
            if not verifies:
                return chosen, audit, None
            if (verified := self._verify(chosen, rivals)) is not None:
                return verified[0], audit, verified[1]
        least = sorted(
            ((tightest(profile), audit) for profile, audit in tried), key=lambda one: smallest_budget(one[0])
        )
        refused: list[tuple[ModelPlan, int]] = []
        for chosen, audit in least:
            chosen = replace(chosen, budget_bytes=budget_bytes)
            seen = self._try_anyway(chosen) if verifies else 0
            if isinstance(seen, Verification):
                return chosen, audit, seen
            refused.append((chosen, seen))
        chosen, peak_bytes = min(refused, key=lambda one: smallest_budget(*one))
        raise refusal(chosen, budget_bytes, measured_bytes=peak_bytes)

    def run_sizes(
        self, chosen: ModelPlan, others: Sequence[TrainingStep], *, verifies: bool
    ) -> tuple[PlansBySize, tuple[VerifiedSize, ...]]:
        """The plans for batches of other sizes, given that for the largest.

        Raises:
            SampleError: with another sample the model calls other units.
        """
        profiles = []
        for step in others:
            with self.ranks.together():
                measured = measure_like(chosen.profile, step, self.settings)
            profile = self._for_all(measured.profile(chosen.profile.holds_output))
            pricing = self._pricing.get(chosen.profile.engine)
            profiles.append(profile if pricing is None else priced(profile, pricing))
        return fit_sizes(chosen, profiles, others, verifies=verifies)

    def _profiles(self, units: Units | Iterable[Units] | None) -> Iterator[tuple[Profile, Audit]]:
        """The step measured in several ways, each with finer units than the one before.

        The unit that sets the smallest budget is split into what it calls. After that, where ``holds_output`` was not
        given, come the same measurements for a loop that frees the model's output.
        """
        wanted, found = units, list[tuple[Measured, Audit]]()
        for _ in range(_MOST_SPLITS):
            try:
                measured, audit = self._measure(wanted)
            except UnitError:
                if not found:
                    raise
                break  # the unit calls nothing that can be a unit
            found.append((measured, audit))
            for profile in self._profiles_of(measured, self.holds_output is not False):
                yield profile, audit
            least = tightest(profile)
            # Finer units need no less than the optimizer's own step does.
            is_least = least.predicted_bytes <= profile.residents.optimizer_peak_bytes
            wanted = None if is_least or units is not None else self._split(least)
            if wanted is None:
                break
        if self.holds_output is None and self.step.step is None:
            for measured, audit in found:
                for profile in self._profiles_of(measured, False):
                    yield profile, audit

    def _measure(self, units: Units | Iterable[Units] | None) -> tuple[Measured, Audit]:
        with self.ranks.together():
            measurement = begin_measurement(
                self.step, units=units, engine=self.engine, settings=self.settings
            )
            audit = audit_step(self.step, measurement.units, only=measurement.distinct_calls)
            found = {} if self.insist else audit.unsafe
            unsafe = {name: why for reasons in self.ranks.gathered(found) for name, why in reasons.items()}
            return measure_step(measurement, accumulates=self.accumulates, unsafe=unsafe), audit

    def _profiles_of(self, measured: Measured, holds_output: bool) -> Iterator[Profile]:
        """For all ranks. Where units gather their parameters, first without segments of them, then with."""
        if measured.groups:
            yield self._for_all(measured.profile(holds_output, in_segments=False))
        yield self._for_all(measured.profile(holds_output))

    def _for_all(self, profile: Profile) -> Profile:
        """The profile for all ranks, and for all forwards in flight."""
        profile = largest_profile(self.ranks.gathered(profile))
        if self.in_flight == 1:
            return profile
        conditions = profile.conditions
        if conditions is not None:
            conditions = replace(conditions, forwards=self.in_flight * conditions.forwards)
        return replace(profile, in_flight=self.in_flight, conditions=conditions)

    def _split(self, least: ModelPlan) -> list[nn.Module] | None:
        """The units with the one that sets the smallest budget, and all of its kind, split into what they call."""
        profile = least.profile
        found = profile.units[least.schedule.predicted.peak.unit]
        if found.module is None:
            return None
        with self.step.plain():
            root = watch_calls(self.step)
        names = dict.fromkeys(unit.module for unit in profile.units if unit.module is not None)
        alike = {unit.module for unit in profile.units if unit.kind == found.kind}
        units = {module: find_module(self.step.model, module) for module in names}
        # A unit that calls nothing stays as it is.
        some = [unit for module, unit in units.items() if module in alike and parts_of(root, unit)]
        split = split_units(root, list(units.values()), some)
        return split if len(split) > len(names) else None

    def _plan(self, profile: Profile, budget_bytes: int) -> tuple[ModelPlan, list[Candidate]]:
        """The plan, and who races against it."""
        if not self.races:
            return self.ranks.from_first(lambda: plan(profile, budget_bytes)), []
        chosen, rivals = plan_with_rivals(profile, budget_bytes)
        return chosen, [Candidate(name, rival) for name, rival in rivals]

    def _verify(self, chosen: ModelPlan, rivals: list[Candidate]) -> tuple[ModelPlan, Verification] | None:
        """Races and verifies; where a real step passes the budget, plans again with the bytes that were missed."""
        for _ in range(_MOST_ROUNDS):
            steps = RealSteps(self.step, chosen.profile)
            ran = race(steps, [Candidate("the planner's choice", chosen), *rivals])
            seen = self._try(ran.winner, ran)
            if isinstance(seen, Verification):
                return (self._learned(ran) if rivals else ran.winner), seen
            try:
                chosen, rivals = self._plan(_with_surprise(chosen, seen), chosen.budget_bytes)
            except BudgetError:
                break
        return None

    def _learned(self, ran: Race) -> ModelPlan:
        """The plan that won, predicted by a profile that has learned from all steps of the race."""
        profile, plain_s = ran.winner.profile, ran.plain.seconds if ran.plain else None
        laps = sorted(ran.laps, key=lambda one: one[0].plan is not ran.winner)
        steps = [(candidate.plan.schedule.schedule, lap.seconds) for candidate, lap in laps]
        ended = [(schedule, seconds) for schedule, seconds in steps if seconds < math.inf]
        pricing = self._pricing[profile.engine] = learn(profile, ended, plain_s)
        return learned_plan(ran.winner, priced(profile, pricing))

    def _try(self, chosen: ModelPlan, ran: Race | None = None) -> Verification | int:
        """The verification of a plan or, where a real step passes the budget, that step's peak in bytes."""
        try:
            with self.ranks.together():
                apply(self.step.model, chosen)
                return verify_step(self.step, chosen, ran)
        except OverBudgetError as error:
            return error.peak_bytes

    def _try_anyway(self, chosen: ModelPlan) -> Verification | int:
        """The same for a plan that is predicted to pass the budget; 0 if its step cannot be run."""
        meter = make_meter(device_of(self.step.model, self.step.given))
        needed_bytes = chosen.predicted_bytes - chosen.profile.residents.total_bytes
        does_not_fit = self.ranks.largest(needed_bytes > meter.free_bytes())
        if does_not_fit or chosen.predicted_s > _MOST_TRIAL_S:
            return 0
        try:
            return self._try(chosen)
        except torch.OutOfMemoryError:
            return 0


def _with_surprise(chosen: ModelPlan, peak_bytes: int) -> Profile:
    """The profile with the bytes that the prediction missed, as if they were always there."""
    surprise = peak_bytes - chosen.predicted_bytes
    problem = chosen.profile.problem
    learned = problem.with_resident(problem.resident_bytes + max(0, surprise))
    return replace(chosen.profile, problem=learned)
