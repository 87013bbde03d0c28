"""What measured steps teach about a profile's seconds.

A unit that was timed by itself does not show all that a step costs. Real steps under several plans do: their seconds
are explained by the predicted seconds of keeping everything times a factor, what recipes cost beyond that times
another one, and host seconds for each replay and for each tensor that a replay stores. These numbers are fitted, and
become part of the profile's seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from recoup.model.recipe import KEEP
from recoup.planning import Option, Schedule, simulate
from recoup.planning.solvers.base import ALL_SCHEDULES, Bound
from recoup.planning.solvers.bounds import relaxed_bound
from recoup.plans.model_plan import ModelPlan
from recoup.plans.profile import Profile, ProfiledUnit

__all__ = ["Pricing", "learn", "learned_plan", "priced"]

_SHOWN = 20.0
"""Weight of the steps that the report shows, those of the kept plan and of the plain step, beside those of rivals."""
_DOUBT = 0.03
"""Weight, beside measured steps, of the predicted plain step where it was not measured; and of equal factors."""
_LEAST_EXTRA = 0.1
"""Share of the first factor that the second one is at least: recomputing for nothing would look as good as keeping."""


@dataclass(frozen=True, slots=True)
class Pricing:
    """How the seconds of real steps follow from predicted ones.

    Attributes:
        factor: of the predicted seconds of units that are kept.
        extra_factor: of what other recipes were predicted to take beyond that.
        replay_s: for each replay of a unit, or of a module inside it.
        tensor_s: for each tensor that a replay stores.
    """

    factor: float = 1.0
    extra_factor: float = 1.0
    replay_s: float = 0.0
    tensor_s: float = 0.0


def learn(profile: Profile, steps: Sequence[tuple[Schedule, float]], plain_s: float | None) -> Pricing:
    """The pricing that explains measured steps best, by least squares of relative errors; none of it is below 0.

    Where a plan took no longer than the plain step, its replays still cost a little: `_LEAST_EXTRA`.

    Args:
        profile: by which their seconds were predicted.
        steps: the schedules that ran, and the seconds that each took. The first is that of the plan that is
            kept.
        plain_s: seconds of the plain step; ``None`` if that was not run.
    """
    from scipy.optimize import nnls

    plain, predicted_s = profile.plain_schedule, profile.plain.seconds
    known = [(ran, seconds, 1.0 if index else _SHOWN) for index, (ran, seconds) in enumerate(steps)]
    known.append((plain, plain_s, _SHOWN) if plain_s else (plain, predicted_s, _DOUBT))
    # Predictions are linear in the pricing: the factor with the least extra, and each other number, gives a column.
    parts = [(1.0, _LEAST_EXTRA, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0), (0.0, 0.0, 0.0, 1.0)]
    columns = [priced(profile, Pricing(*part)).problem for part in parts]
    rows = [
        [weight * simulate(problem, ran).seconds / seconds for problem in columns]
        for ran, seconds, weight in known
    ]
    doubt = _DOUBT * predicted_s / (plain_s or predicted_s)
    equal = [doubt * (1.0 - _LEAST_EXTRA), -doubt, 0.0, 0.0]
    found, _ = nnls([*rows, equal], [*(weight for _, _, weight in known), 0.0])
    factor, extra, replay_s, tensor_s = map(float, found)
    return Pricing(factor, _LEAST_EXTRA * factor + extra, replay_s, tensor_s)


def priced(profile: Profile, pricing: Pricing) -> Profile:
    """The profile with seconds by a pricing."""
    units = []
    for unit, seen in zip(profile.problem.units, profile.units, strict=True):
        options = [_priced(pricing, seen, unit.options, index) for index in range(len(unit.options))]
        units.append(replace(unit, options=tuple(options)))
    return replace(profile, problem=replace(profile.problem, units=tuple(units)))


def _priced(pricing: Pricing, unit: ProfiledUnit, options: Sequence[Option], index: int) -> Option:
    option, recipe = options[index], unit.recipes[index]
    num_stored = unit.num_stored or (0,) * len(options)

    def seconds(own_s: float, kept_s: float) -> float:
        kept_s = min(own_s, kept_s)
        return pricing.factor * kept_s + pricing.extra_factor * (own_s - kept_s)

    replays_s = again_s = 0.0
    if recipe != KEEP:
        num_replays = recipe.whole + len(recipe.inner)
        replays_s = pricing.replay_s * num_replays + pricing.tensor_s * num_stored[index]
    if not unit.is_code and (option.held_bytes or option.holds_output):
        # Inside a segment's replay, which stores what the unit saves.
        again_s = pricing.replay_s + pricing.tensor_s * num_stored[0]
    return replace(
        option,
        forward_s=seconds(option.forward_s, options[0].forward_s),
        backward_s=seconds(option.backward_s, options[0].backward_s) + replays_s,
        extra_s=pricing.extra_factor * option.extra_s,
        again_s=pricing.extra_factor * option.again_s + again_s,
    )


def learned_plan(plan: ModelPlan, profile: Profile) -> ModelPlan:
    """The same plan, predicted by a profile with other seconds."""
    found, problem = plan.schedule, profile.problem
    predicted = simulate(problem, found.schedule)
    least_s = min(relaxed_bound(problem, found.budget_bytes).seconds, predicted.seconds)
    bound = Bound(least_s, schedules=ALL_SCHEDULES)
    found = replace(found, problem=problem, predicted=predicted, bound=bound)
    return ModelPlan(profile, found, plan.budget_bytes)
