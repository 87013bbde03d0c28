"""One fit, from the first measurement to the verified plan."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import nn

from recoup.auditing import Audit, audit_step
from recoup.devices.meter import device_of, make_meter
from recoup.devices.processes import num_processes
from recoup.engines import ModelPlan, apply, plan
from recoup.engines.racing import Candidate, Race, race
from recoup.engines.real_steps import RealSteps
from recoup.engines.tried import TriedEngine
from recoup.engines.verify import Verification, VerifiedSize, verify_step
from recoup.errors import (
    BudgetError,
    OverBudgetError,
    RecoupError,
    SampleError,
    UnitError,
    VerificationError,
)
from recoup.fitting.by_size import check_calls, fit_sizes, measure_like
from recoup.fitting.wrong_code import WrongCodeError, without, wrong_cut
from recoup.measuring.choosing import Choice
from recoup.measuring.measure import Measured, begin_measurement, measure_step
from recoup.model.accumulation import Accumulates, read_accumulation
from recoup.model.calls import watch_calls
from recoup.model.recipe import Recipe
from recoup.model.slices import find_module
from recoup.model.step import TrainingStep
from recoup.model.units import Units, parts_of, split_units
from recoup.plans.by_hand import plan_by_hand
from recoup.plans.by_size.plans import PlansBySize
from recoup.plans.largest import largest_profile
from recoup.plans.learning import Pricing, learn, learned_plan, priced
from recoup.plans.model_plan import find_schedule, tightest
from recoup.plans.profile import Profile
from recoup.plans.refusal import refusal
from recoup.plans.rivals import plan_with_rivals
from recoup.plans.tightest import session_of
from recoup.plans.tree import leaves_of
from recoup.plans.usable_bytes import smallest_budget, usable_bytes
from recoup.progress import note

__all__ = ["Fitting"]

_MOST_ROUNDS = 3
_MOST_HALVINGS = 4
_NEAR = 1.01
"""A prediction that is no further above the measured peak than this leaves nothing to look for."""
_MOST_SPLITS = 4
_MOST_WRONG = 3
"""Cuts whose generated code is wrong are left out, so many at the most."""
_MOST_TRIAL_S = 30.0
"""A refusal is not verified on a longer step: under the smallest budgets, replays of deep models nest deeply."""


class Fitting:
    """One fit: measures, plans, races and verifies."""

    def __init__(
        self,
        step: TrainingStep,
        *,
        accumulates: Accumulates,
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
        self.accumulates = read_accumulation(step, accumulates)
        self.holds_output, self.insist = holds_output, insist
        # One of several processes that decides alone could run more steps than others, and wait for them in a step.
        decides_for_all = self.ranks.size > 1 or num_processes() == 1
        self.in_flight = self.ranks.largest(in_flight)
        self.races = races and decides_for_all and self.in_flight == 1
        self.engine, self.settings = "eager", settings
        self._budget_bytes = 0
        self._pricing: dict[str, Pricing] = {}
        self._wrong: dict[Recipe, str] = {}  # with the reasons

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
            except Exception as error:
                # Of the user's code, or of the compiler, which another engine may not need.
                if isinstance(error, RecoupError) or self.engine == "eager":
                    raise
                failed[self.engine] = error
        failures = {engine: _in_words(error) for engine, error in failed.items()}
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
        self._budget_bytes = budget_bytes
        for profile, audit in self._profiles(units):
            note("planning", 0, 1)
            if (found := self._fit_profile(profile, budget_bytes, verifies=verifies)) is not None:
                return found[0], audit, found[1]
            tried.append((self._without_wrong(profile), audit))
        least = sorted(
            ((tightest(profile), audit) for profile, audit in tried), key=lambda one: smallest_budget(one[0])
        )
        refused: list[tuple[ModelPlan, int]] = []
        for chosen, audit in least:
            chosen = replace(chosen, budget_bytes=budget_bytes)
            seen = self._try_anyway(chosen) if verifies else 0
            if isinstance(seen, Verification):
                chosen, verification = self._or_keep_everything(chosen, seen)
                return chosen, audit, verification
            refused.append((chosen, seen))
        chosen, peak_bytes = min(refused, key=lambda one: smallest_budget(*one))
        raise refusal(chosen, budget_bytes, measured_bytes=peak_bytes)

    def _fit_profile(
        self, profile: Profile, budget_bytes: int, *, verifies: bool
    ) -> tuple[ModelPlan, Verification | None] | None:
        """The plan, verified; ``None`` if none holds the budget. Cuts whose generated code is wrong are left out.

        Raises:
            VerificationError: gradients are wrong.
        """
        while True:
            profile = self._without_wrong(profile)
            try:
                chosen, rivals = self._plan(profile, budget_bytes)
            except BudgetError:
                return None
            if not verifies:
                return chosen, None
            try:
                found = self._verify(chosen, rivals)
            except WrongCodeError as error:
                if len(self._wrong) == _MOST_WRONG:
                    raise error.original from None
                self._wrong[error.recipe] = error.reason
                continue
            if found and self._wrong:
                return found[0], replace(found[1], notes=(*found[1].notes, *self._wrong.values()))
            return found

    def _without_wrong(self, profile: Profile) -> Profile:
        for recipe in self._wrong:
            profile = without(profile, recipe)
        return profile

    def run_sizes(
        self, chosen: ModelPlan, others: Sequence[TrainingStep], *, verifies: bool
    ) -> tuple[PlansBySize, tuple[VerifiedSize, ...]]:
        """The plans for batches of other sizes, given that for the largest.

        Raises:
            SampleError: with another sample the model calls other units.
        """
        check_calls(chosen.profile)
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

        The unit that sets the smallest budget, and those that must be kept, are split into what they call. After that,
        where ``holds_output`` was not given, come the same measurements for a loop that frees the model's output.
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
            # All ranks have to measure the same recipes, and several forwards in flight are planned by a frontier.
            is_chosen = self.engine != "eager" and self.ranks.size == 1 and self.in_flight == 1
            choose = self._choose if is_chosen else None
            return measure_step(
                measurement, accumulates=self.accumulates, unsafe=unsafe, choose=choose
            ), audit

    def _choose(self, measured: Measured) -> Choice:
        """What a plan for the budget would use, or the tightest plan."""
        profile = measured.profile(self.holds_output is not False)
        most_bytes = usable_bytes(self._budget_bytes, profile)
        found = find_schedule(profile, most_bytes, session_of(profile.problem, proves=False))
        chosen = ModelPlan(profile, found or profile.tightest, self._budget_bytes)
        num_calls = Counter(chosen.recipe(leaf) for leaf in leaves_of(chosen.items))
        return Choice(chosen.predicted_s, num_calls, fits=found is not None)

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
        """The units; those that set the smallest budget or must be kept are split into what they call."""
        profile = least.profile
        found = profile.units[least.schedule.predicted.peak.unit]
        kept = {unit.module for unit in profile.units if unit.unsafe}
        if found.module is None and not kept:
            return None
        with self.step.plain():
            root = watch_calls(self.step)
        names = dict.fromkeys(unit.module for unit in profile.units if unit.module is not None)
        alike = {unit.module for unit in profile.units if unit.kind == found.kind} | kept
        units = {module: find_module(self.step.model, module) for module in names}
        # A unit that calls nothing stays as it is.
        some = [unit for module, unit in units.items() if module in alike and parts_of(root, unit)]
        split = split_units(root, list(units.values()), some)
        return split if len(split) > len(names) else None

    def _plan(self, profile: Profile, budget_bytes: int) -> tuple[ModelPlan, list[Candidate]]:
        """The plan, and who races against it."""

        def make() -> tuple[ModelPlan, list[tuple[str, ModelPlan]]]:
            if self.races:
                return plan_with_rivals(profile, budget_bytes)
            return plan(profile, budget_bytes), []

        chosen, rivals = self.ranks.from_first(make)
        return chosen, [Candidate(name, rival) for name, rival in rivals]

    def _verify(self, chosen: ModelPlan, rivals: list[Candidate]) -> tuple[ModelPlan, Verification] | None:
        """Races and verifies; where a real step passes the budget, plans again with the bytes that were missed.

        Other plans may miss other bytes. Where no plan holds the budget then, or one holds it that needs less than was
        thought, plans between that and those that do not are tried.
        """
        profile, budget_bytes = chosen.profile, chosen.budget_bytes
        fitting: tuple[ModelPlan, Verification] | None = None
        missed_bytes = 0
        for _ in range(_MOST_ROUNDS):
            seen = self._race([Candidate("the planner's choice", chosen), *rivals])
            if not isinstance(seen, int):
                fitting = seen
                break
            missed_bytes = _without_surprise(chosen, profile)
            try:
                chosen, rivals = self._plan(_with_surprise(chosen, seen), budget_bytes)
            except BudgetError:
                break
        if not missed_bytes or (fitting and fitting[0].predicted_bytes <= _NEAR * fitting[1].peak_bytes):
            return fitting
        least = tightest(profile) if fitting is None else fitting[0]
        found = self._find_between(profile, _without_surprise(least, profile), missed_bytes, budget_bytes)
        pricing = dict(self._pricing)
        between: tuple[ModelPlan, Verification] | int = budget_bytes
        with suppress(torch.OutOfMemoryError, VerificationError):
            between = self._race([Candidate("the planner's choice", found)]) if found else budget_bytes
        if isinstance(between, int) or (fitting and fitting[1].seconds <= between[1].seconds):
            self._pricing = pricing
            return fitting
        return between

    def _race(self, candidates: list[Candidate]) -> tuple[ModelPlan, Verification] | int:
        """The plan that wins, verified; or, where a real step passes the budget, that step's peak in bytes."""
        ran = race(RealSteps(self.step, candidates[0].plan.profile), candidates)
        try:
            seen = self._try(ran.winner, ran)
        except VerificationError as error:
            # Ranks may find different gradients wrong.
            wrong = wrong_cut(self.step.model, ran.winner, error.gradients) if self.ranks.size == 1 else None
            if wrong is None:
                raise
            raise WrongCodeError(error, *wrong) from None
        return seen if isinstance(seen, int) else self._or_keep_everything(ran.winner, seen, ran)

    def _or_keep_everything(
        self, chosen: ModelPlan, seen: Verification, ran: Race | None = None
    ) -> tuple[ModelPlan, Verification]:
        """A verified plan; or the one that keeps everything, where the plain step holds the budget against prediction.

        Args:
            chosen: the plan.
            seen: its verification.
            ran: the race that it has won, if there was one.
        """
        plain_bytes, profile = seen.plain_peak_bytes, chosen.profile
        is_surprise = plain_bytes is not None and plain_bytes <= chosen.budget_bytes < profile.plain_bytes
        if self.races and is_surprise and not chosen.keeps_everything:
            everything = plan_by_hand(profile, profile.plain_schedule, chosen.budget_bytes)
            rivals = [Candidate("keep everything", everything), Candidate("the planner's choice", chosen)]
            with suppress(torch.OutOfMemoryError, VerificationError):
                again = race(RealSteps(self.step, profile), rivals)
                found = self._try(again.winner, again)
                if isinstance(found, Verification):
                    chosen, seen, ran = again.winner, found, again
        return (self._learned(ran) if self.races and ran else chosen), seen

    def _find_between(
        self, profile: Profile, fits_bytes: int, missed_bytes: int, budget_bytes: int
    ) -> ModelPlan | None:
        """Of a few plans that a real step is run with, the largest that holds the budget.

        Args:
            profile: of the step.
            fits_bytes: the predicted peak of a plan that needs less.
            missed_bytes: the predicted peak of a plan that does not hold the budget.
            budget_bytes: to hold.
        """
        found, steps = None, RealSteps(self.step, profile)
        for _ in range(_MOST_HALVINGS):
            target_bytes = (fits_bytes + missed_bytes) // 2
            try:
                chosen, _ = self._plan(profile, target_bytes)
            except BudgetError:
                break
            if chosen.predicted_bytes <= fits_bytes:
                break
            with self.ranks.together():
                apply(self.step.model, chosen)
            peak_bytes = sys.maxsize
            with suppress(torch.OutOfMemoryError, VerificationError):
                peak_bytes = steps.record(budget_bytes).peak_bytes
            if peak_bytes <= budget_bytes:
                found, fits_bytes = replace(chosen, budget_bytes=budget_bytes), target_bytes
            else:
                missed_bytes = chosen.predicted_bytes
        return found

    def _learned(self, ran: Race) -> ModelPlan:
        """The plan that won, predicted by a profile that has learned from all steps of the race."""
        profile, plain_s = ran.winner.profile, ran.plain.seconds if ran.plain else None
        laps = sorted(ran.laps, key=lambda one: one[0].plan is not ran.winner)
        steps = [(candidate.plan.schedule.schedule, lap.seconds) for candidate, lap in laps]
        ended = [(schedule, seconds) for schedule, seconds in steps if seconds < math.inf]

        def make() -> tuple[Pricing, ModelPlan]:
            pricing = learn(profile, ended, plain_s)
            return pricing, learned_plan(ran.winner, priced(profile, pricing))

        # All ranks know the same seconds, but processors may differ in the last bit of a sum.
        self._pricing[profile.engine], learned = self.ranks.from_first(make)
        return learned

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


def _in_words(error: Exception) -> str:
    """Why an engine has no plan; errors of others may be long, and may not say what they are."""
    if isinstance(error, (RecoupError, torch.OutOfMemoryError)):
        return str(error)
    return f"{type(error).__name__}: {(str(error).strip() or 'no text').splitlines()[0]}"


def _without_surprise(chosen: ModelPlan, profile: Profile) -> int:
    """The peak of a plan as a profile predicts it that has learned of no surprise."""
    learned_bytes = chosen.profile.problem.resident_bytes - profile.problem.resident_bytes
    return chosen.predicted_bytes - learned_bytes


def _with_surprise(chosen: ModelPlan, peak_bytes: int) -> Profile:
    """The profile with the bytes that the prediction missed, as if they were always there."""
    surprise = peak_bytes - chosen.predicted_bytes
    problem = chosen.profile.problem
    learned = problem.with_resident(problem.resident_bytes + max(0, surprise))
    return replace(chosen.profile, problem=learned)
