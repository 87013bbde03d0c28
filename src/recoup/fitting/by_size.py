"""`fit` with batches of several sizes: further measurements, plans by size, and a real step of each size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from recoup.engines import apply
from recoup.engines.verify import VerifiedSize, verify_step
from recoup.errors import BudgetError, OverBudgetError, SampleError, UnitError
from recoup.measuring.measure import Measured, begin_measurement, measure_step
from recoup.model.slices import find_module
from recoup.model.step import TrainingStep
from recoup.plans.by_size.axes import Size
from recoup.plans.by_size.plans import PlansBySize, plans_by_size
from recoup.plans.by_size.profiles import SizedProfiles, sized_profiles
from recoup.plans.model_plan import ModelPlan, tightest
from recoup.plans.profile import Profile
from recoup.plans.refusal import refusal
from recoup.plans.usable_bytes import usable_bytes
from recoup.progress import note

__all__ = ["check_calls", "check_sizes", "fit_sizes", "measure_like"]

_MOST_ROUNDS = 3


def check_sizes(step: TrainingStep) -> None:
    """Refuses models that must run the same plan on all ranks.

    Raises:
        SampleError: the model's parameters are divided over ranks.
    """
    if step.shards or step.communicates:
        raise SampleError(
            "The model's parameters are divided over ranks, which gather them in the order of their plans: batches of"
            " other sizes on other ranks would make them wait for each other forever. Fit the largest batch alone."
        )


def check_calls(profile: Profile) -> None:
    """Refuses steps whose size cannot be read from one call of the model.

    Raises:
        SampleError: the step calls the model not at all, several times, or without tensors.
    """
    conditions = profile.conditions
    if conditions is None:
        raise SampleError(
            "The step never calls the model itself, so the size of a batch cannot be read from its arguments: let the"
            " step call the model that is fitted (in Lightning, self(batch) in training_step), or fit one sample."
        )
    if conditions.forwards > profile.in_flight:
        raise SampleError(
            f"The step calls the model {conditions.forwards // profile.in_flight} times, and a plan is picked by the"
            " size of one call: give a step that calls it once, or fit the largest sample alone."
        )
    if not conditions.shapes:
        raise SampleError(
            "The model is called without tensors, so the size of a batch cannot be read from its arguments: fit the"
            " largest sample alone."
        )


def measure_like(profile: Profile, step: TrainingStep, settings: str) -> Measured:
    """The same units and recipes as in a profile, measured with another sample.

    Raises:
        SampleError: with that sample the model calls other units.
    """
    names = dict.fromkeys(unit.module for unit in profile.units if unit.module is not None)
    units = [find_module(step.model, name) for name in names]
    step.accumulates = profile.accumulates
    try:
        measurement = begin_measurement(step, units=units, engine=profile.engine, settings=settings)
    except UnitError as error:
        raise SampleError(
            f"With a smaller sample the model does not call all units of the largest one ({error}) Fit it with samples"
            " that run the same code."
        ) from None
    unsafe = {unit.name: unit.unsafe for unit in profile.units if unit.unsafe}
    return measure_step(measurement, accumulates=profile.accumulates, unsafe=unsafe, like=profile)


def fit_sizes(
    chosen: ModelPlan,
    profiles: Sequence[Profile],
    steps: Sequence[TrainingStep],
    *,
    verifies: bool,
) -> tuple[PlansBySize, tuple[VerifiedSize, ...]]:
    """Plans for all sizes under the budget of the largest one's, each tried on a real step.

    Args:
        chosen: the plan for the largest batch.
        profiles: of the other steps.
        steps: with other samples, of the model that was fitted.
        verifies: whether to run real steps.
    """
    sized = sized_profiles([chosen.profile, *profiles])
    note("planning", 0, 1)
    for profile in profiles:
        _check_fits(sized, profile, chosen.budget_bytes)
    found = plans_by_size(sized, chosen)
    if not verifies:
        return found, ()
    # Sized profiles have conditions, and of equal sizes one.
    ran = {sized.size_of(profile): step for profile, step in zip(profiles, steps, strict=True)}
    for _ in range(_MOST_ROUNDS):
        verified, missed_bytes = _verify(found, ran)
        if not missed_bytes:
            return found, verified
        found = found.with_missed(missed_bytes)
    # The plan of the largest batch has held the budget on a real step: a smaller batch takes less under it.
    found = PlansBySize(sized, chosen.budget_bytes, [chosen.schedule.schedule], found.known)
    verified, missed_bytes = _verify(found, ran)
    if missed_bytes:
        size = next(size for size in ran if size not in {one.size for one in verified})
        raise _refusal(sized, size, refusal(tightest(sized.at(size)), chosen.budget_bytes))
    return found, verified


def _check_fits(sized: SizedProfiles, profile: Profile, budget_bytes: int) -> None:
    """Refuses a sample that no plan fits, though it has fewer elements than the largest.

    Raises:
        BudgetError: it names the sample, and its smallest budget.
    """
    least = tightest(profile)
    if least.predicted_bytes > usable_bytes(budget_bytes, profile):
        raise _refusal(sized, sized.size_of(profile), refusal(least, budget_bytes))


def _refusal(sized: SizedProfiles, size: Size, error: BudgetError) -> BudgetError:
    named = ", ".join(f"{axis.name} = {value}" for axis, value in zip(sized.axes, size, strict=True))
    return BudgetError(
        f"With the sample of {named}: {error}",
        budget_bytes=error.budget_bytes,
        smallest_bytes=error.smallest_bytes,
        unit=error.unit,
    )


def _verify(plans: PlansBySize, steps: Mapping[Size, TrainingStep]) -> tuple[tuple[VerifiedSize, ...], int]:
    """Real steps of each size; and by how many bytes the worst passes its prediction, if one passes the budget."""
    verified = []
    for size, step in steps.items():
        plan = plans.plan_at(size)
        try:
            with step.ranks.together():
                apply(step.model, plans)
                verified.append(VerifiedSize(size, plan, verify_step(step, plan)))
        except OverBudgetError as error:
            return tuple(verified), max(1, error.peak_bytes - plan.predicted_bytes)
    return tuple(verified), 0
