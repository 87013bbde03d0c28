"""`fit` with batches of several sizes: further measurements, plans by size, and a real step of each size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from recoup.engines import apply
from recoup.engines.verify import VerifiedSize, verify_step
from recoup.errors import OverBudgetError, SampleError, UnitError
from recoup.measuring.measure import Measured, begin_measurement, measure_step
from recoup.model.slices import find_module
from recoup.model.step import TrainingStep
from recoup.plans.by_size.axes import Size
from recoup.plans.by_size.plans import PlansBySize, plans_by_size
from recoup.plans.by_size.profiles import sized_profiles
from recoup.plans.model_plan import ModelPlan
from recoup.plans.profile import Profile
from recoup.progress import note

__all__ = ["check_sizes", "fit_sizes", "measure_like"]

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


def measure_like(profile: Profile, step: TrainingStep, settings: str) -> Measured:
    """The same units and recipes as in a profile, measured with another sample.

    Raises:
        SampleError: with that sample the model calls other units.
    """
    names = dict.fromkeys(unit.module for unit in profile.units if unit.module is not None)
    units = [find_module(step.model, name) for name in names]
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
    return found, _verify(found, ran)[0]


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
